"""What the rewards of a planning role share: the answers to its plan, and the price of giving the answer away."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Literal

from cothink.types import Episode, Task, Turn
from cothink.verify import averify_task, has_answer_format

Leak = Literal["replace", "add", "ignore"]
Correctness = Literal["indicator", "score"]

RIGHT, WRONG, UNFORMATTED = 1.0, -0.5, -1.0
"""ReMA's score of one answer: right, wrong with an answer format, without one."""


def answers(turn: Turn, episode: Episode) -> list[Turn]:
    """The turns that answer a plan directly."""
    return [t for t in episode.turns if turn.id in t.parents]


async def mean_correctness(task: Task, turns: Sequence[Turn], correctness: Correctness, strict: bool) -> float:
    """Mean over the answers of right (1) or not (0), or of their scores."""
    verdicts = await asyncio.gather(*(averify_task(task, t.text, strict=strict) for t in turns))
    if correctness == "indicator":
        return sum(v.right for v in verdicts) / len(verdicts)
    found = [RIGHT if v.right else WRONG if has_answer_format(t.text) else UNFORMATTED for v, t in zip(verdicts, turns)]
    return sum(found) / len(found)


def priced(value: float, leaked: bool, leak: Leak, penalty: float) -> float:
    """The value of a plan after the penalty for a leak: instead of it, on top of it, or none."""
    if leak == "ignore" or not leaked:
        return value
    return penalty if leak == "replace" else value + penalty
