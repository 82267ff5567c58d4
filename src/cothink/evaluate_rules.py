"""What an evaluate stage may not say: seats that nobody has, baselines that do not exist, prompts that differ."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from cothink import seating, wiring
from cothink.resolve import Problem, RecipeError, listing, nearest, unknown

if TYPE_CHECKING:
    from cothink.parts import Evaluate
    from cothink.recipe import Recipe

SUBSETS, QUESTIONS = 4, 100
"""Random subsets of the paper's protocol, and questions in each (MALT, arXiv 2412.01928, v1)."""


def label_of(stage: Evaluate, index: int) -> str:
    """What a stage's results are called."""
    return stage.label or f"evaluate-{index}"


def policies(recipe: Recipe) -> set[str]:
    """The policies that evaluate stages name beside the recipe's team."""
    found = [stage.roles or {} for stage in recipe.stages if stage.kind == "evaluate"]
    return {seat.policy for roles in found for seat in roles.values() if not isinstance(seat, str)}


def links(recipe: Recipe, stage: Evaluate, index: int) -> Iterator[Problem]:
    """Names in a stage that lead nowhere, and settings that contradict one another."""
    where = f"stages.{index}"
    yield from _seats(recipe, stage, where)
    yield from _baseline(recipe, stage, index)
    if stage.protocol == "paper" and stage.diagnose:
        what = "the roles' influence is measured on the whole set, not on the paper's subsets"
        yield Problem(f"{where}.diagnose", what, "protocol: full, or no diagnose", code="E01")
    if stage.protocol == "paper" and stage.suite is not None:
        yield Problem(f"{where}.protocol", "the paper's protocol draws from one set, not from a suite", "on: test",
                      code="E01")  # fmt: skip


def _seats(recipe: Recipe, stage: Evaluate, where: str) -> Iterator[Problem]:
    own, given = recipe.team.roles, stage.roles or {}
    for name, seat in given.items():
        if isinstance(seat, str) and seat not in own:
            yield unknown(f"{where}.roles.{name}", "role of the team", seat, own)
        elif not isinstance(seat, str) and seat.policy not in recipe.policies:
            yield unknown(f"{where}.roles.{name}.policy", "policy", seat.policy, recipe.policies)
    if any(role.policy not in recipe.policies for role in own.values()):
        return  # said elsewhere
    try:
        block = seating.evaluated(recipe, stage)
        needed = wiring.declared(block, "roles", "ROLES", f"{where}.workflow")
        filled = seating.seats(recipe, stage)
    except RecipeError as error:
        if stage.workflow is not None:
            yield from error.problems
        return
    changed = stage.workflow is not None or stage.roles is not None  # else the team itself is checked elsewhere
    for name in (n for n in needed or () if changed and n not in filled and n not in given):
        what = f"workflow {block.name!r} needs the role {name!r}, which the team has not"
        yield Problem(f"{where}.roles", what, f"roles: {{{name}: {next(iter(own))}}}", code="E01")
    for name in given:
        if needed is None or name in needed:
            continue
        what = f"workflow {block.name!r} has no role {name!r}"
        yield Problem(f"{where}.roles.{name}", what, f"its roles: {listing(needed)}", nearest(name, needed), "E01")
    for name in stage.untrained:
        if name not in filled:
            yield unknown(f"{where}.untrained", "role that speaks here", name, filled)
        elif filled[name].policy in recipe.policies and recipe.policies[filled[name].policy].model.startswith(
            "openai:"
        ):
            what = f"role {name!r} speaks through a server, whose weights are not here"
            yield Problem(f"{where}.untrained", what, "roles whose models are here", code="E01")


def _baseline(recipe: Recipe, stage: Evaluate, index: int) -> Iterator[Problem]:
    if stage.baseline is None:
        return
    where = f"stages.{index}.baseline"
    before = {label_of(s, k): s for k, s in enumerate(recipe.stages[:index]) if s.kind == "evaluate"}
    if stage.baseline not in before:
        yield unknown(where, "earlier evaluation", stage.baseline, before)
        return
    other = before[stage.baseline]
    for key in ("on", "suite", "limit", "protocol"):
        if getattr(other, key) != getattr(stage, key):
            what = f"{stage.baseline!r} was asked other questions ({key} {getattr(other, key)})"
            yield Problem(where, what, f"the same {key} in both, or another baseline", code="E01")


def same_prompts(recipe: Recipe) -> Iterator[Problem]:
    """Evaluations of one recipe that give a role of one workflow different prompts: they would compare prompts too."""
    seen: dict[tuple[str, str], tuple[int, str]] = {}
    for k, stage in enumerate(recipe.stages):
        if stage.kind != "evaluate":
            continue
        block = seating.evaluated(recipe, stage)
        if wiring.declared(block, "layouts", "LAYOUTS") is None:
            continue
        for role, found in seating.template_hashes(block, seating.seats(recipe, stage)).items():
            first, known = seen.setdefault((block.name, role), (k, found))
            if known != found:
                what = (
                    f"role {role!r} has another prompt than in stages.{first}: their figures would compare prompts too"
                )
                yield Problem(f"stages.{k}", what, "the same system prompt and options in both", code="E01")
