"""Stored trees and episodes as text: who said what, what it is worth, and the label it got. No model is needed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any

from cothink import store
from cothink.record import RunError
from cothink.report.episodes import parsed
from cothink.trees import Grade, Tree
from cothink.trees.labels import Labelled, Rules, depths, groups

WORDS = {True: "good", False: "bad", None: "unlabelled"}
STEP = "  "


class ShowError(RunError):
    """A folder or a task that is not there."""


def lines(
    folder: Path, task: str | None = None, *, theta: str = "0.5", limit: int = 20, own: bool = False
) -> Iterator[str]:
    """What a store or a run folder holds: of one task every turn, else a line for each of the first `limit` tasks.

    Turns are good above `theta`; with `own` by their own answers instead of those below them.
    """
    try:
        Fraction(theta)
    except ValueError:
        raise ShowError(f"theta {theta!r} is no number; write one from 0 to below 1, such as 0.5") from None
    rules = Rules(theta, "own" if own else "subtree", duplicates="none")
    places = _stores(folder)
    shown, known = 0, 0
    for place in places:
        trees = store.load(place, partial=True)
        branching = store.header(place)["workflow"].get("branching")
        if len(places) > 1 and task is None:
            yield f"{place}:"
        for tree in trees:
            known += 1
            if task is None and shown < limit:
                yield _summary(tree, rules, branching)
                shown += 1
            elif task == tree.episode.task.id:
                yield from _tree(tree, rules, branching)
                shown += 1
    unread: list[str] = []
    for row in _chains(folder, unread):
        known += 1
        if task is None and shown < limit:
            yield _chain_summary(row)
            shown += 1
        elif task == row["task"]:
            yield from _chain(row)
            shown += 1
    if unread:
        yield f"{len(unread):,} lines hold no episode; the first: {unread[0]}"
    if task is not None and not shown:
        raise ShowError(f"{folder} holds nothing about the task {task!r}; without --task its tasks are listed")
    if not known:
        raise ShowError(f"{folder} holds neither trees nor episodes: name a run folder, or one of its trees/ folders")
    if task is None and known > shown:
        yield f"{known - shown:,} more (--limit)"


def _stores(folder: Path) -> list[Path]:
    if (folder / store.HEADER).exists():
        return [folder]
    return sorted(p.parent for p in folder.glob(f"trees/*/{store.HEADER}"))


def _labelled(tree: Tree, rules: Rules, branching: Sequence[int] | None) -> dict[str, Labelled]:
    if not tree.episode.turns:
        return {}
    return {one.turn.id: one for group in groups([tree], rules, branching) for one in group.members}


def _summary(tree: Tree, rules: Rules, branching: Sequence[int] | None) -> str:
    found = _labelled(tree, rules, branching)
    depth = depths(tree.episode.turns)
    parts = []
    for role in dict.fromkeys(turn.role for turn in tree.episode.turns):
        labels = [one.good for one in found.values() if one.turn.role == role]
        parts.append(f"{role} {labels.count(True)} good {labels.count(False)} bad")
    roots = [found[turn].value for turn, level in depth.items() if level == 0 and turn in found]
    values = " ".join("-" if value is None else str(value) for value in roots)
    state = "" if tree.grades else ", still growing"
    return f"{tree.episode.task.id}: gold {tree.episode.task.answer}, values {values}; {', '.join(parts)}{state}"


def _tree(tree: Tree, rules: Rules, branching: Sequence[int] | None) -> Iterator[str]:
    task = tree.episode.task
    yield f"{task.id}, round {tree.round}, split {tree.split}"
    yield from _indented(task.question, STEP)
    yield f"{STEP}gold: {task.answer}"
    found, below = _labelled(tree, rules, branching), {turn.id: [] for turn in tree.episode.turns}
    roots = []
    for turn in tree.episode.turns:
        (below[turn.parents[-1]] if turn.parents else roots).append(turn)

    def grown(turns: Sequence[Any], level: int) -> Iterator[str]:
        for turn in turns:
            worth, said = _worth(found.get(turn.id)), _said(tree.grades.get(turn.id))
            yield f"{STEP * level}{turn.id} {turn.role}: {worth}; {said}"
            yield from _indented(turn.text, STEP * (level + 1) + "| ")
            if turn.completion.finish_reason == "length":
                yield f"{STEP * (level + 1)}(cut off at the token limit)"
            yield from grown(below[turn.id], level + 1)

    yield from grown(roots, 0)


def _worth(one: Labelled | None) -> str:
    if one is None or one.value is None:
        return "no value"
    right, leaves = one.pair
    return f"{right}/{leaves} {WORDS[one.good]}"


def _said(grade: Grade | None) -> str:
    if grade is None:
        return "not graded"
    return f"says {grade.answer} ({grade.verdict})" if grade.answer is not None else f"no answer ({grade.verdict})"


def _indented(text: str, by: str) -> Iterator[str]:
    yield from (f"{by}{line}" for line in text.splitlines() or [""])


def _chains(folder: Path, unread: list[str]) -> Iterator[Mapping[str, Any]]:
    """The stored episodes of a run's evaluations and rl steps; places of lines that hold none go to `unread`."""
    for path in sorted(folder.glob("episodes/*/*.jsonl")):
        if path.parent.name.endswith("-collect"):  # the trees of the store, once more for reports
            continue
        for number, line in enumerate(path.read_bytes().split(b"\n"), 1):  # texts may hold other ends of lines
            row = parsed(line) if line else None
            if row is None or not isinstance(row.get("task"), str):
                if line:
                    unread.append(f"{path.parent.name}/{path.name}, line {number}")
                continue
            yield {**row, "file": f"{path.parent.name}/{path.stem}"}


def _chain_summary(row: Mapping[str, Any]) -> str:
    said = f"gold {row.get('gold')}, {row.get('verdict')}, {len(row['turns'])} turns"
    return f"{row['task']} in {row['file']}: {said}"


def _chain(row: Mapping[str, Any]) -> Iterator[str]:
    yield f"{row.get('id')} in {row['file']}: {row.get('verdict')} ({row.get('finish')})"
    yield from _indented(str(row.get("question", "")), STEP)
    yield f"{STEP}gold: {row.get('gold')}"
    for turn in row["turns"]:
        worth = "" if turn.get("return") is None else f", return {turn['return']:g}"
        parents = turn.get("parents")
        answers = f" (answers {', '.join(map(str, parents))})" if parents else ""
        yield f"{turn.get('id')} {turn['role']}{answers}: {turn.get('tokens')} tokens{worth}"
        yield from _indented(str(turn.get("text", "")), STEP + "| ")
