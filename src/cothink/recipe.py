"""The recipe tree: what a run is made of, checked as far as it can be before anything heavy is imported."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, ValidationError

from cothink import evaluate_rules, presets, rules, seating, source, wiring
from cothink.parts import RL, Block, EnginePart, Name, PolicyPart, Stage, TeamPart, Tree
from cothink.resolve import Problem, RecipeError, bind, listing, nearest, resolve, unknown
from cothink.types import Role


class Recipe(Tree):
    """Everything one run is made of."""

    name: Annotated[str, Field(min_length=1, pattern=r"^[^/\\]+$")]
    seed: int = 0
    team: TeamPart
    policies: Annotated[dict[Name, PolicyPart], Field(min_length=1)]
    tasks: Annotated[dict[str, Block], Field(min_length=1)]
    engine: EnginePart = EnginePart()
    stages: Annotated[tuple[Stage, ...], Field(min_length=1)]
    trackers: tuple[Literal["tensorboard", "wandb", "trackio"], ...] = ()
    output: str = "runs"

    @classmethod
    def load(cls, recipe: str | Path | Mapping[str, Any], overrides: Iterable[str] = ()) -> Recipe:
        """The resolved recipe of a YAML file or mapping; raises RecipeError for anything that could not run.

        `overrides` are dotted: `stages.1.steps=5`. Presets are merged in, `turns_ref` and `length_ref` filled in.
        """
        tree = source.read(recipe, overrides)
        where = "" if isinstance(recipe, Mapping) else str(recipe)
        merged = {**tree, "stages": [_with_preset(s) for s in _stages(tree)]} if "stages" in tree else tree
        first = _validated(cls, merged, where)
        _raise(rules.links(first))
        idle = rules.idle(first)
        written = [p for p in idle if _has(tree, p.where)]
        if written:
            raise RecipeError(*(p.problem() for p in written))
        for setting in idle:
            _remove(merged, setting.where)
        for k, stage in enumerate(first.stages):
            if isinstance(stage, RL):
                merged["stages"][k] = _with_denominators(first, stage, merged["stages"][k])
        done = _validated(cls, merged, where)
        done._bind()
        rules.check(done)
        return done

    def to_yaml(self) -> str:
        """The resolved recipe as YAML that loads to an equal recipe; settings that mean nothing here are left out."""
        tree = self.model_dump()
        for setting in rules.idle(self):
            _remove(tree, setting.where)
        return source.dump(tree)

    def roles(self) -> dict[str, Role]:
        """The team's roles, with the workflow's system prompts where the recipe has none."""
        prompts = wiring.workflow_roles(self) or {}
        return {n: seating.seated(n, seat, prompts.get(n) or "") for n, seat in self.team.roles.items()}

    def _bind(self) -> None:
        """Resolves every name and binds every option once, so that nothing is left to fail later."""
        problems: list[Problem] = []
        for kind, where, block in wiring.blocks(self):
            try:
                bind(resolve(kind, block.name, where), block.options, where)
            except RecipeError as error:
                problems += error.problems
        _raise(problems)
        _raise(wiring.seats(self))
        _raise(evaluate_rules.same_prompts(self))


def _with_denominators(recipe: Recipe, stage: RL, tree: dict[str, Any]) -> dict[str, Any]:
    """Fills in the constants that const_* aggregation divides by: turns of an episode, tokens of a turn."""
    if not stage.loss.aggregate.startswith("const_"):
        return tree
    found: dict[str, Any] = {}
    if stage.loss.turns_ref is None:
        found["turns_ref"] = float(wiring.expected_turns(recipe))
    if stage.loss.length_ref is None and stage.loss.aggregate == "const_token":
        found["length_ref"] = float(max(r.max_tokens for r in recipe.team.roles.values() if r.trainable))
    loss = tree.get("loss", {})
    return {**tree, "loss": {**({"name": loss} if isinstance(loss, str) else loss), **found}}


def _stages(tree: Mapping[str, Any]) -> list[Any]:
    stages = tree["stages"]
    if not isinstance(stages, list | tuple):
        raise RecipeError(Problem("stages", "stages is a list", "- {kind: evaluate, on: test}"))
    kinds = ("evaluate", "collect", "sft", "dpo", "rl")
    for k, stage in enumerate(stages):
        kind = stage.get("kind") if isinstance(stage, Mapping) else None
        where = f"stages.{k}.kind"
        if kind is None:
            raise RecipeError(Problem(where, "every stage needs a kind", f"kind: one of {listing(kinds)}"))
        if kind not in kinds:
            raise RecipeError(unknown(where, "stage kind", kind, kinds))
    return list(stages)


def _with_preset(stage: dict[str, Any]) -> dict[str, Any]:
    preset = stage.get("preset")
    known = stage["kind"] == "rl" and isinstance(preset, str) and preset in presets.PRESETS
    return presets.merge(str(preset), stage) if known else dict(stage)


def _validated(cls: type[Recipe], tree: Mapping[str, Any], where: str) -> Recipe:
    try:
        return cls.model_validate(tree)
    except ValidationError as error:
        raise RecipeError(*(_problem(e) for e in error.errors())) from None


def _problem(error: Any) -> Problem:
    """One pydantic error in the words of a recipe."""
    loc = [str(part) for part in error["loc"]]
    if loc[:1] == ["stages"] and len(loc) > 2:
        del loc[2]  # pydantic puts the stage's kind into the path
    where, kind, context = ".".join(loc), error["type"], error.get("ctx", {})
    if kind == "unknown_key":
        key, valid = context["key"], context["valid"]
        close = nearest(key, valid)
        return Problem(f"{where}.{key}".lstrip("."), "unknown key", f"one of: {listing(valid)}", close, "E01")
    if kind in ("model_type", "model_attributes_type", "dict_type"):
        return Problem(where, f"{error['input']!r} is not valid", "a mapping, such as {key: value}", code="E01")
    if kind == "missing":
        return Problem(where, "is missing", f"{loc[-1]}: VALUE", code="E01")
    if kind == "literal_error":
        valid = re.findall(r"'([^']*)'", context["expected"])
        return unknown(where, "value", error["input"], valid)
    return Problem(where, f"{error['input']!r} is not valid", error["msg"].removeprefix("Input should be "), code="E01")


def _raise(problems: Iterable[Problem]) -> None:
    problems = list(problems)
    if problems:
        raise RecipeError(*problems)


def _has(tree: Any, path: tuple[str | int, ...]) -> bool:
    for key in path:
        inside = key in tree if isinstance(tree, Mapping) else isinstance(tree, list | tuple)
        if not inside:
            return False
        tree = tree[key]
    return True


def _remove(tree: Any, path: tuple[str | int, ...]) -> None:
    if _has(tree, path):
        for key in path[:-1]:
            tree = tree[key]
        del tree[path[-1]]
