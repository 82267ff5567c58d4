"""Pairs of answers to judge, in the manner of RewardBench: your own file or the hub's, split without leaks.

The verdict names the better answer: gold is `A` or `B`, `meta` holds both texts (`answer_a`, `answer_b`), the `pair`
they come from, and their `order` (`given` or `swapped`).
"""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal

from cothink.tasks import (
    DataError,
    Loaded,
    Refused,
    Row,
    collect,
    columns,
    find,
    hub_rows,
    question_key_of,
    question_text,
    read_rows,
)
from cothink.types import Task

Rule = Literal["strict", "loose"]
Swap = Literal["none", "both"]

QUESTIONS = ("instruction", "question", "prompt")
"""Columns read as the question, the first that the row has."""
SIDES = (("A", "B"), ("answer_a", "answer_b"), ("response_A", "response_B"), ("response_a", "response_b"))
"""Columns read as the two answers; a row of a better and a worse answer has RANKED instead, and no label."""
RANKED = ("chosen", "rejected")
LABELS = {"A": "A", "B": "B", "A>B": "A", "B>A": "B", "[[A]]": "A", "[[B]]": "B"}
FILES = ["pairs.jsonl", "pairs.parquet", "pairs.csv", "pairs.json"]


def load(
    split: str = "train",
    *,
    path: str | None = None,
    hub: str | None = None,
    hub_split: str | None = None,
    rule: Rule = "strict",
    test: int = 970,
    swap: Swap = "none",
    limit: int | None = None,
    seed: int = 0,
) -> Loaded:
    """One side, `train` or `test`, of a seeded split with `test` tasks on the test side, all subsets in both.

    `rule` strict: no question stands on both sides; loose: no (question, A, B) does, so a swapped copy may. `swap`
    both: every pair in both orders; none: in the order of the row, a seeded one for rows of `chosen` and `rejected`.
    Rows come from `path`, or `hub` (its split `hub_split`, default `filtered` as in allenai/reward-bench), or
    `rewardbench/pairs.jsonl` in the data folder.
    """
    if split not in ("train", "test"):
        raise DataError(f"judge has no split {split!r}; write train or test")
    if hub_split and not hub:
        raise DataError("judge: hub_split names a split of a hub data set; write hub: as well, or leave it out")
    rows = hub_rows(hub, hub_split or "filtered") if hub else read_rows(find(path, f"rewardbench/{FILES[0]}", FILES))
    found = collect(rows, lambda i, row: _task(i, row, ordered=swap == "both", seed=seed), key=tuple_key)
    tasks = both_orders(found) if swap == "both" else [*found]
    train, held = divide(tasks, rule=rule, test=test, seed=seed)
    notes = [f"{rule} split: {len(train):,} train, {len(held):,} test"]
    if len(held) < test:
        notes.append(f"the test side has {len(held)} of {test} tasks: tasks of one question stay together")
    chosen = _shuffled(train if split == "train" else held, seed)
    return Loaded(chosen[:limit], found.total, found.skipped, notes)


def pair_task(
    name: str, question: Any, a: Any, b: Any, label: Any, facts: Mapping[str, Any], *, equal: bool = False
) -> Task:
    """The task of one pair; refuses empty answers, `equal` ones unless told, and labels that name neither.

    Facts that are None are left out of its meta.
    """
    sides = [text.strip() if isinstance(text, str) else "" for text in (a, b)]
    if not all(sides):
        raise Refused("an empty answer")
    if sides[0] == sides[1] and not equal:
        raise Refused("both answers are the same")
    gold = LABELS.get(str(label).replace(" ", ""))
    if gold is None:
        raise Refused(f"label {label!r} is none of {', '.join(LABELS)}")
    known = {key: value for key, value in facts.items() if value is not None}
    meta = {"kind": "verdict", "answer_a": sides[0], "answer_b": sides[1], "pair": name, "order": "given", **known}
    return Task(name, question_text(question), gold, meta)


