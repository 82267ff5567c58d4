"""Generated tasks of reasoning-gym, graded by its own scorer: only full marks are right, partial credit is not."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from typing import Any

from cothink.tasks import DataError, Loaded, Skip, question_key
from cothink.types import Task

_SPLIT_SEED = {"train": 0, "test": 1_000_000_000}


def load(
    split: str = "train",
    *,
    generator: str,
    size: int = 500,
    seed: int = 0,
    options: dict[str, Any] | None = None,
) -> Loaded:
    """`size` distinct Tasks of `generator` (`leg_counting`, `countdown`, ...), with its own `options`.

    Train and test never share a question, whatever their sizes and seeds: they draw from different seeds, and the
    digest of a question decides which of the two may keep it. A generator with few questions gives fewer Tasks and says
    so.
    """
    if split not in _SPLIT_SEED:
        raise DataError(f"gym has no split {split!r}; write train or test")
    recipe = {**(options or {}), "seed": seed + _SPLIT_SEED[split], "size": 4 * size + 100}
    dataset = _dataset(generator, recipe)
    tasks: list[Task] = []
    skipped: list[Skip] = []
    seen: set[str] = set()
    index = -1
    for index, entry in _entries(dataset, recipe["size"]):
        key = question_key(str(entry["question"]))
        if _is_test(key) != (split == "test") or key in seen:
            continue
        seen.add(key)
        answer = entry["answer"]
        if not isinstance(answer, str) or not answer.strip():
            skipped.append(Skip(index, f"gold is {'empty' if isinstance(answer, str) else type(answer).__name__}"))
            continue
        meta = {"kind": "gym", "gym": {"name": generator, "options": recipe, "index": index}}
        tasks.append(Task(f"gym/{generator}/{split}/{seed}/{index}", str(entry["question"]), answer, meta))
        if len(tasks) == size:
            break
    if not tasks:
        raise DataError(
            f"reasoning-gym's {generator} gave no usable question for {split}; write other options: or a seed:"
        )
    short = len(tasks) < size
    notes = (
        [f"{generator} has only {len(tasks):,} distinct questions for {split}, {size:,} were asked"] if short else []
    )
    return Loaded(tasks, index + 1, skipped, notes)


def _entries(dataset: Any, count: int) -> Iterator[tuple[int, dict[str, Any]]]:
    for index in range(count):
        yield index, dataset[index]


def _is_test(key: str) -> bool:
    return hashlib.blake2b(key.encode(), digest_size=1).digest()[0] % 2 == 1


def _dataset(name: str, recipe: dict[str, Any]) -> Any:
    try:
        import reasoning_gym
        from reasoning_gym.factory import DATASETS
    except ImportError as error:
        raise DataError("tasks gym needs reasoning-gym; write: pip install 'cothink[gym]'") from error
    if name not in DATASETS:
        import difflib

        near = difflib.get_close_matches(name, DATASETS, n=3)
        raise DataError(f"reasoning-gym has no generator {name!r}; nearest: {', '.join(near) or ', '.join(DATASETS)}")
    try:
        return reasoning_gym.create_dataset(name, **recipe)
    except (TypeError, AssertionError, ValueError) as error:
        raise DataError(f"reasoning-gym's {name} refuses these options ({error}); write options: it knows") from error
