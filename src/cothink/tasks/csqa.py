"""CommonsenseQA: five lettered choices; the public dev set is the test set (9,741 train, 1,221 test)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from cothink.tasks import Loaded, Refused, Row, collect, find, gold_text, hub_rows, question_text, read_rows
from cothink.types import Task

_FILES = {"train": ["train.jsonl"], "test": ["dev.jsonl", "test.jsonl"]}


def load(
    split: str = "train",
    *,
    path: str | None = None,
    hub: str | None = None,
    limit: int | None = None,
    seed: int | None = None,
) -> Loaded:
    """Tasks of one split; `hub="tau/commonsense_qa"` reads the hub.

    The question ends with its choices, one `A: text` a line; `meta["choices"]` maps letters to texts.
    """
    if hub:
        rows = hub_rows(hub, "validation" if split == "test" else split)
    else:
        names = _FILES.get(split, [f"{split}.jsonl"])
        rows = read_rows(find(path, f"csqa/{names[0]}", names))
    return collect(rows, lambda i, row: _task(split, i, row), limit=limit, seed=seed)


def _task(split: str, index: int, row: Row) -> Task:
    # The original nests stem and choices; the hub's copy is flat, its choices two lists. The concept is never shown.
    nested = row.get("question")
    stem = question_text(nested.get("stem") if isinstance(nested, Mapping) else nested)
    choices = _choices(nested.get("choices") if isinstance(nested, Mapping) else row.get("choices"))
    gold = gold_text(row.get("answerKey"))
    if gold not in choices:
        raise Refused(f"gold {gold!r} is none of the choices")
    question = "\n".join([stem, *(f"{letter}: {text}" for letter, text in choices.items())])
    meta = {"kind": "letter", "choices": choices, "source_id": row.get("id")}
    return Task(f"csqa/{split}/{index}", question, gold, meta)


def _choices(value: Any) -> dict[str, str]:
    try:
        if isinstance(value, Mapping):
            pairs = list(zip(value["label"], value["text"], strict=True))
        else:
            pairs = [(choice["label"], choice["text"]) for choice in value]
    except (TypeError, KeyError, ValueError):
        pairs = []
    if len(pairs) < 2:
        raise Refused("no choices with label and text")
    return {str(label): str(text) for label, text in pairs}