def both_orders(tasks: Iterable[Task]) -> list[Task]:
    """Every pair as given and with its answers swapped, one after the other; equal tuples once."""
    found: dict[str, Task] = {}
    for task in tasks:
        a, b = task.meta["answer_a"], task.meta["answer_b"]
        meta = {**task.meta, "answer_a": b, "answer_b": a, "order": "swapped"}
        swapped = replace(task, id=f"{task.id}/swapped", answer="B" if task.answer == "A" else "A", meta=meta)
        for one in (task, swapped):
            found.setdefault(tuple_key(one), one)
    return [*found.values()]


def tuple_key(task: Task) -> str:
    """What two copies of one (question, A, B) share."""
    return "\x1f".join((question_key_of(task), task.meta["answer_a"], task.meta["answer_b"]))


def divide(tasks: Sequence[Task], *, rule: Rule, test: int, seed: int) -> tuple[list[Task], list[Task]]:
    """Train and test side, the latter `test` tasks where that cuts no group, each subset in proportion."""
    if not 0 < test < len(tasks):
        raise DataError(f"judge: test: {test} of {len(tasks):,} tasks leaves one side empty; write a smaller number")
    groups: dict[str, list[Task]] = defaultdict(list)
    for task in tasks:
        groups[question_key_of(task) if rule == "strict" else tuple_key(task)].append(task)
    by_subset: dict[str, list[list[Task]]] = defaultdict(list)
    for group in groups.values():
        by_subset[str(group[0].meta.get("subset"))].append(group)
    rng = random.Random(f"judge/split/{seed}")
    room = _quotas({name: sum(map(len, found)) for name, found in by_subset.items()}, test)
    held: set[str] = set()
    left: list[list[Task]] = []
    for name in sorted(by_subset):
        for group in rng.sample(by_subset[name], len(by_subset[name])):
            if len(group) <= room[name]:
                room[name] -= len(group)
                held.update(task.id for task in group)
            else:
                left.append(group)
    for group in rng.sample(left, len(left)):  # what no subset had room for by itself
        if len(group) <= test - len(held):
            held.update(task.id for task in group)
    return [t for t in tasks if t.id not in held], [t for t in tasks if t.id in held]


def _quotas(sizes: Mapping[str, int], test: int) -> dict[str, int]:
    """How many of `test` go to each subset: by largest remainder."""
    total = sum(sizes.values())
    quota = {name: test * size // total for name, size in sizes.items()}
    behind = sorted(sizes, key=lambda name: (-(test * sizes[name] % total), name))
    for name in behind[: test - sum(quota.values())]:
        quota[name] += 1
    return quota


def _shuffled(tasks: Sequence[Task], seed: int) -> list[Task]:
    """Seeded order that keeps the two orders of a pair together, so that a limit cuts no pair apart."""
    pairs: dict[str, list[Task]] = defaultdict(list)
    for task in tasks:
        pairs[task.meta["pair"]].append(task)
    order = random.Random(f"judge/order/{seed}").sample([*pairs], len(pairs))
    return [task for pair in order for task in pairs[pair]]


def _task(index: int, row: Row, ordered: bool, seed: int) -> Task:
    question = next((row[name] for name in QUESTIONS if name in row), None)
    facts = {"subset": row.get("subset", row.get("source")), "source_id": row.get("id", row.get("pair_id"))}
    name = f"judge/{index}"
    if all(side in row for side in RANKED):
        better, worse = (row[side] for side in RANKED)
        if ordered or random.Random(f"judge/coin/{seed}/{index}").random() < 0.5:
            return pair_task(name, question, better, worse, "A", facts)
        return pair_task(name, question, worse, better, "B", facts)
    sides = next((pair for pair in SIDES if all(side in row for side in pair)), None)
    if sides is None:
        shapes = ", ".join(" and ".join(pair) for pair in (*SIDES, RANKED))
        raise DataError(f"no pair of answers among: {columns(row)}. Name the columns {shapes}")
    return pair_task(name, question, row[sides[0]], row[sides[1]], row.get("label", row.get("winner")), facts)
