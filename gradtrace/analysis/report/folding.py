"""Which modules the page has. Of more than a browser can hold, the deepest are folded into those that they lie in."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator
from itertools import accumulate, islice
from typing import TYPE_CHECKING

from gradtrace.analysis.labels import names_above

if TYPE_CHECKING:
    from gradtrace.analysis.recording import Recording

MOST_MODULES = 10_000
"""Most modules of a page; a browser draws a table of so many rows within seconds."""

_NAMES = """
SELECT module, any_value(depth) FROM (
    SELECT module, number, depth FROM modules
    UNION ALL
    SELECT DISTINCT module, NULL, NULL FROM records WHERE module IS NOT NULL
)
GROUP BY module
ORDER BY min(number) NULLS LAST, module
"""
_COUNT = f"SELECT count(*) FROM ({_NAMES})"
_BAD = f"""
SELECT module FROM records
WHERE module IS NOT NULL AND (nan_count > 0 OR posinf_count > 0 OR neginf_count > 0)
GROUP BY module ORDER BY min(seq) LIMIT {MOST_MODULES // 2}
"""
_PLACES = """
CREATE OR REPLACE TABLE report_places AS
SELECT unnest($modules::VARCHAR[]) AS module, unnest($shown::VARCHAR[]) AS shown
"""


def fold(run: Recording, failing: str | None) -> int:
    """Make the table ``report_places``: which module stands for each on the page; return how many are folded away.

    Shown are the upper levels of the model, the ``failing`` module and those that were non-finite first. Where all are
    shown the table is empty.
    """
    count: int = run.execute(_COUNT).fetchall()[0][0]
    if count <= MOST_MODULES:
        run.execute(_PLACES, {"modules": [], "shown": []})
        return 0
    levels = {name: name.count(".") + 1 if depth is None else depth for name, depth in run.execute(_NAMES).fetchall()}
    bad = [name for (name,) in run.execute(_BAD).fetchall()]
    shown = _shown(levels, [*_way_to(failing), *bad])
    places = dict(_places(levels, shown))
    run.execute(_PLACES, {"modules": list(places), "shown": list(places.values())})
    return count - len(shown)


def _way_to(failing: str | None) -> Iterator[str]:
    if failing is not None:
        yield failing
        yield from names_above(failing)


def _shown(levels: dict[str, int], wanted: Iterable[str]) -> set[str]:
    """Return the levels that there is room for, ``wanted`` modules in their order, and others while there is room."""
    half = MOST_MODULES // 2
    counts = Counter(levels.values())
    depths = sorted(counts)
    whole = {
        depth for depth, sum_ in zip(depths, accumulate(counts[depth] for depth in depths), strict=True) if sum_ <= half
    }
    shown = {name for name, depth in levels.items() if depth in whole}
    for names in (wanted, sorted(levels, key=levels.__getitem__)):
        new = (name for name in names if name in levels and name not in shown)
        shown.update(list(islice(dict.fromkeys(new), MOST_MODULES - len(shown))))
    return shown


def _places(levels: Iterable[str], shown: Collection[str]) -> Iterator[tuple[str, str]]:
    """Yield each module with the one that stands for it; one that lies in none that is shown is left out."""
    for name in levels:
        place = name if name in shown else next((outer for outer in names_above(name) if outer in shown), None)
        if place is not None:
            yield name, place
