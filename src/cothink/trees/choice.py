"""Which rows are trained when there are too many: caps per role and task, taken round-robin over tasks."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator, Mapping, Sequence
from typing import Literal, TypeVar

from cothink.trees.labels import Group
from cothink.trees.rows import Row

Balance = Literal["round_robin", "none", "difficulty"]
Any = TypeVar("Any")

MAX_ROWS = 6000
"""Rows of a role that are trained at most, for examples and pairs separately: the paper's largest sets."""
PER_TASK: Mapping[str, int] = {"generator": 2}
PER_TASK_OTHERS = 4


def per_task(limit: int | Mapping[str, int] | Literal["default"] | None, role: str) -> int | None:
    """The cap of one role: one number for all, one by name, or the default: 2 for a generator, 4 for others."""
    if limit == "default":
        return PER_TASK.get(role, PER_TASK_OTHERS)
    return limit.get(role) if isinstance(limit, Mapping) else limit


def choose(
    rows: Sequence[Row],
    *,
    most: int | None = MAX_ROWS,
    each: int | None = None,
    balance: Balance = "round_robin",
    difficulty: Mapping[str, float] | None = None,
    seed: int = 0,
) -> list[Row]:
    """At most `most` of one role's rows, at most `each` of a task; seeded, and independent of the order of tasks.

    `round_robin`: no task gives its second row before every other has given one; within a task parents rotate.
    `none`: uniform over rows. `difficulty`: equal numbers from the easy, middle and hard third of the tasks by
    `difficulty`, as many as the smallest third has.
    """
    queues = {task: mine[:each] for task, mine in _queues(rows, seed).items()}
    if balance == "difficulty":
        thirds = [
            list(_round_robin({t: queues[t] for t in third}, seed)) for third in _thirds(queues, difficulty or {})
        ]
        size = min(map(len, thirds))
        size = size if most is None else min(size, most // 3)
        return [row for third in thirds for row in third[:size]]
    if balance == "none":
        return _shuffled([row for task in sorted(queues) for row in queues[task]], seed, "rows")[:most]
    return list(_round_robin(queues, seed))[:most]


def _queues(rows: Sequence[Row], seed: int) -> dict[str, list[Row]]:
    """The rows of every task, in the order they are taken: parents rotate, each parent's rows shuffled."""
    tasks: dict[str, dict[str, list[Row]]] = {}
    for row in sorted(rows, key=lambda row: row.row_id):
        tasks.setdefault(row.task_id, {}).setdefault(f"{row.round}/{row.group}", []).append(row)
    found = {}
    for task, parents in tasks.items():
        order = _shuffled(sorted(parents), seed, task)
        found[task] = list(_rotate([_shuffled(parents[p], seed, f"{task}/{p}") for p in order]))
    return found


def _round_robin(queues: Mapping[str, Sequence[Row]], seed: int) -> Iterator[Row]:
    yield from _rotate([queues[task] for task in _shuffled(sorted(queues), seed, "tasks")])


def _rotate(lists: Sequence[Sequence[Row]]) -> Iterator[Row]:
    """The first of every list, then the second of every list, and so on."""
    for place in range(max(map(len, lists), default=0)):
        yield from (one[place] for one in lists if place < len(one))


def _shuffled(items: Sequence[Any], seed: int, what: str) -> list[Any]:
    order = list(items)
    random.Random(f"{seed}/choice/{what}").shuffle(order)
    return order


def _thirds(tasks: Mapping[str, object], difficulty: Mapping[str, float]) -> list[list[str]]:
    ranked = sorted(tasks, key=lambda t: (difficulty.get(t, 0.0), t))
    cuts = [round(len(ranked) * k / 3) for k in range(4)]
    return [ranked[a:b] for a, b in itertools.pairwise(cuts)]


def difficulties(groups: Sequence[Group]) -> dict[str, float]:
    """Mean value of the first turns of every task."""
    found: dict[str, list[float]] = {}
    for group in groups:
        if group.depth == 0:
            found.setdefault(group.task, []).extend(float(m.value) for m in group.members if m.value is not None)
    return {task: sum(values) / len(values) for task, values in found.items() if values}
