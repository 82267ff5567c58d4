"""GSM8K: grade-school word problems, gold after the single `####` (7,473 train, 1,319 test)."""

from __future__ import annotations

import re

from cothink.tasks import Loaded, Refused, Row, collect, find, gold_text, hub_rows, question_text, read_rows
from cothink.types import Task

_NUMBER = re.compile(r"[-+]?\$?[0-9][0-9,]*(?:\.[0-9]+)?|[-+]?\.[0-9]+")
_CALCULATOR = re.compile(r"<<[^<>]*>>")


def load(
    split: str = "train",
    *,
    path: str | None = None,
    hub: str | None = None,
    limit: int | None = None,
    seed: int | None = None,
) -> Loaded:
    """Tasks of one split; `hub="openai/gsm8k"` reads the hub. `meta["solution"]` is the worked solution."""
    if hub:
        rows = hub_rows(hub, split, "main")
    else:
        rows = read_rows(find(path, f"gsm8k/{split}.jsonl", [f"{split}.jsonl", f"{split}.parquet"]))
    return collect(rows, lambda i, row: _task(split, i, row), limit=limit, seed=seed)


def _task(split: str, index: int, row: Row) -> Task:
    solution, marks, gold = gold_text(row.get("answer")).rpartition("####")
    gold = gold_text(gold)
    if not marks:
        raise Refused("no #### before the answer")
    if not _NUMBER.fullmatch(gold):
        raise Refused("gold is not a number")
    # Calculator notes <<48/2=24>> are annotations for a tool, not part of the text.
    meta = {"kind": "number", "solution": _CALCULATOR.sub("", solution).strip()}
    return Task(f"gsm8k/{split}/{index}", question_text(row.get("question")), gold, meta)
