"""Rewards on the answer: plain correctness, and the base and sparse rewards of ReMA (arXiv 2503.09501)."""

from __future__ import annotations

from cothink.rewards._plans import RIGHT, UNFORMATTED, WRONG, Correctness, Leak, answers, mean_correctness, priced
from cothink.types import FINISHED, Episode, Task, Turn
from cothink.verify import averify_task, has_answer_format, has_box


async def correct(task: Task, turn: Turn, episode: Episode) -> float | None:
    """1 if the answer is right, else 0: of the graded text, and of each answer sampled beside the graded one."""
    return await _grade(task, turn, episode)


async def base(
    task: Task,
    turn: Turn,
    episode: Episode,
    *,
    right: float = RIGHT,
    wrong: float = WRONG,
    unformatted: float = UNFORMATTED,
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
    leak: Leak = "replace",
    penalty: float = -1.0,
    correctness: Correctness = "indicator",
    strict: bool = True,
) -> float | None:
    """ReMA's reward of the planning role: the mean correctness of the turns that follow its plan directly.

    An answer counts 1 or 0 (`indicator`), or as `base` would score it (`score`). A plan that holds an explicit answer
    format gets `penalty` instead (`replace`), on top (`add`), or not (`ignore`).
    """
    followed = answers(turn, episode)
    if not followed:
        return None
    value = await mean_correctness(task, followed, correctness, strict)
    return priced(value, has_box(turn.text), leak, penalty)


async def sparse(task: Task, turn: Turn, episode: Episode) -> float | None:
    """ReMA's multi-turn reward, on the graded turn: 1 if the answer is right and the team itself finished, else 0."""
    grade = await _grade(task, turn, episode)
    return grade if grade is None or episode.finish.reason == FINISHED else 0.0


async def leaf(task: Task, turn: Turn, episode: Episode) -> float | None:
    """1 if the answer is right, else 0, of a turn that no other answers: the leaves of a tree (arXiv 2412.01928).

    Credited to the team (`role: refiner, to: team`), the return of a turn is the mean over what follows it: its value.
    """
    if any(turn.id in other.parents for other in episode.turns):
        return None
    return float((await averify_task(task, turn.text)).right)


async def _grade(task: Task, turn: Turn, episode: Episode) -> float | None:
    """The grade of the graded turn, or of an answer of the same role to the same parents; None for other turns."""
    graded = next((t for t in episode.turns if t.id == episode.finish.turn), turn)
    if turn.id == graded.id:
        return episode.accuracy
    if (turn.role, turn.parents) != (graded.role, graded.parents):
        return None
    return float((await averify_task(task, turn.text)).right)
