"""JSON actions on generated word problems, and answers to them: a cold start for `rema` with `actions: true`."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence

from cothink.actions import ACTIONS, write
from cothink.builtin.chats import careful, solution, work
from cothink.builtin.prompts import INSTRUCT
from cothink.conversations import Conversation, Conversations, chat
from cothink.tasks import DataError
from cothink.tasks.wordsums import MAX_LEVEL
from cothink.tasks.wordsums import load as problems
from cothink.types import Role, Task

CARE = {"DECOMPOSE": 0.97, "REWRITE": 0.9, "EMPTY": 0.8}
"""The chance that one arithmetic step is done right: the less a solver is told, the more it errs on long problems."""


def load(
    roles: Mapping[str, Role],
    *,
    planner: str = "meta",
    count: int = 1000,
    levels: int | Sequence[int] = (1, MAX_LEVEL),
    distractors: int | Sequence[int] = (0, 2),
    shares: tuple[float, float, float] = (1.0, 1.0, 1.0),
    seed: int = 0,
) -> Conversations:
    """`count` training problems, each with one action of the `planner`; every other role solves what it then reads.

    DECOMPOSE names the steps, REWRITE tells the problem without what does not matter, EMPTY is empty; `shares` are
    their relative weights, in this order, whatever the problem.
    """
    if min(shares) < 0 or sum(shares) <= 0:
        raise DataError(f"wordactions: shares={list(shares)}; write three weights of 0 or more, one above 0")
    made: list[Conversation] = []
    for task in problems("train", levels=levels, count=count, seed=seed, distractors=distractors):
        rng = random.Random(f"wordactions/{seed}/{task.id}")
        action = rng.choices(ACTIONS, shares)[0]
        output = {"DECOMPOSE": ", ".join(careful(task)), "REWRITE": plainer(task.question), "EMPTY": ""}[action]
        asked = INSTRUCT.format(question=task.question, plan=output) if output else task.question
        answer = _solved(rng, task, action)
        for role in roles.values():
            said = (task.question, write(action, output)) if role.name == planner else (asked, answer)
            made.append(Conversation(role.name, chat(role, said), task.id, task.question))
    return Conversations(made, {"rows": len(made)})


def plainer(question: str) -> str:
    """A word problem without the sentences about other people and other things."""
    opening, *told, asked = question.split(". ")
    who, _, what = opening.partition(" counts ")
    kept = [line for line in told if line.startswith(f"{who} ") and line.endswith(f" {what}")]
    return ". ".join([opening, *kept, asked])


def _solved(rng: random.Random, task: Task, action: str) -> str:
    steps = careful(task)
    if rng.random() < CARE[action] ** (len(steps) - 1):
        text, total = work(steps)
        return f"{text} \\boxed{{{total}}}"
    return solution(rng, task, care=0.0)[0]
