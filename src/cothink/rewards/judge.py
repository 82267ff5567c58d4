"""Rewards of a judging team (arXiv 2503.09501, its judge experiments; the paper gives no values)."""

from __future__ import annotations

from cothink.rewards._plans import RIGHT, UNFORMATTED, WRONG, Leak, answers, mean_correctness, priced
from cothink.types import Episode, Task, Turn
from cothink.verify import averify_task, has_verdict


async def verdict(
    task: Task,
    turn: Turn,
    episode: Episode,
    *,
    right: float = RIGHT,
    wrong: float = WRONG,
    invalid: float = UNFORMATTED,
) -> float | None:
    """The reward of the judging role: right, wrong, or without exactly one kind of verdict marker."""
    if not turn.completion.output_ids and turn.id != episode.finish.turn:
        return None
    found = (await averify_task(task, turn.text)).verdict
    return {"right": right, "wrong": wrong}.get(found, invalid)


async def plan(
    task: Task, turn: Turn, episode: Episode, *, leak: Leak = "replace", penalty: float = -1.0
) -> float | None:
    """The reward of the planning role: the share of right verdicts among the turns that follow its plan directly.

    A plan that holds a verdict marker gets `penalty` instead (`replace`), on top (`add`), or not (`ignore`).
    """
    followed = answers(turn, episode)
    if not followed:
        return None
    value = await mean_correctness(task, followed, "indicator", strict=True)
    return priced(value, has_verdict(turn.text), leak, penalty)
