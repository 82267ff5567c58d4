"""Data rows as Tasks. Each module has `load(split, **options)`; this one holds what the loaders share."""

from __future__ import annotations

import json
import os
import random
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from math import isfinite
from pathlib import Path
from typing import Any, NamedTuple

from cothink.types import Task

Row = Mapping[str, Any]

_DASHES = re.compile("[‐-―−－]")
_SIZED = re.compile(r"\\(?:left|right)(?![a-z])")
_FRACTIONS = re.compile(r"\\[dt]frac")
_NOT_KEY = re.compile(r"[^a-z0-9+\-*/=^<>!|]")


class Skip(NamedTuple):
    """A row that became no Task: its 0-based place in the source, and why."""

    row: int
    reason: str


class Loaded(list[Task]):
    """The Tasks of one source, with what was left out and what was repaired."""

    def __init__(
        self, tasks: Iterable[Task] = (), total: int = 0, skipped: Iterable[Skip] = (), notes: Iterable[str] = ()
    ) -> None:
        super().__init__(tasks)
        self.total = total
        self.skipped = tuple(skipped)
        self.notes = tuple(notes)

    def report(self) -> str:
        """One line a fact: `skipped 2 of 8,523 rows: empty gold (rows 5054, 5158)`; empty when nothing happened."""
        by_reason: dict[str, list[int]] = defaultdict(list)
        for skip in self.skipped:
            by_reason[skip.reason].append(skip.row)
        lines = list(self.notes)
        if by_reason:
            causes = "; ".join(f"{reason} ({_rows(rows)})" for reason, rows in by_reason.items())
            lines.insert(0, f"skipped {len(self.skipped):,} of {self.total:,} rows: {causes}")
        return "\n".join(lines)


class Refused(ValueError):
    """Raised by a row parser: this row becomes no Task; the message is the reason that is reported."""


class DataError(ValueError):
    """A source that cannot be read; the message says what to write instead."""


def report(tasks: Iterable[Task]) -> str:
    """What a loader left out or repaired; empty for a plain list."""
    return tasks.report() if isinstance(tasks, Loaded) else ""


def collect(
    rows: Iterable[Row],
    parse: Callable[[int, Row], Task],
    *,
    limit: int | None = None,
    seed: int | None = None,
    key: Callable[[Task], str] | None = None,
    notes: Iterable[str] = (),
) -> Loaded:
    """Tasks of all rows that `parse` accepts, each question once; shuffled if `seed` is given, then cut to `limit`.

    `parse` gets the row's place and raises `Refused` to skip it. `key` says when two Tasks are the same one.
    """
    tasks: list[Task] = []
    skipped: list[Skip] = []
    seen: set[str] = set()
    names: set[str] = set()
    total = 0
    for total, row in enumerate(rows, 1):
        try:
            task = parse(total - 1, row)
            _storable(task)
        except Refused as error:
            skipped.append(Skip(total - 1, short(str(error))))
            continue
        except DataError as error:
            raise DataError(f"row {total - 1}: {error}") from None
        same = (key or question_key_of)(task)
        if same in seen or task.id in names:
            skipped.append(Skip(total - 1, "repeated question" if same in seen else "repeated id"))
            continue
        seen.add(same)
        names.add(task.id)
        tasks.append(task)
    if not tasks:
        why = "; ".join(sorted({skip.reason for skip in skipped})[:3])
        raise DataError(f"no usable row among {total:,}" + (f": {why}" if why else "; the source is empty"))
    if seed is not None:
        random.Random(seed).shuffle(tasks)
    return Loaded(tasks if limit is None else tasks[:limit], total, skipped, notes)


def _storable(task: Task) -> None:
    """Refuses what no file and no tokenizer takes: half of a surrogate pair, which JSON can write."""
    try:
        json.dumps([task.id, task.question, task.answer, dict(task.meta)], ensure_ascii=False, default=str).encode()
    except UnicodeEncodeError:
        raise Refused("not valid Unicode: half of a surrogate pair") from None


def short(text: str, most: int = 200) -> str:
    """A text of at most so many characters, for messages that quote what a file holds."""
    return text if len(text) <= most else f"{text[:most]}... ({len(text):,} characters)"


def columns(row: Row) -> str:
    """The names of a row's columns, for messages."""
    return short(", ".join(map(str, row)) or "none", 400)


def gold_text(value: Any) -> str:
    """A gold answer as text; refuses what is empty or neither text nor a finite number."""
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        raise Refused(f"gold is a {type(value).__name__}, not text")
    if isinstance(value, float) and not isfinite(value):
        raise Refused(f"gold is {value}")
    text = str(value).strip()
    if not text:
        raise Refused("empty gold")
    return text


def question_text(value: Any) -> str:
    """A question as text; refuses what is empty or not text."""
    if not isinstance(value, str):
        raise Refused(f"question is a {type(value).__name__}, not text")
    if not value.strip():
        raise Refused("empty question")
    return value.strip()


