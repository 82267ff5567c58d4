"""Pairs of worked answers to generated word problems, one of them with a slip: a judge task that needs no data."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

from cothink.tasks import wordsums
from cothink.tasks.judge import Swap, both_orders, pair_task
from cothink.types import Task


def load(
    split: str = "train",
    *,
    levels: int | Sequence[int] = (1, 4),
    count: int | None = None,
    seed: int = 0,
    swap: Swap = "none",
) -> list[Task]:
    """Pairs over `count` problems of `wordsums`, whose splits share no skeleton; the better answer is first by a coin.

    `swap` both adds every pair with its answers swapped.
    """
    tasks = [_pair(task) for task in wordsums.load(split, levels=levels, count=count, seed=seed)]
    return both_orders(tasks) if swap == "both" else tasks


def _pair(task: Task) -> Task:
    rng = random.Random(f"wordpairs/{task.id}")
    steps: Sequence[Any] = task.meta["steps"]
    right = _worked(steps, None, 0)
    wrong = _worked(steps, rng.randrange(1, len(steps)), rng.choice((1, 2, 3, 10)))
    name, facts = task.id.replace("wordsums", "wordpairs"), {"level": task.meta["level"]}
    if rng.random() < 0.5:
        return pair_task(name, task.question, right, wrong, "A", facts)
    return pair_task(name, task.question, wrong, right, "B", facts)


def _worked(steps: Sequence[str], slip: int | None, by: int) -> str:
    """The steps as sums, the one at `slip` off by `by`: no later step makes up for it."""
    value = wordsums.apply(0, steps[0])
    lines = []
    for place, step in enumerate(steps[1:], 1):
        verb, _, number = step.partition(" ")
        told = {"add": f"+ {number}", "take": f"- {number}", "double": "* 2"}[verb]
        result = wordsums.apply(value, step) + (by if place == slip else 0)
        lines.append(f"{value} {told} = {result}.")
        value = result
    return f"{' '.join(lines)} The answer is {value}."
