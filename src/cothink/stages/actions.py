"""Which JSON actions a planner chooses for which questions (arXiv 2503.09501, figure 4)."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from typing import TYPE_CHECKING

from cothink.actions import ACTIONS, read
from cothink.resolve import effective, resolve
from cothink.types import Episode, Turn

if TYPE_CHECKING:
    from cothink.recipe import Recipe

INVALID = "INVALID"
"""Texts that are no valid action, and those that were cut."""


def written(recipe: Recipe) -> bool:
    """Whether the planner of a recipe writes JSON actions: its workflow's option `actions`."""
    block = recipe.team.workflow
    return bool(effective(resolve("workflow", block.name), block.options).get("actions"))


def chosen(turn: Turn) -> str:
    """The action of a planner's turn, or INVALID."""
    action = None if turn.completion.finish_reason == "length" else read(turn.completion.text)
    return INVALID if action is None else action.action


def by_action(episodes: Iterable[Episode]) -> dict[str, dict[str, float | None]]:
    """For every action, and INVALID: how many plans chose it, their share, and the mean level of their tasks.

    A plan is a turn that answers nobody. `level` is None where no plan with a level (`task.meta["level"]`) chose the
    action, `share` where there are no plans at all; counts are 0 there.
    """
    plans = [(chosen(turn), e.task.meta.get("level")) for e in episodes for turn in e.turns if not turn.parents]
    found: dict[str, dict[str, float | None]] = {}
    for name in (*ACTIONS, INVALID):
        levels = [level for action, level in plans if action == name]
        known = [number for level in levels if (number := _number(level)) is not None]
        found[name] = {
            "level": math.fsum(known) / len(known) if known else None,
            "share": len(levels) / len(plans) if plans else None,
            "count": len(levels),
        }
    return found


def _number(level: object) -> float | None:
    """A level as a number, also one that data sets write as `Level 3`; None where it is none."""
    found = re.fullmatch(r"(?:Level )?(\d+(?:\.\d+)?)", str(level))
    return float(found[1]) if found else None


def figures(episodes: Iterable[Episode]) -> dict[str, float | None]:
    """The same as flat metrics: `action/EMPTY/level` and so on."""
    return {f"action/{name}/{k}": v for name, part in by_action(episodes).items() for k, v in part.items()}
