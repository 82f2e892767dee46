"""What outermost calls return in a step that is only watched: one sum for each output tells that it is finite."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable

from torch import Tensor

from gradtrace.capture.session import CANNOT_MEASURE, Session
from gradtrace.capture.sites import Site


class OutputWatch:
    """Looks at outputs. ``look_at_weights`` is called before a bad one gets its row: a parameter's comes first."""

    def __init__(self, session: Session, look_at_weights: Callable[[], None]) -> None:
        self._session = session
        self._look_at_weights = look_at_weights

    def look(self, outputs: Iterable[tuple[str, Site, Tensor]], call: int, micro_step: int) -> dict[str, Tensor]:
        """Return the sums of outputs by their paths; one that is not finite gets a row, on an accelerator later."""
        totals: dict[str, Tensor] = {}
        for path, site, value in outputs:
            try:
                total = totals[path] = self._session.statistics.total(value)
                is_finite = self._is_finite(value, total)
            except CANNOT_MEASURE as error:
                self._session.cannot_measure(error)
                continue
            if not is_finite:
                self._session.see(site, value, call, micro_step, arrived=())
        return totals

    def _is_finite(self, value: Tensor, total: Tensor) -> bool:
        """Whether an output is known to be finite."""
        statistics = self._session.statistics
        if statistics.waits(total):
            return False
        if math.isfinite(total.item()) or statistics.all_finite(value):
            return True
        self._look_at_weights()
        return False
