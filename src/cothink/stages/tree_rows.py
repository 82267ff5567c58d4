"""Collected trees as rows of episodes, for whoever reads them: every turn with its grade and its value."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from cothink import credit
from cothink.record import episode_row
from cothink.trees import Tree
from cothink.trees.labels import depths


def rows(trees: Iterable[Tree], name: str) -> Iterator[dict[str, Any]]:
    """A row per tree of the task set `name`; a turn's value is the share of right leaves below it, each branch alike.

    Verdict and accuracy are those of the line that is graded.
    """
    for tree in trees:
        episode = tree.episode
        depth = depths(episode.turns)
        last = max(depth.values(), default=0)
        own = {k: int(g.verdict == "right") for k, g in tree.grades.items() if depth.get(k) == last}
        values = credit.returns(episode.turns, own)
        row = episode_row(episode)
        for turn in row["turns"]:
            grade, value = tree.grades.get(turn["id"]), values[turn["id"]]
            turn |= {} if grade is None else {"verdict": grade.verdict}
            turn |= {} if value is None else {"value": float(value)}
        final = tree.grades.get(episode.finish.turn or "")
        yield {**row, "set": name, "play": 0, "verdict": final and final.verdict,
               "accuracy": None if final is None else float(final.verdict == "right")}  # fmt: skip
