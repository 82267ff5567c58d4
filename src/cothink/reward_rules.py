"""What the rewards of an rl stage ask of the workflow: found before any model loads."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from cothink.resolve import Problem, effective, resolve
from cothink.rewards.consistency import LEAST

NEEDED = {"consistency.plan": ("n_solutions", LEAST), "actions.plan": ("actions", True)}
"""Reward -> the option of the workflow without which it says nothing, and its least value."""


def findings(s: Any) -> Iterator[Problem]:
    """Everything there is to say about one stage; `s` is the stage as the rules see it."""
    block = s.recipe.team.workflow
    options = effective(resolve("workflow", block.name), block.options)
    for k, reward in enumerate(s.stage.rewards):
        option, least = NEEDED.get(reward.name, ("", 0))
        if not least or (":" in block.name and option not in options):
            continue  # a workflow of the user's own may do it in another way
        given = options.get(option)
        if given is None or given < least:
            wanted = f"{option}: {str(least).lower()}"
            what = f"{reward.name} needs a workflow with {wanted}" + " or more" * (least > 1)
            has = "has no such option" if given is None else f"has {option}: {str(given).lower()}"
            fix = f"workflow: {{name: rema, max_turns: 1, {wanted}}}"
            yield s.error("E24", f"rewards.{k}", f"{what}, and {block.name!r} {has}", fix)
        elif option == "n_solutions":
            yield from _alike(s, k, reward.name, options.get("order", ()))


def _alike(s: Any, k: int, name: str, order: Any) -> Iterator[Problem]:
    """At temperature 0 one answer is sampled, since all would be equal."""
    for role in (r for r in order[-1:] if s.recipe.team.roles[r].temperature == 0):
        what = f"{name} compares the answers of {role!r}, which are all equal at temperature 0"
        yield s.error("E24", f"rewards.{k}", what, f"team.roles.{role}.temperature: 1.0")
