"""JudgeBench: 620 pairs of answers, 350 by GPT-4o and 270 by Claude 3.5 Sonnet, each with the better one named.

The data set states no licence: for evaluation only, so there is no training split.
"""

from __future__ import annotations

import random
from typing import Any, Literal

from cothink.tasks import DataError, Loaded, Row, collect, find, read_rows
from cothink.tasks.judge import Swap, both_orders, pair_task, tuple_key
from cothink.types import Task

FILES = {"gpt-4o": "gpt-4o-2024-05-13.jsonl", "claude-3.5-sonnet": "claude-3-5-sonnet-20240620.jsonl"}
PREFIX = "dataset=judgebench,response_model="
"""What the files' names begin with in the data set's own repository."""


def load(
    split: str = "test",
    *,
    model: Literal["gpt-4o", "claude-3.5-sonnet"] | None = None,
    path: str | None = None,
    swap: Swap = "none",
    limit: int | None = None,
    seed: int | None = None,
) -> Loaded:
    """The pairs of both files, or of one `model` that wrote the answers; `path` is the folder of the files.

    They are judged in the given order; `swap` both adds each pair with its answers swapped. `meta` holds the subset
    (the source of the question), the response model and the original id. One published pair has two equal answers; it
    stays, so that figures compare.
    """
    if split != "test":
        raise DataError(f"judgebench has no split {split!r}; write test")
    rows: list[Row] = []
    for name in [model] if model else FILES:
        rows += read_rows(find(path, f"judgebench/{FILES[name]}", [FILES[name], f"{PREFIX}{FILES[name]}"]))
    found = collect(rows, _task, key=tuple_key)
    tasks = [both_orders([task]) if swap == "both" else [task] for task in found]
    if seed is not None:
        random.Random(seed).shuffle(tasks)
    equal = sum(task.meta["answer_a"] == task.meta["answer_b"] for task in found)
    notes = [f"{equal} pair of two equal answers, kept as published"] if equal else []
    return Loaded([task for pair in tasks for task in pair][:limit], found.total, found.skipped, notes)


def _task(index: int, row: Row) -> Task:
    facts: dict[str, Any] = {
        "subset": row.get("source"),
        "response_model": row.get("response_model"),
        "source_id": row.get("original_id"),
    }
    sides = row.get("response_A"), row.get("response_B"), row.get("label")
    return pair_task(f"judgebench/{row.get('pair_id', index)}", row.get("question"), *sides, facts, equal=True)
