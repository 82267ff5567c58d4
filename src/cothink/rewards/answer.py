"""Rewards on the answer: plain correctness, and the base and sparse rewards of ReMA (arXiv 2503.09501)."""

from __future__ import annotations

import asyncio
from typing import Literal

from cothink.types import FINISHED, Episode, Task, Turn
from cothink.verify import averify_task, has_answer_format, has_box


async def correct(task: Task, turn: Turn, episode: Episode) -> float | None:
    """1 if the episode's graded text is right, else 0; on the graded turn only."""
    if episode.finish.turn is not None and turn.id != episode.finish.turn:
        return None
    return episode.accuracy


async def base(
    task: Task,
    turn: Turn,
    episode: Episode,
    *,
    right: float = 1.0,
    wrong: float = -0.5,
    unformatted: float = -1.0,
    strict: bool = True,
) -> float | None:
    """ReMA's reward of the answering role: right, wrong with an answer format, or without one.

    `strict`: a right value outside a box counts as unformatted.
    """
    if not turn.completion.output_ids and turn.id != episode.finish.turn:
        return None
    verdict = await averify_task(task, turn.text, strict=strict)
    if verdict.verdict == "right":
        return right
    return wrong if has_answer_format(turn.text) else unformatted


async def plan(
    task: Task,
    turn: Turn,
    episode: Episode,
    *,
    leak: Literal["replace", "add", "ignore"] = "replace",
    penalty: float = -1.0,
    strict: bool = True,
) -> float | None:
    """ReMA's reward of the planning role: the share of right answers among the turns that follow its plan directly.

    A plan that holds an explicit answer format gets `penalty` instead (`replace`), on top (`add`), or not (`ignore`).
    """
    answers = [t for t in episode.turns if turn.id in t.parents]
    if not answers:
        return None
    verdicts = await asyncio.gather(*(averify_task(task, t.text, strict=strict) for t in answers))
    value = sum(v.verdict == "right" for v in verdicts) / len(verdicts)
    if leak == "ignore" or not has_box(turn.text):
        return value
    return penalty if leak == "replace" else value + penalty


async def sparse(task: Task, turn: Turn, episode: Episode) -> float | None:
    """ReMA's multi-turn reward, on the graded turn: 1 if the answer is right and the team itself finished, else 0."""
    if episode.finish.turn is not None and turn.id != episode.finish.turn:
        return None
    return episode.accuracy if episode.finish.reason == FINISHED else 0.0
