"""What a collect stage may not say, and what its trees will cost, counted before anything is played."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from cothink import seating, wiring
from cothink.resolve import Problem, RecipeError, effective, resolve

if TYPE_CHECKING:
    from cothink.parts import Collect
    from cothink.recipe import Recipe

TEST_SPLITS = ("test", "dev", "validation")


def split(recipe: Recipe, stage: Collect) -> str:
    """The data split of a stage's tasks: the loader's `split`; where it has none, what the set is called."""
    block = recipe.tasks[stage.on]
    named = effective(resolve("tasks", block.name), block.options).get("split")
    return str(named) if named is not None else stage.on if stage.on in TEST_SPLITS else "train"


def round_of(recipe: Recipe, index: int) -> int:
    """How many collect stages come before a stage."""
    return sum(stage.kind == "collect" for stage in recipe.stages[:index])


def links(recipe: Recipe, stage: Collect, index: int) -> Iterator[Problem]:
    """Trees without alternatives, and trees that no stage may learn from."""
    where, name = f"stages.{index}", recipe.team.workflow.name
    run = resolve("workflow", name, "team.workflow")
    if stage.branching is not None and "branching" not in effective(run, {}):
        what = f"workflow {name!r} has no option branching"
        yield Problem(f"{where}.branching", what, "workflow: malt, or no branching here", code="E01")
        return
    block = seating.workflow(recipe, stage)
    try:
        wiring.declared(block, "roles", "ROLES", where)
    except RecipeError as error:
        yield from error.problems
        return
    if ":" not in name and not wiring.declared(block, "branches", "BRANCHES", where):
        what = f"workflow {name!r} samples no alternatives here, and a tree needs some to compare"
        write = (
            "branching: [3, 3, 3]" if "branching" in effective(run, {}) else "a workflow with branching, such as malt"
        )
        yield Problem(f"{where}.branching", what, write, code="E01")
    heats = {n: r.temperature if stage.temperature is None else stage.temperature for n, r in recipe.team.roles.items()}
    for role in (n for n, heat in heats.items() if heat == 0):
        spot = f"team.roles.{role}.temperature" if stage.temperature is None else f"{where}.temperature"
        yield Problem(spot, "at temperature 0 all alternatives are equal", "0.3 or more", code="E01")
    if stage.on in recipe.tasks and split(recipe, stage) in TEST_SPLITS:
        later = (k for k, s in enumerate(recipe.stages) if k > index and s.kind in ("sft", "dpo"))
        for k in (k for k in later if recipe.stages[k].data.name == "tree"):  # type: ignore[union-attr]
            what = f"stage {k} would learn from trees on the split {split(recipe, stage)!r}"
            yield Problem(f"{where}.on", what, "a set of the training split", code="E01")
            return


@dataclass(frozen=True)
class Cost:
    """What the trees of one task cost: engine calls (a prompt each), completions and leaves."""

    calls: int
    completions: int
    leaves: int


def cost(branching: Sequence[int]) -> Cost:
    """The cost of one whole tree, from how many alternatives there are at each level."""
    sizes = [math.prod(branching[: k + 1]) for k in range(len(branching))]
    return Cost(1 + sum(sizes[:-1]), sum(sizes), sizes[-1])
