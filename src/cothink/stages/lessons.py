"""What the sft and dpo stages share: where their data lies, what they write, and the folder their trainers work in."""

from __future__ import annotations

import contextlib
import inspect
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from cothink.parts import DPO, SFT
from cothink.recipe import Recipe
from cothink.record import write_atomic
from cothink.session import Session
from cothink.sft_rules import collected
from cothink.tasks import DataError

TEST_SPLITS = ("test", "dev", "validation")


class DataShort(RuntimeError):
    """A role has nothing to learn from."""


def stores(
    recipe: Recipe, index: int, folder: Path | None, load: Callable[..., Any], options: Mapping[str, Any]
) -> dict[str, Any]:
    """A source's options, with the folders of the run's own collect stages where it takes a `store` and names none."""
    places = collected(recipe, index)
    open_ = "store" in inspect.signature(load).parameters and options.get("store") is None
    if folder is None or not open_ or not places:
        return dict(options)
    from cothink.stages.collect import place

    return {**options, "store": [str(place(folder, recipe, k)) for k in places]}


def to_come(recipe: Recipe, stage: SFT | DPO, index: int) -> bool:
    """Whether the stage's data are the trees of the recipe's own collect stages: a run makes them on its way."""
    return stage.data.name == "tree" and stage.data.options.get("store") is None and bool(collected(recipe, index))


def refuse_test_rows(rows: Iterable[Mapping[str, Any]]) -> None:
    """Raises DataError for a row whose lineage says that it comes from a test split."""
    for row in rows:
        if row.get("split") in TEST_SPLITS:
            what = f"row {row['row_id']} (task {row['task_id']}) comes from the split {row['split']!r}"
            raise DataError(f"{what}, which is never trained on; collect on the training split")


def card(session: Session, name: str, facts: Mapping[str, Any] | None) -> None:
    """Writes the data card of a stage into the run folder, as JSON and as Markdown."""
    if facts is None or session.run is None:
        return
    from cothink.conversations.tree import pages

    folder = session.run.folder / "cards"
    folder.mkdir(exist_ok=True)
    for ending, text in pages(facts, f"Data card of {session.recipe.name}, {name}").items():
        write_atomic(folder / f"{name}.{ending}", text)


def export(file: Path, lines: Iterable[Mapping[str, Any]]) -> None:
    """Writes what a policy learns from as JSON lines, in one move."""
    file.parent.mkdir(parents=True, exist_ok=True)
    part = file.with_name(file.name + ".part")
    with part.open("w", encoding="utf-8") as handle:
        handle.writelines(json.dumps(line, ensure_ascii=False) + "\n" for line in lines)
    os.replace(part, file)


@contextlib.contextmanager
def workplace(session: Session, index: int, name: str) -> Iterator[Path]:
    """The trainer's own folder: kept in the run when training stops early, removed when the policy is done."""
    if session.run is None:
        with tempfile.TemporaryDirectory() as place:
            yield Path(place)
        return
    place = session.run.folder / "trainer" / f"stage{index:02d}-{name}"
    yield place
    shutil.rmtree(place, ignore_errors=True)
    if place.parent.is_dir() and not any(place.parent.iterdir()):
        place.parent.rmdir()


def log(session: Session, index: int, step: int, values: Mapping[str, Any]) -> None:
    """One line of metrics, and the trackers'."""
    if session.run is not None:
        session.run.metrics(index, step, values)
    if session.trackers is not None:
        session.trackers.log(values, step)
