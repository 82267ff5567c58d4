"""What the credit of an rl stage asks of the team and the workflow, and which of its settings do nothing."""

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


def _solo(s: Any) -> Iterator[Problem]:
    guide, roles, block = s.stage.credit.guide, s.recipe.team.roles, s.recipe.team.workflow
    if guide is None:
        what = "ccpo_solo plays once more without the role that guides the others: which one?"
        yield s.error("E15", "credit.guide", what, f"guide: one of {listing(roles)}")
        return
    if guide not in roles:
        yield unknown(f"{s.where}.credit.guide", "role", guide, roles)
        return
    if not roles[guide].trainable:
        what = f"role {guide!r} does not learn, so its bonus would teach nobody"
        yield s.error("E15", "credit.guide", what, f"trainable: true in team.roles.{guide}, or credit: broadcast")
    if len(roles) < 2:
        yield s.error("E15", "credit.guide", f"without {guide!r} nobody is left to answer", "credit: broadcast")
        return
    order = effective(resolve("workflow", block.name), block.options).get("order") or ()
    if guide in order[-1:]:
        what = f"{guide!r} speaks last, and its answer is the graded one: silent, there is none"
        yield s.error("E15", "credit.guide", what, f"guide: one of {listing(r for r in order if r != guide)}")
    if wiring.branches(s.recipe):
        what = "on a tree a guide's turns have rewards of their own, and a bonus for the whole play fits none of them"
        yield s.error("E15", "credit", what, "a workflow of one line, or credit: c3_suffix")


def idle(stage: Any) -> list[tuple[bool, str, Iterable[str]]]:
    """Settings of credit and estimator that do nothing beside the others: (applies, reason, keys)."""
    name = stage.credit.name
    return [
        (name not in ("turn_return", "vine"), f"{name} discounts nothing", ["credit.gamma"]),
        (name != "ccpo_solo", f"credit {name} has no solo arm", ONLY_SOLO),
        (name in BY_SIBLINGS, f"credit {name} is an advantage already", ["estimator"]),
    ]


def words(stage: Any) -> Iterator[str]:
    """What the credit costs, for the preview."""
    if stage.credit.name == "ccpo_solo":
        plays = stage.credit.solo_plays or stage.episodes_per_task
        yield f"  each row is played {plays} times more without {stage.credit.guide}, which the sums below leave out"
