"""What a team's turns did: accuracy after each one, what verifiers and refiners changed, and MALT's own protocol.

Rows are those of `answers`; sources are sections of the MALT specification (arXiv 2412.01928).
"""

from __future__ import annotations

import asyncio
import random
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from cothink import stats
from cothink.evaluate_rules import QUESTIONS, SUBSETS
from cothink.record import RunError
from cothink.stages.answers import Key, Row
from cothink.stages.summary import Questions, figure
from cothink.types import Task
from cothink.verify import averify_task
from cothink.votes import answer_of, classes

KINDS = ("wrong_to_right", "right_to_right", "wrong_to_wrong", "right_to_wrong")
VERIFIER, REFINER = "verifier", "refiner"


def transitions(before: Sequence[bool], after: Sequence[bool]) -> dict[str, int]:
    """How many questions went from wrong to right and so on; both in the same order of questions."""
    counts = Counter((bool(b), bool(a)) for b, a in zip(before, after, strict=True))
    ways = ((False, True), (True, True), (False, False), (True, False))
    found: dict[str, int] = {kind: counts[way] for kind, way in zip(KINDS, ways, strict=True)}
    assert sum(found.values()) == len(after)
    assert found["wrong_to_right"] + found["right_to_right"] == sum(map(bool, after))
    assert found["right_to_right"] + found["right_to_wrong"] == sum(map(bool, before))
    return found


def between(before: Questions, after: Questions) -> dict[str, Any]:
    """Transitions from the baseline's first plays to this system: its first plays, and its votes where it has some."""
    first, now = before.first(), after.first()
    keys = [key for key in now if key in first]
    found: dict[str, Any] = {
        "questions": len(keys),
        "no_vote": transitions([first[key] == 1 for key in keys], [now[key] == 1 for key in keys]),
    }
    if after.k > 1:
        voted = {key: _vote(plays[: after.k]) for key, plays in after.plays.items()}
        found["vote"] = transitions([first[key] == 1 for key in keys], [voted[key] for key in keys])
    return found


def _vote(plays: Sequence[Row]) -> bool:
    right = [row["accuracy"] == 1.0 for row in plays]
    return stats.majority_at_k([row["vote"] for row in plays], right, len(plays)) == 1.0


async def turns(rows: Sequence[Row], tasks: Mapping[Key, Task], answering: Sequence[str]) -> dict[str, Any]:
    """Figures of every turn's own answer, over plays that are lines (one turn after the other).

    `levels`: accuracy in first plays, the vote over the plays, unparsable share, by place. `verifier`: how often it
    states the answer it checked, when that is right and when it is wrong; `agreement` is the share in which it was
    right to do so. `refiner`: what became of the answer before it. `carried`: plays whose last turn is not graded.
    """
    graded = await asyncio.gather(*(_graded(row, tasks[row["set"], row["task"]], answering) for row in rows))
    keys = [(row["set"], row["task"]) for row in rows]
    places = dict.fromkeys((k, turn["role"]) for row in rows for k, turn in enumerate(row["turns"]))
    found: dict[str, Any] = {"levels": []}
    for k, role in places:
        said = [(key, marks[k] if k < len(marks) else None) for key, marks in zip(keys, graded, strict=True)]
        here = [(key, mark) for key, mark in said if mark is not None and mark["role"] == role]
        if here:
            found["levels"].append({"place": k, "role": role, **await _level(here, tasks)})
    checks = [pair for marks in graded for pair in _after(marks, VERIFIER)]
    if checks:
        found["verifier"] = await _checked(checks)
    changes = [(before["right"], after["right"]) for marks in graded for before, after in _after(marks, REFINER)]
    if changes:
        found["refiner"] = transitions([b for b, _ in changes], [a for _, a in changes])
    carried = sum(bool(row["turns"]) and row["graded"] not in (None, row["turns"][-1]["id"]) for row in rows)
    return {**found, "carried": carried}


