"""The models that a recording is given, by the user or by nobody: what may be passed, and by which names they go."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from gradtrace.errors import CaptureError

Models = nn.Module | Mapping[str, nn.Module] | None


def named(models: Models) -> dict[str, nn.Module]:
    """Return the models by their names; one alone goes by its class.

    Raises:
        CaptureError: something else is among them.
    """
    if models is None:
        return {}
    if isinstance(models, nn.Module):
        return {type(models).__name__: models}
    wrong: list[Any] = [name for name, model in models.items() if not isinstance(model, nn.Module)]
    if wrong:
        raise CaptureError(f"{wrong[0]!r} is no nn.Module; pass the model, or a mapping of names to models")
    return dict(models)
