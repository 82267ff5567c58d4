"""When numbers stop being finite: how many updates may be left out in a row, and what a run says when it stops."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

BAD_UPDATES = 3
"""Updates in a row without a finite loss and gradient that end a run."""


class TrainingError(RuntimeError):
    """Training that cannot go on, with what the user may try."""


def diagnosis(parameters: Iterable[Any], loss: float, look: str, cure: str) -> str:
    """Where numbers stopped being finite; `look` says where a broken loss comes from, `cure` what helps a gradient."""
    said = f"{BAD_UPDATES} updates in a row had a non-finite loss or gradient; none was applied"
    if any(not bool(p.isfinite().all()) for p in parameters):
        return f"{said}. Its weights are not finite themselves: start again from a checkpoint that is"
    if not math.isfinite(loss):
        return f"{said}. The loss is {loss}: look at {look}"
    return f"{said}. The loss is finite, its gradient is not: {cure} usually help"
