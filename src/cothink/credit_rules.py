"""What credit and gate of an rl stage ask of the team and the workflow, and which of their settings do nothing."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from cothink import wiring
from cothink.counterfactual import BY_SIBLINGS
from cothink.resolve import Problem, effective, listing, resolve, unknown

ONLY_SOLO = ["credit.guide", "credit.strength", "credit.bonus", "credit.solo_plays"]


def findings(s: Any) -> Iterator[Problem]:
    """Everything there is to say about one stage; `s` is the stage as the rules see it."""
    name = s.stage.credit.name
    if name in BY_SIBLINGS and not wiring.branches(s.recipe):
        what = f"credit {name} compares sibling turns, and workflow {s.recipe.team.workflow.name!r} has none"
        yield s.error("E05", "credit", what, "credit: broadcast, or a workflow that samples siblings")
    if name == "ccpo_solo":
        yield from _solo(s)
    yield from _gate(s)


def _solo(s: Any) -> Iterator[Problem]:
    guide, roles = s.stage.credit.guide, s.recipe.team.roles
    if guide is None:
        what = "ccpo_solo plays once more without the role that guides the others: which one?"
        yield s.error("E15", "credit.guide", what, f"guide: one of {listing(roles)}")
        return
    yield from _guide(s, "credit.guide", guide)
    if guide in roles and not roles[guide].trainable:
        what = f"role {guide!r} does not learn, so its bonus would teach nobody"
        yield s.error("E15", "credit.guide", what, f"trainable: true in team.roles.{guide}, or credit: broadcast")
    if wiring.branches(s.recipe):
        what = "on a tree a guide's turns have rewards of their own, and a bonus for the whole play fits none of them"
        yield s.error("E15", "credit", what, "a workflow of one line, or credit: c3_suffix")


def _guide(s: Any, where: str, guide: str) -> Iterator[Problem]:
    """Whether the team can play without a role."""
    roles, block = s.recipe.team.roles, s.recipe.team.workflow
    order = effective(resolve("workflow", block.name), block.options).get("order") or ()
    if guide not in roles:
        yield unknown(f"{s.where}.{where}", "role", guide, roles)
    elif len(roles) < 2:
        yield s.error("E15", where, f"without {guide!r} nobody is left to answer", f"nothing here (remove {where})")
    elif guide in order[-1:]:
        what = f"{guide!r} speaks last, and its answer is the graded one: silent, there is none"
        yield s.error("E15", where, what, f"guide: one of {listing(r for r in order if r != guide)}")


def _gate(s: Any) -> Iterator[Problem]:
    gate = s.stage.gate
    if gate is None:
        return
    low, high = gate.accuracy
    if low >= high:
        what = f"no accuracy lies between {low:g} and {high:g}"
        yield s.error("E11", "gate.accuracy", what, "low before high, such as [0.2, 0.8]")
    if gate.guide is not None:
        yield from _guide(s, "gate.guide", gate.guide)


def idle(recipe: Any, stage: Any) -> list[tuple[bool, str, Iterable[str]]]:
    """Settings of credit and estimator that do nothing beside the others: (applies, reason, keys)."""
    name = stage.credit.name
    alone = len(recipe.team.roles) == 1 and wiring.expected_turns(recipe) == 1
    return [
        (alone, "nobody reads the one message there is", ["influence"]),
        (name not in ("turn_return", "vine"), f"{name} discounts nothing", ["credit.gamma"]),
        (name != "ccpo_solo", f"credit {name} has no solo arm", ONLY_SOLO),
        (name in BY_SIBLINGS, f"credit {name} is an advantage already", ["estimator"]),
    ]


def words(stage: Any) -> Iterator[str]:
    """What credit and gate cost, for the preview."""
    if stage.gate is not None:
        low, high = stage.gate.accuracy
        twice = " twice" if stage.gate.guide else ""
        sizes = f"{stage.gate.rows} rows x {stage.gate.plays}{twice}"
        yield f"  a gate plays up to {sizes} first and asks for an accuracy of {low:g} to {high:g}"
    if stage.credit.name == "ccpo_solo":
        plays = stage.credit.solo_plays or stage.episodes_per_task
        yield f"  each row is played {plays} times more without {stage.credit.guide}, which the sums below leave out"