def question_key(question: str) -> str:
    """What two copies of one question share whatever their spacing, dashes and LaTeX sizes (letters, digits, signs)."""
    text = _DASHES.sub("-", question.lower())
    text = _FRACTIONS.sub(r"\\frac", _SIZED.sub("", text))
    # A question in another script leaves no letters here; its own text is then the key.
    return _NOT_KEY.sub("", text) if text.isascii() or len(_NOT_KEY.sub("", text)) * 2 > len(text) else text


def question_key_of(task: Task) -> str:
    """`question_key` of a Task."""
    return question_key(task.question)


def overlap(train: Iterable[Task], test: Iterable[Task]) -> list[tuple[str, str]]:
    """Ids (train, test) of questions that stand in both: an honest score needs none."""
    known = {question_key_of(task): task.id for task in train}
    keys = ((question_key_of(task), task.id) for task in test)
    return [(known[key], other) for key, other in keys if key in known]


def data_root() -> Path:
    """The folder of local data files: `COTHINK_DATA`, else `../shared/data` beside the repository."""
    return Path(os.environ.get("COTHINK_DATA") or Path(__file__).parents[4] / "shared" / "data")


def find(path: str | Path | None, default: str, in_folder: Iterable[str] = ()) -> Path:
    """The file to read: `path`, or one of `in_folder` inside it if it is a folder, or `default` under `data_root()`."""
    if path is None:
        file = data_root() / default
        if not file.is_file():
            raise DataError(f"no data at {file}; set COTHINK_DATA to the data folder, or write path: or hub:")
        return file
    file = Path(path).expanduser()
    if file.is_dir():
        names = [*in_folder]
        inside = next((file / name for name in names if (file / name).is_file()), None)
        if inside is None:
            raise DataError(f"{file} holds none of {', '.join(names)}; write the path of one file")
        return inside
    if not file.is_file():
        raise DataError(f"no file {file}; write path: with an existing .jsonl, .json, .csv or .parquet file")
    return file


def read_rows(file: Path) -> Iterator[Row]:
    """Rows of a JSONL, JSON (a list), CSV or parquet file, by its ending; raises DataError where it is damaged."""
    try:
        yield from _rows_of(file)
    except DataError:
        raise
    except UnicodeDecodeError as error:
        raise DataError(f"{file.name} is not UTF-8: {error.reason}; write it again as UTF-8 text") from None
    except RecursionError:
        raise DataError(f"{file.name}: brackets within brackets, deeper than any row; write one object a row") from None
    except Exception as error:  # csv, json and pyarrow have errors of their own, none of which names the file
        raise DataError(f"{file.name} cannot be read: {short(str(error))}") from error


def _rows_of(file: Path) -> Iterator[Row]:
    ending = file.suffix.lower()
    if ending == ".parquet":
        import pyarrow.parquet

        # not read_table: it imports pandas, which costs more than the rows
        yield from pyarrow.parquet.ParquetFile(file).read().to_pylist()
    elif ending == ".csv":
        import csv

        with open(file, encoding="utf-8-sig", newline="") as handle:
            table = csv.DictReader(handle)
            for row in table:
                if None in row:  # its texts would stand in the wrong columns
                    fix = "put double quotes around texts that hold commas"
                    raise DataError(f"{file.name}, line {table.line_num}: more fields than the header has; {fix}")
                yield row
    elif ending in (".jsonl", ".json", ".ndjson"):
        yield from _json_rows(file)
    else:
        raise DataError(f"{file.name}: unknown ending {ending!r}; write a .jsonl, .json, .csv or .parquet file")


def hub_rows(hub: str, split: str, config: str | None = None) -> Iterator[Row]:
    """Rows of a data set on the Hugging Face hub (`owner/name`), through the optional package `datasets`."""
    try:
        import datasets
    except ImportError as error:
        raise DataError(f"hub: {hub} needs the package datasets; write: pip install 'cothink[hub]'") from error
    yield from datasets.load_dataset(hub, config, split=split)  # type: ignore[misc]


def _json_rows(file: Path) -> Iterator[Row]:
    with open(file, encoding="utf-8-sig") as handle:
        if file.suffix.lower() == ".json":
            rows = json.load(handle)
            if not isinstance(rows, list):
                raise DataError(f"{file.name} holds a {type(rows).__name__}; write a list of objects, or JSON lines")
            yield from (row if isinstance(row, dict) else {} for row in rows)
            return
        for number, line in enumerate(handle, 1):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
            except ValueError as error:
                raise DataError(f"{file.name}, line {number}: not JSON ({error})") from error
            if not isinstance(row, dict):
                raise DataError(f"{file.name}, line {number}: a {type(row).__name__}; write one object a line")
            yield row


def _rows(rows: list[int]) -> str:
    shown = ", ".join(str(row) for row in rows[:8])
    more = f" and {len(rows) - 8:,} more" if len(rows) > 8 else ""
    return f"row{'s' if len(rows) > 1 else ''} {shown}{more}"
