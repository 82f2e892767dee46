"""Text of other people made fit to be shown: names, paths and words from scripts and recordings.

The one place that decides what a terminal, a log or a page may be given. A terminal acts on control characters, a line
break makes two lines of one, and marks that turn the direction of writing or have no width let a name look like
another. All these are shown as the escapes that Python has for them. Plain functions; no other module of gradtrace.
"""

from __future__ import annotations

import html
import json
import re
import shlex
import unicodedata

MOST_SHOWN = 1_000
"""Characters of one cell or line that a terminal is given; nobody reads more, and a name may have a million."""

_TAIL = 200


class _Escapes(dict[int, str]):
    """Maps a code point to what stands for it, each as it is met."""

    def __missing__(self, code: int) -> str:
        letter = chr(code)
        self[code] = shown = letter if letter.isprintable() else repr(letter)[1:-1]
        return shown


_ESCAPES = _Escapes()
_IN_LINES = _Escapes({ord("\n"): "\n"})
_NOT_PLAIN = re.compile(r"[^\x20-\x7e]")
_NOT_ASCII = re.compile(r"[^\x00-\x7f]")


def printable(text: str) -> str:
    """Return the text with everything that is no visible character, but blanks, as an escape: ``\\n``, ``\\x1b``.

    What comes out is on one line and goes through once more unchanged.
    """
    return text if text.isprintable() else text.translate(_ESCAPES)


def printable_lines(text: str) -> str:
    """Return the same, with line breaks left as they are: for text that has lines of its own."""
    return text if text.isprintable() else text.translate(_IN_LINES)


def shortened(text: str, most: int = MOST_SHOWN) -> str:
    """Return the text without its middle where it is longer than ``most`` characters."""
    if len(text) <= most:
        return text
    return f"{text[: most - _TAIL]} ... ({len(text):,} characters) ... {text[-_TAIL:]}"


def width(text: str) -> int:
    """Return how many columns of a terminal a printable text takes."""
    if text.isascii():
        return len(text)
    return sum(map(_columns, text))


def _columns(letter: str) -> int:
    if unicodedata.category(letter) in ("Mn", "Me"):
        return 0
    return 2 if unicodedata.east_asian_width(letter) in ("W", "F") else 1


def shell_word(text: str) -> str:
    """Return the text as one word for a shell, to be pasted: control characters by way of ``$'...'``."""
    if text.isprintable():
        return shlex.quote(text)
    quoted = text.replace("\\", "\\\\").replace("'", "\\'")
    return f"$'{_in_bytes(quoted)}'"


def _in_bytes(text: str) -> str:
    """Return text with the bytes of what is not printable as ``\\xNN``."""
    return "".join(
        letter if letter.isprintable() else "".join(f"\\x{byte:02x}" for byte in _bytes_of(letter)) for letter in text
    )


def _bytes_of(letter: str) -> bytes:
    # A file's name need not be Unicode: Python has a byte that is none as half of a character, \udc80 to \udcff.
    return letter.encode(errors="surrogateescape" if "\udc80" <= letter <= "\udcff" else "surrogatepass")


def json_line(text: str) -> str:
    """Return JSON on one line with everything that is no visible character, in its strings, as JSON's escapes."""
    if text.isprintable():
        return text
    return _NOT_PLAIN.sub(lambda found: found[0] if found[0].isprintable() else _json_escape(found[0]), text)


def json_ascii(text: str) -> str:
    """Return JSON with all that is no ASCII as JSON's escapes."""
    return _NOT_ASCII.sub(lambda found: _json_escape(found[0]), text)


def _json_escape(letter: str) -> str:
    return json.dumps(letter)[1:-1]


def html_words(text: str) -> str:
    """Return a sentence as HTML: a name in it that turns the direction of writing shows as what it is."""
    return html_text(printable(shortened(text)))


def html_text(text: str) -> str:
    """Return HTML that holds this very text; what HTML cannot hold, NUL and halves of characters, as escapes."""
    escaped = html.escape(text).replace("\r", "&#13;").replace("\0", "\\x00")
    return escaped.encode(errors="backslashreplace").decode()
