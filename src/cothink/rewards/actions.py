"""The reward of a planner that writes JSON actions (arXiv 2503.09501, figure 4; its format terms are not published)."""

from __future__ import annotations

from cothink.actions import read
from cothink.rewards._plans import Correctness, Leak, answers, mean_correctness, priced
from cothink.types import Episode, Task, Turn
from cothink.verify import has_box


async def plan(
    task: Task,
    turn: Turn,
    episode: Episode,
    *,
    invalid: float = -1.0,
    leak: Leak = "replace",
    penalty: float = -1.0,
    correctness: Correctness = "indicator",
    strict: bool = True,
) -> float | None:
    """As `answer.plan`; a text that is no valid action, or was cut, gets `invalid`, whatever came of it.

    A leak is an answer format in the text or in the output as it reads once the JSON is undone.
    """
    followed = answers(turn, episode)
    if not followed:
        return None
    action = None if turn.completion.finish_reason == "length" else read(turn.completion.text)
    if action is None:
        return invalid
    value = await mean_correctness(task, followed, correctness, strict)
    return priced(value, has_box(turn.completion.text) or has_box(action.output), leak, penalty)
