"""Evaluation plans and verdicts on pairs of worked answers: a cold start for the workflow `judge` on `wordpairs`."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence

from cothink.builtin.chats import work
from cothink.conversations import Conversation, Conversations, chat
from cothink.tasks import wordpairs, wordsums
from cothink.types import Role, Task

PAIR = "Question:\n{question}\n\nAnswer A:\n{answer_a}\n\nAnswer B:\n{answer_b}"
PLANNED = PAIR + "\n\nEvaluation plan:\n{plan}"
VAGUE = "Check the sums."


def load(
    roles: Mapping[str, Role],
    *,
    planner: str = "meta",
    count: int = 1000,
    levels: int | Sequence[int] = (1, 4),
    full: float = 0.5,
    care: tuple[float, float] = (0.95, 0.5),
    seed: int = 0,
) -> Conversations:
    """`count` training pairs: the `planner` reads the question, every other role the pair and, if any, the plan.

    A plan names the steps with probability `full`, else it is vague; `care` is how often a judge works them out after
    a full plan and without one; otherwise it tosses a coin.
    """
    made: list[Conversation] = []
    steps = {t.question: t.meta["steps"] for t in wordsums.load("train", levels=levels, count=count, seed=seed)}
    for task in wordpairs.load("train", levels=levels, count=count, seed=seed):
        rng = random.Random(f"wordverdicts/{seed}/{task.id}")
        whole = planner in roles and rng.random() < full
        plan = ", ".join(steps[task.question]) if whole else VAGUE
        layout = PLANNED if planner in roles else PAIR
        asked = layout.format(question=task.question, plan=plan, **task.meta)
        answer = _verdict(rng, task, steps[task.question], care[0 if whole else 1])
        for role in roles.values():
            said = (task.question, plan) if role.name == planner else (asked, answer)
            made.append(Conversation(role.name, chat(role, said), task.id, task.question))
    return Conversations(made, {"rows": len(made)})


def _verdict(rng: random.Random, task: Task, steps: Sequence[str], care: float) -> str:
    if rng.random() >= care:
        return f"[[{rng.choice('AB')}]]"
    ends = [task.meta[f"answer_{side}"].removesuffix(".").rpartition(" ")[2] for side in "ab"]
    return f"{work(steps)[0]} A {ends[0]}, B {ends[1]}. [[{task.answer}]]"
