"""What an sft stage may not say: names that lead nowhere, and settings that do nothing beside the others."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from cothink.resolve import Problem, listing, unknown

if TYPE_CHECKING:
    from cothink.parts import SFT
    from cothink.recipe import Recipe


def taught(recipe: Recipe, stage: SFT) -> tuple[str, ...]:
    """The roles an sft stage teaches: those it names, else every role that learns."""
    if stage.roles is not None:
        return stage.roles
    return tuple(name for name, role in recipe.team.roles.items() if role.trainable)


def links(recipe: Recipe, stage: SFT, where: str) -> Iterator[Problem]:
    """What is wrong with a stage's roles, length and sizes."""
    learning = [name for name, role in recipe.team.roles.items() if role.trainable]
    for name in taught(recipe, stage):
        role = recipe.team.roles.get(name)
        if role is None:
            yield unknown(f"{where}.roles", "role", name, recipe.team.roles)
        elif not role.trainable:
            what = f"the role {name!r} does not learn (trainable: false)"
            yield Problem(f"{where}.roles", what, f"one of: {listing(learning)}", code="E01")
        elif role.policy in recipe.policies and recipe.policies[role.policy].model.startswith("openai:"):
            what = f"role {name!r} is taught, and {recipe.policies[role.policy].model} has no weights here"
            yield Problem(f"{where}.roles", what, "roles whose models are here", code="E01")
    if not taught(recipe, stage):
        yield Problem(f"{where}.roles", "an sft stage needs a role that learns", "one or more roles", code="E01")
    if (stage.epochs is None) == (stage.max_steps is None):
        what = "epochs and max_steps are both given" if stage.epochs else "neither epochs nor max_steps says how long"
        yield Problem(f"{where}.epochs", what, "epochs: 3 (passes over the data) or max_steps: 100", code="E01")
    if stage.microbatch_rows is not None and stage.rows_per_step % stage.microbatch_rows:
        what = f"{stage.microbatch_rows} rows at a time do not make {stage.rows_per_step} rows a step"
        yield Problem(f"{where}.microbatch_rows", what, f"a divisor of {stage.rows_per_step}", code="E01")


def idle(recipe: Recipe) -> Iterator[tuple[tuple[str, ...], str]]:
    """Settings of policies that only an rl stage reads, in a recipe that trains by examples alone."""
    kinds = {stage.kind for stage in recipe.stages}
    if "sft" in kinds and "rl" not in kinds:
        for name in dict.fromkeys(role.policy for role in recipe.team.roles.values() if role.trainable):
            for key in ("learning_rate", "scheduler", "warmup_steps"):
                yield ("policies", name, key), f"only an rl stage reads it; sft stages have their own {key}"
