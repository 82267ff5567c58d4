"""Where the names of a recipe lead: its functions, and what the workflow's module says about its roles."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from cothink import seating
from cothink.resolve import Problem, RecipeError, bind, effective, listing, nearest, resolve

if TYPE_CHECKING:
    from cothink.parts import Block
    from cothink.recipe import Recipe


def blocks(recipe: Recipe) -> list[tuple[str, str, Block]]:
    """Every named function of a recipe: (kind, dotted place, block)."""
    found: list[tuple[str, str, Block]] = [("workflow", "team.workflow", recipe.team.workflow)]
    found += [("tasks", f"tasks.{name}", block) for name, block in recipe.tasks.items()]
    found.append(("engine", "engine", recipe.engine))
    for k, stage in enumerate(recipe.stages):
        if stage.kind == "sft":
            found.append(("conversations", f"stages.{k}.data", stage.data))
        if stage.kind == "collect":
            found.append(("workflow", f"stages.{k}", seating.workflow(recipe, stage)))
        if stage.kind == "evaluate" and stage.workflow is not None:
            found.append(("workflow", f"stages.{k}.workflow", seating.evaluated(recipe, stage)))
        if stage.kind == "rl":
            found += [("reward", f"stages.{k}.rewards.{j}", block) for j, block in enumerate(stage.rewards)]
            found.append(("estimator", f"stages.{k}.estimator", stage.estimator))
            found.append(("loss", f"stages.{k}.loss", stage.loss))
    return found


def workflow_roles(recipe: Recipe) -> dict[str, str] | None:
    """Role name -> default system prompt as the workflow's module declares them; None when it declares none."""
    found = _beside_workflow(recipe, "roles", "ROLES")
    return None if found is None else dict(found)


def expected_turns(recipe: Recipe) -> int:
    """The most turns one role has in one episode: what the workflow says, else its `max_turns`, else 1."""
    found = _beside_workflow(recipe, "turns", "TURNS")
    if found is None:
        options = effective(resolve("workflow", recipe.team.workflow.name), recipe.team.workflow.options)
        found = options.get("max_turns", 1)
    return int(found)


def _beside_workflow(recipe: Recipe, function: str, constant: str) -> Any:
    return declared(recipe.team.workflow, function, constant)


def declared(block: Block, function: str, constant: str, where: str = "team.workflow") -> Any:
    """What a workflow's module says beside it: `function` of its options, else `constant`; None where there is none."""
    run = resolve("workflow", block.name, where)
    module = sys.modules.get(run.__module__)
    declare = getattr(module, function, None)
    if not callable(declare):
        return getattr(module, constant, None)
    options = bind(run, block.options, where).keywords  # type: ignore[attr-defined]
    try:
        return declare(**effective(run, options))
    except ValueError as error:  # options that contradict one another
        raise RecipeError(Problem(where, str(error), code="E01")) from None


def seats(recipe: Recipe) -> list[Problem]:
    """The recipe's roles against those the workflow asks for."""
    needed = workflow_roles(recipe)
    if needed is None:
        return []
    name, given = recipe.team.workflow.name, recipe.team.roles
    problems = []
    for role in (r for r in needed if r not in given):
        what = f"workflow {name!r} needs the role {role!r}"
        problems.append(Problem("team.roles", what, f"{role}: {{policy: {next(iter(recipe.policies))}}}", code="E01"))
    for role in (r for r in given if r not in needed):
        what = f"workflow {name!r} has no role {role!r}"
        fix = f"its roles: {listing(needed)}"
        problems.append(Problem(f"team.roles.{role}", what, fix, nearest(role, needed), "E01"))
    return problems


def branches(recipe: Recipe) -> bool:
    """Whether the workflow samples sibling turns: its module's `branches(**options)`; user code without it may."""
    found = _beside_workflow(recipe, "branches", "BRANCHES")
    return ":" in recipe.team.workflow.name if found is None else bool(found)


def alone(block: Block) -> Mapping[str, Any]:
    """The options under which a workflow is played for its answer alone: those of its `ALONE` that the block sets."""
    run = resolve("workflow", block.name, "team.workflow")
    found = getattr(sys.modules.get(run.__module__), "ALONE", {})
    return {name: value for name, value in found.items() if name in block.options}


def needs(recipe: Recipe) -> tuple[str, ...]:
    """The keys of a task's meta that the workflow reads: its module's `NEEDS`."""
    return tuple(_beside_workflow(recipe, "needs", "NEEDS") or ())
