"""The consistency reward of ReMA's ablation (arXiv 2503.09501): do the answers to one plan agree? Gold is ignored."""

from __future__ import annotations

from collections import Counter
from typing import Literal

from cothink.rewards._plans import Leak, answers, priced
from cothink.types import Episode, Task, Turn
from cothink.verify import has_box
from cothink.votes import answer_of, classes

LEAST = 4
"""Answers to one plan below which agreement means little."""


async def plan(
    task: Task,
    turn: Turn,
    episode: Episode,
    *,
    leak: Leak = "replace",
    penalty: float = -1.0,
    among: Literal["all", "answered"] = "all",
) -> float | None:
    """The share of the most frequent answer among the turns that follow a plan directly.

    Answers that the verifier takes for equal are one answer. The share is of `all` turns, or of those that state an
    answer; 0 when more than half state none. A leak costs what it costs in `answer.plan`. None below four turns,
    which a recipe must ask for (`n_solutions`); a plan that was cut before anyone could follow it gets 0.
    """
    followed = answers(turn, episode)
    sampled = any(t.completion.output_ids for t in followed)
    if not followed or (sampled and len(followed) < LEAST):
        return None
    stated = [c for c in await classes(task, [answer_of(task, t.text) for t in followed]) if c is not None]
    value = 0.0
    if 2 * len(stated) >= len(followed):
        most = max(Counter(stated).values())
        value = most / (len(followed) if among == "all" else len(stated))
    return priced(value, has_box(turn.text), leak, penalty)