async def _graded(row: Row, task: Task, answering: Sequence[str]) -> list[dict[str, Any] | None]:
    """Verdict and answer of every turn; None for roles that state none."""

    async def one(turn: Mapping[str, Any]) -> dict[str, Any] | None:
        if turn["role"] not in answering:
            return None
        text = turn.get("shown", turn["text"])
        verdict = (await averify_task(task, text)).verdict
        answer = answer_of(task, text) if verdict in ("right", "wrong") else None
        return {"role": turn["role"], "task": task, "verdict": verdict, "right": verdict == "right", "answer": answer}

    return await asyncio.gather(*map(one, row["turns"]))


async def _level(here: Sequence[tuple[Key, dict[str, Any]]], tasks: Mapping[Key, Task]) -> dict[str, Any]:
    plays: dict[Key, list[dict[str, Any]]] = {}
    for key, mark in here:
        plays.setdefault(key, []).append(mark)
    k = min(map(len, plays.values()))
    found: dict[str, Any] = {
        "no_vote": figure([float(marks[0]["right"]) for marks in plays.values()]),
        "unparsable": sum(mark["verdict"] == "unparsable" for _, mark in here) / len(here),
    }
    if k > 1:
        outcomes = []
        for key, marks in plays.items():
            votes = await classes(tasks[key], [mark["answer"] for mark in marks[:k]])
            outcomes.append(stats.majority_at_k(votes, [mark["right"] for mark in marks[:k]], k))
        found["vote"] = figure(outcomes)
    return found


def _after(marks: Sequence[dict[str, Any] | None], role: str) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """(the answer before it, it) for every turn of a role; verifiers' own answers are passed over."""
    found, last = [], None
    for mark in marks:
        if mark is None:
            continue
        if mark["role"] == role and last is not None:
            found.append((last, mark))
        if mark["role"] != VERIFIER:
            last = mark
    return found


async def _checked(pairs: Sequence[tuple[dict[str, Any], dict[str, Any]]]) -> dict[str, Any]:
    """The verifier's stated answer against the answer it checked, and against the gold answer."""
    counts: Counter[tuple[bool, bool]] = Counter()
    silent = 0
    for before, check in pairs:
        if check["answer"] is None:
            silent += 1
            continue
        one, two = await classes(check["task"], [before["answer"], check["answer"]])
        counts[before["right"], one is not None and one == two] += 1
    stated = counts.total()
    return {
        "checks": len(pairs),
        "unparsable": silent,
        "right": sum(check["right"] for _, check in pairs) / len(pairs),
        "confirmed_right": counts[True, True],
        "rejected_right": counts[True, False],
        "confirmed_wrong": counts[False, True],
        "rejected_wrong": counts[False, False],
        "agreement": (counts[True, True] + counts[False, False]) / stated if stated else None,
    }


def subsets(tasks: Sequence[Task], name: str, seed: int, size: int | None = None) -> dict[str, Sequence[Task]]:
    """The paper's random test subsets, the same for every system of one seed; raises RunError for too few tasks."""
    size = size or QUESTIONS
    if len(tasks) < size:
        what = f"the paper's protocol draws {size} questions at a time, and {name} has {len(tasks)}"
        raise RunError(f"{what}: name a larger set, or write limit: {len(tasks)} or less")
    return {f"{name}-{k}": random.Random(f"{seed}/{name}/subset/{k}").sample(list(tasks), size) for k in range(SUBSETS)}


def paper(rows: Sequence[Row]) -> dict[str, Any]:
    """Mean and population standard deviation over the subsets, without and with a vote over all plays."""
    parts: dict[str, list[Row]] = {}
    for row in rows:
        parts.setdefault(row["set"], []).append(row)
    every = [Questions(part) for part in parts.values()]
    ways = {"no_vote": [[v == 1 for v in questions.first().values()] for questions in every]}
    if all(questions.k > 1 for questions in every):
        ways["vote"] = [[_vote(plays[: q.k]) for plays in q.plays.values()] for q in every]
    found: dict[str, Any] = {"subsets": len(every), "questions": [len(q.plays) for q in every]}
    for way, outcomes in ways.items():
        scores = [sum(right) / len(right) for right in outcomes]
        found[way] = {"mean": statistics.fmean(scores), "std": statistics.pstdev(scores), "scores": scores}
    return found
