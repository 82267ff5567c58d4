"""The recipe tree: what a run is made of, checked as far as it can be before anything heavy is imported."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Discriminator, Field, ValidationError, model_serializer, model_validator
from pydantic_core import PydanticCustomError

from cothink import presets, rules, source, wiring
from cothink.losses import Aggregate
from cothink.resolve import Problem, RecipeError, bind, listing, nearest, resolve, unknown
from cothink.types import Role, Sampling

Count = Annotated[int, Field(gt=0)]
Share = Annotated[float, Field(ge=0, le=1)]
Positive = Annotated[float, Field(gt=0)]
NonNegative = Annotated[float, Field(ge=0)]

Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9_-]+$")]
"""A policy's name becomes a folder and a module name."""

LATER = ("collect", "sft", "dpo")
"""Stage kinds that are announced and not there yet."""


class Tree(BaseModel):
    """A frozen part of a recipe that refuses keys it does not know, naming the nearest one it does."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    @model_validator(mode="before")
    @classmethod
    def _shape(cls, data: Any) -> Any:
        return cls._known(data)

    @classmethod
    def _known(cls, data: Any) -> Any:
        if isinstance(data, Mapping):
            for key in data:
                if key not in cls.model_fields:
                    raise PydanticCustomError("unknown_key", "unknown", {"key": str(key), "valid": [*cls.model_fields]})
        return data


class Block(Tree):
    """A named function and its options, written flat: `{name: rema, max_turns: 1}`, or just `rema`."""

    name: str
    options: dict[str, Any] = Field(default_factory=dict)

    @classmethod
    def _known(cls, data: Any) -> Any:
        if isinstance(data, str):
            return {"name": data}
        if not isinstance(data, Mapping):
            return data
        fields = {k: v for k, v in data.items() if k in cls.model_fields and k != "options"}
        return fields | {"options": {str(k): v for k, v in data.items() if k not in fields}}

    @model_serializer(mode="wrap")
    def _flat(self, handler: Any) -> dict[str, Any]:
        data = handler(self)
        return data | data.pop("options")


class RoleSeat(Tree):
    """One role: whose weights speak, its system prompt (None: the workflow's own) and how it samples."""

    policy: str
    system: str | None = None
    trainable: bool = True
    temperature: NonNegative = 1.0
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    top_k: Annotated[int, Field(ge=0)] = 0
    max_tokens: Count = 256
    stop: tuple[str, ...] = ()


class TeamPart(Tree):
    """The workflow and its roles; `concurrency` counts episodes at once, `deadline` is in seconds per episode."""

    workflow: Block
    roles: Annotated[dict[str, RoleSeat], Field(min_length=1)]
    concurrency: Count = 256
    deadline: Positive | None = None


class PolicyPart(Tree):
    """One set of weights and its optimiser; `lora_r` None trains the full weights, `lora_alpha` defaults to 2 r."""

    model: str
    learning_rate: Positive = 1e-6
    lora_r: Count | None = None
    lora_alpha: Positive | None = None
    lora_dropout: Share = 0.0
    target_modules: str | tuple[str, ...] | None = None
    weight_decay: NonNegative = 0.01
    betas: tuple[Share, Share] = (0.9, 0.999)
    max_grad_norm: Positive = 1.0
    scheduler: Literal["constant", "linear", "cosine"] = "constant"
    warmup_steps: Annotated[int, Field(ge=0)] = 0
    dtype: Literal["float32", "bfloat16", "auto"] = "float32"
    gradient_checkpointing: bool = False

    @model_validator(mode="before")
    @classmethod
    def _alpha(cls, data: Any) -> Any:
        if isinstance(data, Mapping) and isinstance(data.get("lora_r"), int) and data.get("lora_alpha") is None:
            return {**data, "lora_alpha": 2.0 * data["lora_r"]}
        return data


class EnginePart(Block):
    """Who samples for the policies whose weights are here."""

    name: str = "local"


class Schedule(Tree):
    """Which policies learn: all of them each step, or one after the other, `every` steps, beginning with `first`."""

    name: Literal["joint", "alternate"] = "joint"
    every: Count | None = None
    first: str | None = None


class Reward(Block):
    """A reward function; `role` whose turns it grades (None: the graded turn), `to` who is credited."""

    role: str | None = None
    weight: float = 1.0
    to: str | None = None


class Credit(Tree):
    """How rewards become one return per turn."""

    name: Literal["broadcast", "turn_return"] = "broadcast"
    gamma: Share = 1.0


class Estimator(Block):
    """The function that turns returns into advantages."""

    name: str = "rloo"


class Loss(Block):
    """The loss; `turns_ref` and `length_ref` are the fixed denominators of const_turn and const_token."""

    name: str = "policy"
    aggregate: Aggregate = "const_turn"
    turns_ref: Positive | None = None
    length_ref: Positive | None = None


class Filter(Tree):
    """Which rows are worth a gradient; `low` and `high` bound accuracy or success, `top_p` the spread kept."""

    name: Literal["none", "accuracy", "spread", "success"] = "accuracy"
    low: Share = 0.0
    high: Share = 1.0
    top_p: Annotated[float, Field(gt=0, le=1)] = 0.9


class During(Tree):
    """An evaluation every so many steps of an rl stage."""

    every: Count
    on: str = "test"
    limit: Count | None = None


class Evaluate(Tree):
    """A stage that plays a data set and grades it; `temperature` overrides every role's."""

    kind: Literal["evaluate"]
    on: str = "test"
    label: str | None = None
    limit: Count | None = None
    episodes_per_task: Count = 1
    temperature: NonNegative | None = None
    seed: int | None = None


class RL(Tree):
    """A stage that plays, grades and learns; `tasks_per_step` counts rows, `episodes_per_task` the plays of one row.

    `token_budget` ends the stage once that many tokens were sampled, for comparisons at equal cost.
    """

    kind: Literal["rl"]
    on: str = "train"
    steps: Count
    tasks_per_step: Count
    episodes_per_task: Count
    updates_per_step: Count = 1
    microbatch_tokens: Count = 8192
    preset: Literal["stable_v0", "rema_paper", "rema_single"] | None = None
    schedule: Schedule = Schedule()
    rewards: Annotated[tuple[Reward, ...], Field(min_length=1)] = (Reward(name="answer.correct"),)
    credit: Credit = Credit()
    estimator: Estimator = Estimator()
    loss: Loss = Loss()
    unfinished: Literal["zero", "keep", "mask", "bootstrap"] = "mask"
    mask_cap: Annotated[float, Field(gt=0, lt=1)] = 0.25
    filter: Filter = Filter()
    oversample_max: Annotated[float, Field(ge=1)] = 3.0
    void_filter: bool = False
    role_balance: Literal["none", "equal"] = "none"
    kl_stop: Positive | None = 1e-3
    evaluate: During | None = None
    checkpoint_every: Count | None = None
    token_budget: Count | None = None

    @model_validator(mode="before")
    @classmethod
    def _named(cls, data: Any) -> Any:
        """`schedule: joint`, `credit: broadcast` and `filter: none` are short for blocks without options."""
        if not isinstance(data, Mapping):
            return data
        short = {k: {"name": data[k]} for k in ("schedule", "credit", "filter") if isinstance(data.get(k), str)}
        return {**data, **short}


Stage = Annotated[Evaluate | RL, Discriminator("kind")]


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
        seats = self.team.roles.items()
        return {
            name: Role(
                name,
                seat.policy,
                (prompts.get(name) or "") if seat.system is None else seat.system,
                seat.trainable,
                Sampling(seat.temperature, seat.top_p, seat.top_k, seat.max_tokens, seat.stop),
            )
            for name, seat in seats
        }

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
    kinds = ("evaluate", "rl")
    for k, stage in enumerate(stages):
        kind = stage.get("kind") if isinstance(stage, Mapping) else None
        where = f"stages.{k}.kind"
        if kind in LATER:
            raise RecipeError(Problem(where, f"{kind!r} stages are not there yet", f"one of: {listing(kinds)}"))
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
