"""What an sft or dpo stage may not say: names that lead nowhere, and settings that do nothing beside the others."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from cothink.resolve import Problem, RecipeError, bind, listing, unknown

if TYPE_CHECKING:
    from cothink.parts import DPO, SFT
    from cothink.recipe import Recipe

SPARED = "generator"
"""The role that dpo leaves out unless it is named (MALT, arXiv 2412.01928, section 4)."""

AUTO_ROWS = 10_000
"""Rows that `epochs: auto` shows a model, about (the rule that stands in for MALT's unstated one)."""


def passes(epochs: float | str | None, rows: int) -> float:
    """Passes over the data; `auto` is 10,000 rows in all, halves up, in at least 1 and at most 10 passes."""
    if epochs == "auto":
        return min(10, max(1, (2 * AUTO_ROWS + rows) // (2 * rows)))
    return float(epochs or 1)


def taught(recipe: Recipe, stage: SFT | DPO) -> tuple[str, ...]:
    """The roles a stage teaches: those it names, else every role that learns (for dpo: but the generator)."""
    if stage.roles is not None:
        return stage.roles
    spared = SPARED if stage.kind == "dpo" else None
    return tuple(name for name, role in recipe.team.roles.items() if role.trainable and name != spared)


def collected(recipe: Recipe, index: int) -> list[int]:
    """The places of the collect stages before a stage."""
    return [k for k, stage in enumerate(recipe.stages[:index]) if stage.kind == "collect"]


def links(recipe: Recipe, stage: SFT | DPO, where: str) -> Iterator[Problem]:
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
        what = f"{'an sft' if stage.kind == 'sft' else 'a dpo'} stage needs a role that learns"
        yield Problem(f"{where}.roles", what, "one or more roles", code="E01")
    if (stage.epochs is None) == (stage.max_steps is None):
        what = "epochs and max_steps are both given" if stage.epochs else "neither epochs nor max_steps says how long"
        yield Problem(f"{where}.epochs", what, "epochs: 3 (passes over the data) or max_steps: 100", code="E01")
    unit, size, part = ("rows", stage.rows_per_step, stage.microbatch_rows) if stage.kind == "sft" else (
        "pairs", stage.pairs_per_step, stage.microbatch_pairs)  # fmt: skip
    if part is not None and size % part:
        what = f"{part} {unit} at a time do not make {size} {unit} a step"
        yield Problem(f"{where}.microbatch_{unit}", what, f"a divisor of {size}", code="E01")
    yield from _trees(recipe, stage, where)


def _trees(recipe: Recipe, stage: SFT | DPO, where: str) -> Iterator[Problem]:
    """A stage on trees needs some, a dpo stage can have nothing else, and stacking needs an adapter to stack on."""
    index = int(where.rpartition(".")[2])
    if stage.data.name == "tree" and stage.data.options.get("store") is None and not collected(recipe, index):
        what = "there is no collect stage before it whose trees it could learn from"
        yield Problem(f"{where}.data", what, "{kind: collect, on: train} before it, or store: FOLDER", code="E01")
    if stage.kind == "dpo" and stage.data.name != "tree":
        what = f"dpo learns from pairs of collected trees, not from {stage.data.name!r}"
        yield Problem(f"{where}.data.name", what, "tree", code="E01")
    elif stage.data.name == "tree":
        yield from _options(stage, f"{where}.data")
    if stage.kind == "sft":
        return
    for name in taught(recipe, stage):
        role = recipe.team.roles.get(name)
        policy = recipe.policies.get(role.policy) if role else None
        if policy is not None and stage.adapter_scale is not None and policy.lora_r is None:
            what = f"policy {role.policy!r} has full weights: there is no adapter to stack another one on"  # type: ignore[union-attr]
            yield Problem(f"{where}.adapter_scale", what, "lora_r in the policy, or no adapter_scale", code="E01")


def _options(stage: SFT | DPO, where: str) -> Iterator[Problem]:
    """Options that trees do not have, or that contradict one another."""
    from cothink.conversations import tree

    try:
        bind(tree.load if stage.kind == "sft" else tree.pairs, stage.data.options, where)
    except RecipeError as error:
        yield from error.problems
        return
    wrong = tree.complaint(stage.data.options)
    if wrong is not None:
        yield Problem(where, wrong, code="E01")


def findings(recipe: Recipe) -> Iterator[Problem]:
    """A preference for one of two answers, in a role that was never taught to give them."""
    seen: set[str] = set()
    for k, stage in enumerate(recipe.stages):
        if stage.kind == "sft":
            seen |= set(taught(recipe, stage))
        elif stage.kind == "dpo":
            for name in (n for n in taught(recipe, stage) if n not in seen):
                what = f"no sft stage teaches {name!r} before it: its reference is the untrained model"
                yield Problem(f"stages.{k}.roles", what, "an sft stage on the same trees first", code="W19")


def idle(recipe: Recipe) -> Iterator[tuple[tuple[str, ...], str]]:
    """Settings of policies that only an rl stage reads, in a recipe that trains by examples alone."""
    kinds = {stage.kind for stage in recipe.stages}
    own = "sft" if "sft" in kinds else "dpo"
    if kinds & {"sft", "dpo"} and "rl" not in kinds:
        for name in dict.fromkeys(role.policy for role in recipe.team.roles.values() if role.trainable):
            for key in ("learning_rate", "scheduler", "warmup_steps"):
                yield ("policies", name, key), f"only an rl stage reads it; {own} stages have their own {key}"
