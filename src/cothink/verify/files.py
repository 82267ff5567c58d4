"""Many items at once: JSONL files of answers, and a check of all golds."""

from __future__ import annotations

import itertools
import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from cothink import verify as v
from cothink.types import Task
from cothink.verify import exact, pool, worker

CHUNK = 1024
"""Rows held in memory at a time."""

T = TypeVar("T")
R = TypeVar("R")


def grade_file(in_path: str, out_path: str, *, timeout: float = v.TIMEOUT) -> dict[str, int]:
    """Grade every line of a JSONL file, in parallel, answered in order; the count of each verdict.

    A row is `{kind: math|number|letter|text, gold, text}`, optionally with `choices` and `strict` (default false). A
    row that cannot be read or graded is answered by `error` and a message, in its place.
    """
    counts: Counter[str] = Counter()
    with open(in_path, encoding="utf-8", errors="replace") as rows, open(out_path, "w", encoding="utf-8") as out:
        for index, verdict in enumerate(_parallel(lambda line: _grade_line(line, timeout), rows)):
            counts[verdict.verdict] += 1
            row = {
                "row": index,
                "verdict": verdict.verdict,
                "seconds": verdict.seconds,
                "answer": verdict.answer,
                "detail": verdict.detail,
            }
            out.write(json.dumps(row) + "\n")
    return dict(counts)


def check_golds(tasks: Iterable[Task], *, timeout: float = v.TIMEOUT) -> list[str]:
    """One line for each Task whose gold is not right against itself; expressions are parsed, not compared as text."""
    return [problem for problem in _parallel(lambda task: _problem(task, timeout), tasks) if problem]


def _parallel(function: Callable[[T], R], items: Iterable[T]) -> Iterator[R]:
    stream = iter(items)
    with ThreadPoolExecutor(2 * pool.WORKERS, thread_name_prefix="cothink-verify") as threads:
        while chunk := list(itertools.islice(stream, CHUNK)):
            yield from threads.map(function, chunk)


def _grade_line(line: str, timeout: float) -> v.Verdict:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as error:
        return v.Verdict("error", detail=f"not JSON: {str(error)[:200]}" if line.strip() else "empty line")
    if not isinstance(row, dict):
        return v.Verdict("error", detail=f"the row is a {type(row).__name__}; write an object with kind, gold, text")
    missing = [key for key in ("kind", "gold", "text") if key not in row]
    if missing:
        return v.Verdict("error", detail=f"missing {', '.join(missing)}; a row has kind, gold and text")
    choices: Any = row.get("choices")
    if choices is not None and not isinstance(choices, list | dict):
        return v.Verdict("error", detail="choices must be a list, or an object from letter to text")
    strict = row.get("strict", False)
    if not isinstance(strict, bool):
        return v.Verdict("error", detail="strict must be true or false")
    try:
        return v.verify(row["kind"], row["gold"], row["text"], strict=strict, timeout=timeout, choices=choices)
    except ModuleNotFoundError:
        raise
    except Exception as error:  # one row may never end the file
        return v.Verdict("error", detail=f"{type(error).__name__}: {error}"[:300])


def _problem(task: Task, timeout: float) -> str | None:
    kind, gold = v.kind_of(task), task.answer
    if kind in ("math", "auto") and isinstance(gold, str) and gold.strip() and exact.plain_number(gold) is None:
        job = pool.Job("math_verify", worker.maths, (gold.strip(), False, gold.strip()))
        word, _, detail, _ = pool.run(job, timeout)
    else:
        text, meta = f"\\boxed{{{gold}}}", task.meta
        verdict = v.verify(kind, gold, text, timeout=timeout, choices=meta.get("choices"), gym=meta.get("gym"))
        word, detail = verdict.verdict, verdict.detail
    return None if word == "right" else f"{task.id}: gold {str(gold)[:80]!r} is {word} against itself: {detail}"
