"""Signals of collapse and laziness, as pure functions of what a run logs (spec/credit.md 7)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median


@dataclass(frozen=True, slots=True)
class Alarm:
    """A signal's values and the first steps at which it asks to warn and to stop, None where it never does."""

    values: list[float | None]
    warn: int | None
    stop: int | None


def drawdown(
    series: Sequence[float], *, rate: float = 0.1, warn: float = 0.15, stop: float = 0.25, patience: int = 20
) -> Alarm:
    """Fall of the smoothed reward below its best, as a share (signal 1)."""
    values: list[float | None] = []
    best = -math.inf
    for level in smooth(series, rate):
        best = max(best, level)
        values.append(1 - level / best if best > 0 else 0.0)
    return Alarm(values, _first(values, warn, 1), _first(values, stop, patience))


def smooth(series: Sequence[float], rate: float = 0.1) -> list[float]:
    """Exponential moving average that starts at the first value."""
    levels: list[float] = []
    for x in series:
        levels.append(levels[-1] + rate * (x - levels[-1]) if levels else x)
    return levels


def gradient_norms(
    series: Sequence[float | None],
    *,
    window: int = 50,
    min_history: int = 10,
    warn: float = 5.0,
    stop: float = 10.0,
    patience: int = 3,
) -> Alarm:
    """Gradient norm over the median of the previous ones (signal 6); a non-finite norm (or None) stops at once."""
    finite: list[float] = []
    values: list[float | None] = []
    broken = None
    for step, norm in enumerate(series):
        if norm is None or not math.isfinite(norm):
            broken = step if broken is None else broken
            values.append(None)
            continue
        middle = median(finite[-window:]) if len(finite) >= min_history else 0.0
        values.append(norm / middle if middle > 0 else None)
        finite.append(norm)
    stops = [s for s in (_first(values, stop, patience), broken) if s is not None]
    return Alarm(values, _first(values, warn, 1), min(stops, default=None))


def running_max(series: Sequence[float], *, fraction: float = 0.85) -> int | None:
    """First place where the value is below `fraction` of the best so far (signal 2)."""
    best = -math.inf
    for step, x in enumerate(series):
        best = max(best, x)
        if x < fraction * best:
            return step
    return None


def _first(values: Sequence[float | None], threshold: float, patience: int) -> int | None:
    run = 0
    for step, value in enumerate(values):
        run = run + 1 if value is not None and value > threshold else 0
        if run == patience:
            return step
    return None


def categorical_entropy(probabilities: Sequence[float]) -> float:
    """Entropy in nats; divide by log(number of outcomes) for a share (signal 12)."""
    return -math.fsum(p * math.log(p) for p in probabilities if p > 0)


def mutual_information(counts: Sequence[Sequence[float]], *, smoothing: float = 0.0) -> float:
    """I(message; next action) in nats from a table message -> action -> count (signal 10)."""
    table = [[c + smoothing for c in row] for row in counts]
    total = math.fsum(map(math.fsum, table))
    if total <= 0:
        return 0.0
    rows, columns = [math.fsum(row) for row in table], [math.fsum(column) for column in zip(*table)]
    return math.fsum(
        c / total * math.log(c * total / (rows[i] * columns[j]))
        for i, row in enumerate(table)
        for j, c in enumerate(row)
        if c > 0
    )


def entropy_covariance(logprobs: Sequence[float], advantages: Sequence[float]) -> list[float]:
    """(log-prob - mean) * (advantage - mean) of every token: a positive mean says that the entropy will fall."""
    if not logprobs:
        return []
    p, a = math.fsum(logprobs) / len(logprobs), math.fsum(advantages) / len(advantages)
    return [(x - p) * (y - a) for x, y in zip(logprobs, advantages, strict=True)]
