"""Many items at once: JSONL files of answers, and a check of all golds."""

from __future__ import annotations

import itertools
import json
from collections import Counter
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from cothink import verify as v
from cothink.types import Task
from cothink.verify import exact, pool, worker

CHUNK = 1024
"""Rows held in memory at a time."""


def grade_file(in_path: str, out_path: str, *, timeout: float = v.TIMEOUT) -> dict[str, int]:
    """Grade every line of a JSONL file, in parallel, answered in order; the count of each verdict.

    A row is `{kind: math|number|letter|text, gold, text}`, optionally with `choices` and `strict` (default false). A
    row that cannot be read or graded is answered by `error` and a message, in its place.
    """
    counts: Counter[str] = Counter()
    with open(in_path, encoding="utf-8", errors="replace") as rows, open(out_path, "w", encoding="utf-8") as out:
        for index, verdict in enumerate(_settle(map(_grade_line, rows), timeout)):
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


def check_golds(tasks: Iterable[Task], *, timeout: float = v.GOLD_TIMEOUT) -> list[str]:
    """One line for each Task whose gold is not right against itself; expressions are parsed, not compared as text."""
    tasks = list(tasks)
    problems = []
    for task, verdict in zip(tasks, _settle(map(_check, tasks), timeout), strict=True):
        if not verdict.right:
            gold = repr(str(task.answer)[:80])
            problems.append(f"{task.id}: gold {gold} is {verdict.verdict} against itself: {verdict.detail}")
    return problems


def _settle(found: Iterable[v.Verdict | pool.Job], timeout: float) -> Iterator[v.Verdict]:
    """The verdicts in order; jobs run in parallel, a chunk at a time."""
    stream = iter(found)
    with ThreadPoolExecutor(2 * pool.WORKERS, thread_name_prefix="cothink-verify") as threads:
        while chunk := list(itertools.islice(stream, CHUNK)):
            running = [one if isinstance(one, v.Verdict) else threads.submit(v._finish, one, timeout) for one in chunk]
            yield from (one if isinstance(one, v.Verdict) else one.result() for one in running)


def _grade_line(line: str) -> v.Verdict | pool.Job:
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
        return v._decide(row["kind"], row["gold"], row["text"], strict, choices, row.get("gym"))
    except Exception as error:  # one row may never end the file
        return v.Verdict("error", detail=f"{type(error).__name__}: {error}"[:300])


def _check(task: Task) -> v.Verdict | pool.Job:
    kind, gold, meta = v.kind_of(task), task.answer, task.meta
    if kind in ("math", "auto") and isinstance(gold, str) and gold.strip() and exact.plain_number(gold) is None:
        return pool.Job("math_verify", worker.maths, (gold.strip(), False, gold.strip()))
    own = f"[[{gold}]]" if kind == "verdict" else f"\\boxed{{{gold}}}"
    return v._decide(kind, gold, own, True, meta.get("choices"), meta.get("gym"))
