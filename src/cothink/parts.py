"""The parts of a recipe: policies, seats, stages and their settings, each refusing keys it does not know."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Discriminator, Field, model_serializer, model_validator
from pydantic_core import PydanticCustomError

from cothink.losses import Aggregate

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
