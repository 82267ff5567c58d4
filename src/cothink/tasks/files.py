"""Your own rows: JSONL, JSON, CSV or parquet, in the shapes people already have."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from cothink.tasks import (
    DataError,
    Loaded,
    Refused,
    Row,
    collect,
    columns,
    find,
    gold_text,
    hub_rows,
    question_text,
    read_rows,
)
from cothink.types import Task

QUESTIONS = ("question", "problem", "prompt", "query", "instruction", "input")
"""Columns read as the question, the first that the row has."""
ANSWERS = ("answer", "gold", "target", "ground_truth", "final_answer", "label", "solution", "output")
"""Columns read as the gold answer, the first that the row has; a solution is read for its box or `####`."""

_SIMPLE = (str, int, float, bool)


def load(
    split: str = "train",
    *,
    path: str | None = None,
    hub: str | None = None,
    question: str | None = None,
    answer: str | None = None,
    kind: str = "auto",
    limit: int | None = None,
    seed: int | None = None,
) -> Loaded:
    """Tasks of a file, of `{split}.*` in a folder, or of a hub data set.

    `question` and `answer` name the columns (dots reach into objects: `reward_model.ground_truth`). Without them: verl
    rows, a chat list (its last user message), `#### 18` answers and boxed solutions are understood. Other short columns
    go to `meta`.
    """
    if bool(path) == bool(hub):
        raise DataError("files needs either path: (a file or folder) or hub: (a hub data set)")
    if hub:
        rows, name = hub_rows(hub, split), hub.rsplit("/", 1)[-1]
    else:
        names = [f"{split}.{ending}" for ending in ("jsonl", "parquet", "csv", "json")]
        file = find(path, "", names)
        rows, name = read_rows(file), file.stem if Path(str(path)).is_file() else file.parent.name

    def parse(index: int, row: Row) -> Task:
        return _task(f"{name}/{split}/{index}", row, question, answer, kind)

    return collect(rows, parse, limit=limit, seed=seed)


def _task(name: str, row: Row, question: str | None, answer: str | None, kind: str) -> Task:
    asked = _pick(row, question, QUESTIONS, "question")
    told = _pick(row, answer or ("reward_model.ground_truth" if _is_verl(row) else None), ANSWERS, "answer")
    meta: dict[str, Any] = {"kind": kind}
    extra = row.get("extra_info")
    for source in (row, extra if isinstance(extra, Mapping) else {}):
        for key, value in source.items():
            known = key in QUESTIONS or key in ANSWERS or key in (question, answer, "kind")
            if not known and isinstance(value, _SIMPLE) and len(str(value)) <= 200:
                meta[str(key)] = value
    return Task(name, question_text(_last_user(asked)), _final(told), meta)


def _pick(row: Row, named: str | None, common: tuple[str, ...], what: str) -> Any:
    if named:
        value: Any = row
        for part in named.split("."):
            if not isinstance(value, Mapping) or part not in value:
                raise DataError(f"no column {named!r} for {what}:; the row has {columns(row)}")
            value = value[part]
        return value
    found = next((name for name in common if name in row), None)
    if found is None:
        raise DataError(
            f"no {what} column among: {columns(row)}. Write {what}: NAME with the column that holds the {what}"
        )
    return row[found]


def _is_verl(row: Row) -> bool:
    model = row.get("reward_model")
    return isinstance(model, Mapping) and "ground_truth" in model


def _last_user(value: Any) -> Any:
    """The last user message of a chat list (also one written as JSON text), or the value itself."""
    if isinstance(value, str) and value.lstrip().startswith("[{"):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError):
            return value
    if not isinstance(value, list):
        return value
    said = [turn.get("content") for turn in value if isinstance(turn, Mapping) and turn.get("role") == "user"]
    if not said:
        raise Refused("a chat without a user message")
    return said[-1]


def _final(value: Any) -> str:
    """The gold in an answer column: after `####`, in the last box of a solution, or the text as it is."""
    if isinstance(value, list) and len(value) == 1:
        value = value[0]
    text = gold_text(value)
    if "####" in text:
        return gold_text(text.rpartition("####")[2])
    box = re.search(r".*\\boxed\{", text, re.DOTALL)  # greedy: the last one
    if box is None:
        return text
    depth, start = 1, box.end()
    for place in range(start, len(text)):
        depth += {"{": 1, "}": -1}.get(text[place], 0)
        if depth == 0:
            return gold_text(text[start:place])
    raise Refused("gold has a box that never closes")
