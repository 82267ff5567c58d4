"""`cothink split`: worked solutions -> a teacher's tagged copies -> two-role dialogues for an sft stage.

The teacher's answers are appended to `answers.jsonl` as they come, so a run that was killed asks only for the rest.
The dialogues are made from the answers at the end, which costs nothing and can be repeated.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cothink.conversations.dialogues import META, REASONING, Dialogue, stored, views
from cothink.conversations.spans import REASONS, SYSTEM, dialogue, prompt
from cothink.record import write_atomic
from cothink.tasks import DataError, Row, find, read_rows
from cothink.tasks.files import QUESTIONS
from cothink.team import stable_seed
from cothink.types import PlayError, Role, Sampling
from cothink.workflows.rema import MULTI

if TYPE_CHECKING:
    from cothink.engines import Engine

SOLUTIONS = ("solution", "response", "completion", "output", "answer")
"""Columns read as the worked solution, the first that a row has."""
ANSWERS, SETTINGS, REPORT = "answers.jsonl", "split.json", "report.json"
TEACHER = "teacher"
HOPELESS = (400, 413, 422)
"""What a server answers to one request that it will never take, such as one longer than its context."""


class SplitError(RuntimeError):
    """A split that cannot go on; what was answered so far is kept."""


@dataclass(frozen=True, slots=True)
class Item:
    """One worked solution; `key` is a hash of its text, under which the teacher's answer is kept."""

    key: str
    question: str
    solution: str


def items(source: str | Path, question: str | None, solution: str | None, limit: int | None) -> list[Item]:
    """The worked solutions of a file (JSON lines, JSON, CSV, parquet), each once."""
    found: dict[str, Item] = {}
    for number, row in enumerate(read_rows(find(source, ""))):
        if limit is not None and number >= limit:
            break
        asked, told = _column(row, question, QUESTIONS, "question"), _column(row, solution, SOLUTIONS, "solution")
        key = hashlib.sha256(f"{asked}\x1f{told}".encode()).hexdigest()[:16]
        found.setdefault(key, Item(key, asked.strip(), told.strip()))
    if not found:
        raise DataError(f"{source} has no rows; write a file with a question and a worked solution on each line")
    return list(found.values())


def _column(row: Row, named: str | None, usual: tuple[str, ...], what: str) -> str:
    name = named or next((column for column in usual if column in row), None)
    value = row.get(name) if name else None
    if not isinstance(value, str) or not value.strip():
        columns = ", ".join(map(str, row)) or "none"
        raise DataError(f"no text for the {what} in a row with the columns {columns}; write --{what} COLUMN")
    return value


async def split(
    work: list[Item],
    out: Path,
    engine: Engine,
    *,
    teacher: str,
    max_tokens: int = 8192,
    concurrency: int = 8,
    progress: Callable[[int], None] | None = None,
) -> dict[str, Any]:
    """Asks the teacher for every item that has no answer in `out` yet, writes the dialogues and returns the report.

    `out` then holds the two files that the `dialogues` source reads, and `report.json`. A server that fails ends the
    split with SplitError after the calls under way; a request that the server refuses is kept as refused.
    """
    out.mkdir(parents=True, exist_ok=True)
    _same_settings(out, {"teacher": teacher, "max_tokens": max_tokens, "prompt": _digest(SYSTEM)})
    known = answers(out / ANSWERS)
    waiting = iter([item for item in work if item.key not in known])
    done, failures = len(work) - sum(item.key not in known for item in work), []
    with (out / ANSWERS).open("a", encoding="utf-8") as store:

        async def worker() -> None:
            nonlocal done
            for item in waiting:
                if failures:
                    return
                try:
                    line = await _ask(engine, item, max_tokens)
                except PlayError as error:
                    failures.append(error)
                    return
                store.write(json.dumps(line) + "\n")
                store.flush()
                known[item.key] = line
                done += 1
                if progress is not None:
                    progress(done)

        await asyncio.gather(*(worker() for _ in range(concurrency)))
    if failures:
        raise SplitError(
            f"{str(failures[0]).rstrip('.')}. {done:,} of {len(work):,} answers are kept: the same command goes on"
        )
    return _write(work, known, out)


async def _ask(engine: Engine, item: Item, max_tokens: int) -> dict[str, Any]:
    messages = prompt(item.question, item.solution)
    ids = engine.codec(TEACHER).start(messages)
    sampling = Sampling(temperature=0.0, max_tokens=max_tokens)
    try:
        (found,) = await engine.generate(TEACHER, messages, ids, sampling, 1, stable_seed("split", item.key))
    except PlayError as error:
        if getattr(error.__cause__, "status_code", None) in HOPELESS:
            return {"key": item.key, "refused": str(error)}
        raise
    return {"key": item.key, "text": found.text, "finish_reason": found.finish_reason}


def answers(file: Path) -> dict[str, dict[str, Any]]:
    """The stored answers by key; the half line that a kill left behind is cut from the file."""
    if not file.exists():
        return {}
    text = file.read_text(encoding="utf-8")
    whole = text[: text.rfind("\n") + 1]
    if whole != text:
        write_atomic(file, whole)
    lines = [json.loads(line) for line in whole.split("\n") if line]
    return {line["key"]: line for line in lines}


def _same_settings(out: Path, settings: Mapping[str, Any]) -> None:
    file = out / SETTINGS
    if not file.exists():
        write_atomic(file, json.dumps(settings, indent=2))
        return
    before = json.loads(file.read_text(encoding="utf-8"))
    other = [key for key in settings if before.get(key) != settings[key]]
    if other:
        raise SplitError(f"{out} holds the answers of another split ({', '.join(other)} differ, see {file}); name "
                         "another folder, or remove this one")  # fmt: skip


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _write(work: list[Item], known: Mapping[str, Mapping[str, Any]], out: Path) -> dict[str, Any]:
    made: list[Dialogue] = []
    lost: Counter[str] = Counter()
    for item in work:
        line = known[item.key]
        if "refused" in line:
            lost["refused"] += 1
            continue
        whole = line["finish_reason"] != "length"
        found = dialogue(item.key, item.question, item.solution, line["text"], complete=whole)
        if isinstance(found, str):
            lost[found] += 1
        else:
            made.append(found)
    meta, reasoning = (Role(name, name, MULTI[name]) for name in ("meta", "reasoning"))
    for name, role in ((META, 0), (REASONING, 1)):
        rows = (stored(views(found, meta, reasoning)[role]) for found in made)
        write_atomic(out / name, "".join(json.dumps(row) + "\n" for row in rows))
    report = {
        "solutions": len(work),
        "dialogues": len(made),
        "rounds": sum(len(found.rounds) for found in made),
        "dropped": {reason: lost[reason] for reason in (*REASONS, "refused") if lost[reason]},
    }
    write_atomic(out / REPORT, json.dumps(report, indent=2))
    return report


def sentences(report: Mapping[str, Any]) -> Iterator[str]:
    """A report in words, a line each."""
    rounds = report["rounds"] / report["dialogues"] if report["dialogues"] else 0.0
    yield f"{report['dialogues']:,} dialogues from {report['solutions']:,} solutions, {rounds:.1f} rounds each"
    for reason, count in report["dropped"].items():
        yield f"dropped {count:,}: {REASONS.get(reason, 'the server refuses the request')}"
