"""MATH and the eight-subset test file of ReMA, with their known defects repaired and reported.

Splits: `train` (levels 3-5, 8,523 rows), `test` (MATH500), `minimal` (133 rows, all contained in train: smoke tests
only), `overall` (3,251 test rows in 8 subsets). Gold is `reward_model.ground_truth` or its copy. Two columns
mislead: `groundtruth` is a solution, an answer or the text `None`, by file; `prompt` has a foreign suffix.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

from cothink.tasks import DataError, Loaded, Row, collect, find, gold_text, hub_rows, question_key, question_text
from cothink.tasks import read_rows as read
from cothink.types import Task

FILES = {
    "train": "train_lv3to5_8k.parquet",
    "test": "test500.parquet",
    "minimal": "train_minimal_all_types.parquet",
    "overall": "overall_math_test.parquet",
}
SUBSETS = ("gsm8k", "olympiadbench", "MATH500", "gaokao2023en", "minerva_math", "amc23", "aime24", "aime25")

REPAIRS: dict[int, tuple[str, str, str]] = {
    # Row of the overall file: published gold, the right one, what to cut from the question's end.
    # Empty golds; two of them stand at the end of their own question.
    97: ("", r"\text{east}", ""),
    1972: ("", "b>a>c", ""),
    2056: ("", r"\frac{3}{10}", r"answers: $\frac{3}{10}$"),
    2081: ("", "A", "Answer: A"),
    # Golds damaged by normalisation; MATH500 has the originals.
    96: (r"1\\sqrt{19}", r"1 \pm \sqrt{19}", ""),
    102: ("(+5)(b+2)", "(a+5)(b+2)", ""),
    257: ("864^2", "864", ""),
    284: (r"3\2\sqrt{2}", r"3 \pm 2 \sqrt{2}", ""),
    422: (r"{1\\sqrt{5},-2}", r"\{1\pm\sqrt{5},-2\}", ""),
    467: ("15^2", "15", ""),
    # The same question has 901, the right count, in amc23.
    2238: ("902", "901", ""),
}


def load(
    split: str = "train",
    *,
    subset: str | Sequence[str] | None = None,
    path: str | None = None,
    hub: str | None = None,
    limit: int | None = None,
    seed: int | None = None,
) -> Loaded:
    """Tasks of one split; `subset` picks subsets of `overall`; `hub="HuggingFaceH4/MATH-500"` reads the hub.

    `meta` holds level (int) and subject where the row has them, and subset; a repaired row keeps its `published_gold`.
    """
    if split not in FILES and not (path or hub):
        raise DataError(f"math has no split {split!r}; write one of {', '.join(FILES)}")
    wanted = _subsets(split, subset)
    if hub:
        rows = hub_rows(hub, split)
    else:
        name = FILES.get(split, f"{split}.parquet")
        rows = read(find(path, f"math/{name}", [name, f"{split}.jsonl", f"{split}.parquet"]))
    tasks = collect(
        rows,
        lambda i, row: _task(split, i, row),
        # A question may stand in two subsets, each with its own published count.
        key=lambda task: f"{task.meta.get('subset')} {question_key(task.question)}",
    )
    chosen = [task for task in tasks if not wanted or task.meta.get("subset") in wanted]
    repaired = [int(task.id.rpartition("/")[2]) for task in chosen if "published_gold" in task.meta]
    if seed is not None:
        random.Random(seed).shuffle(chosen)
    notes = [_repair_note(repaired)] if repaired else []
    return Loaded(chosen if limit is None else chosen[:limit], tasks.total, tasks.skipped, notes)


def _subsets(split: str, subset: str | Sequence[str] | None) -> tuple[str, ...]:
    names = (subset,) if isinstance(subset, str) else tuple(subset or ())
    if names and split != "overall":
        raise DataError(f"subset belongs to the split overall, not to {split!r}")
    unknown = [name for name in names if name not in SUBSETS]
    if unknown:
        raise DataError(f"no subset {unknown[0]!r}; write one of {', '.join(SUBSETS)}")
    return names


def _task(split: str, index: int, row: Row) -> Task:
    question, gold = row.get("question") or row.get("problem"), _gold(row)
    meta: dict[str, Any] = {"kind": "math"}
    wrong, right, tail = REPAIRS.get(index, ("", "", "")) if split == "overall" else ("", "", "")
    if right and gold == wrong and row.get("subset") in SUBSETS:
        meta["published_gold"], gold = gold, right
        question = str(question).removesuffix(tail)
    level = _level(row.get("level"))
    subject = row.get("subject") or row.get("type")
    facts = {"level": level, "subject": subject, "subset": row.get("subset"), "source_id": row.get("unique_id")}
    meta.update({name: value for name, value in facts.items() if value is not None})
    return Task(f"math/{split}/{index}", question_text(question), gold_text(gold), meta)


def _gold(row: Row) -> Any:
    model = row.get("reward_model")
    if isinstance(model, dict) and "ground_truth" in model:
        return model["ground_truth"]
    return row.get("target", row.get("answer"))


def _level(value: Any) -> int | None:
    digits = str(value).removeprefix("Level ").strip()
    return int(digits) if digits.isdecimal() and len(digits) < 3 else None


def _repair_note(rows: list[int]) -> str:
    empty = [row for row in rows if REPAIRS[row][0] == ""]
    wrong = [row for row in rows if row not in empty]
    parts = [f"{len(empty)} empty golds (rows {', '.join(map(str, empty))})"] if empty else []
    parts += [f"{len(wrong)} damaged golds (rows {', '.join(map(str, wrong))})"] if wrong else []
    return "repaired " + " and ".join(parts)
