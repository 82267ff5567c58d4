"""The evaluations of finished runs side by side: those on the same questions are compared, whatever run they are of."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from cothink.record import RunError
from cothink.stages import versus
from cothink.stages.answers import Row
from cothink.stages.reports import Table, tables
from cothink.stages.summary import Questions

MOST = 12
"""Evaluations of one group that are compared in pairs: 66 comparisons; of more, the last ones of every run."""
KEPT = ("set", "task", "play", "accuracy", "vote", "level")
NEEDED = ("per_task", "k", "sets", "by_level", "pass_at", "maj_at", "macro", "roles")


def evaluated(runs: Mapping[str, tuple[Path, Mapping[str, Any]]]) -> list[Table]:
    """Tables of all evaluations of some runs (folder and results of each): a group for each set of questions."""
    groups: dict[frozenset[str], dict[str, tuple[Path, str, Mapping[str, Any]]]] = {}
    old: list[list[str]] = []
    for run, (folder, results) in runs.items():
        for label, values in results.items():
            name = f"{run} {label}" if len(runs) > 1 else label
            if all(key in values for key in NEEDED):
                groups.setdefault(frozenset(values["per_task"]), {})[name] = (folder, label, values)
            else:
                old.append([name, f"{values['accuracy']:.3f}", str(values.get("n", "")), str(values.get("tokens", ""))])
    found = [table for group in groups.values() for table in _group(group)]
    if old:
        note = "Written by an earlier version, which kept too little to compare them."
        found.append(("Earlier evaluations", ["evaluation", "accuracy", "questions", "tokens"], old, note))
    return found


def _group(group: Mapping[str, tuple[Path, str, Mapping[str, Any]]]) -> list[Table]:
    systems = {name: values for name, (_, _, values) in group.items()}
    chosen = dict([*group.items()][-MOST:])
    questions = {name: Questions(plays(*place)) for name, place in chosen.items()}
    sets = dict.fromkeys(name for values in systems.values() for name in values["sets"])
    compared = versus.compare(questions) if len(questions) > 1 else []
    return tables({"systems": systems, "sets": sets, "comparisons": compared})


def plays(folder: Path, label: str, values: Mapping[str, Any]) -> Iterator[Row]:
    """The outcome of every play; where each question was played once, the summary says it all."""
    if values["k"] == 1 and len(values["sets"]) == 1:
        name = next(iter(values["sets"]))
        for task, right in values["per_task"].items():
            yield {"set": name, "task": task, "play": 0, "accuracy": right, "vote": 0, "level": None}
        return
    files = [
        p for p in (folder / "episodes").glob(f"*-{label}/000000.jsonl") if p.parent.name.partition("-")[2] == label
    ]
    if not files:
        raise RunError(f"{folder} has lost the answers of its evaluation {label!r} (episodes/*-{label}/000000.jsonl)")
    with files[-1].open(encoding="utf-8") as lines:
        for line in lines:
            row = json.loads(line)
            yield {key: row.get(key) for key in KEPT}
