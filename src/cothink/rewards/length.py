"""Rewards on length."""

from __future__ import annotations

from cothink.types import Episode, Task, Turn


def overlong(
    task: Task, turn: Turn, episode: Episode, *, max_length: int, cache: int, factor: float = 1.0
) -> float | None:
    """DAPO's soft penalty (arXiv 2503.14476): 0 up to `max_length - cache` tokens, then down to -factor."""
    if not 0 < cache <= max_length:
        raise ValueError(f"length.overlong: cache={cache} must lie between 1 and max_length={max_length}")
    over = len(turn.completion.output_ids) - (max_length - cache)
    return -factor * min(max(over / cache, 0.0), 1.0)
