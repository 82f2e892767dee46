"""Command lines without what people would not want in a file that they share."""

from __future__ import annotations

import re
from collections.abc import Sequence

MASK = "***"

_SECRET_WORDS = frozenset(
    {"apikey", "auth", "credential", "credentials", "key", "passphrase", "passwd", "password", "pwd", "secret", "token"}
)
# Tokens of well-known services, and a user's password in an address.
_SECRET_VALUE = re.compile(r"\b(?:hf_|sk-|ghp_|gho_|github_pat_|glpat-|xox[abps]-|AKIA)[\w-]{8,}")
_PASSWORD_IN_URL = re.compile(r"(?<=://)([^/@\s:]*):[^/@\s]+(?=@)")
_NUMBER = re.compile(r"[-+.\deE]+")


def masked(command: Sequence[str]) -> list[str]:
    """Return the command line with ``***`` for each value that its name or its look says is secret.

    Names are taken from ``--api-key VALUE``, ``--api-key=VALUE`` and ``wandb.api_key=VALUE``. A number is no
    secret: ``--key 3`` stays.
    """
    result: list[str] = []
    secret_follows = False
    for word in command:
        name, separator, value = word.partition("=")
        if secret_follows and not word.startswith("-"):
            result.append(_hidden(word))
        elif separator and _is_secret(name):
            result.append(f"{name}={_hidden(value)}")
        else:
            result.append(_PASSWORD_IN_URL.sub(rf"\1:{MASK}", _SECRET_VALUE.sub(MASK, word)))
        secret_follows = not separator and word.startswith("-") and _is_secret(word)
    return result


def _is_secret(name: str) -> bool:
    return not _SECRET_WORDS.isdisjoint(re.split(r"[-_.]", name.lower()))


def _hidden(value: str) -> str:
    return value if _NUMBER.fullmatch(value) else MASK
