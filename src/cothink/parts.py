"""The parts of a recipe: policies, seats, stages and their settings, each refusing keys it does not know."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Discriminator, Field, field_validator, model_serializer, model_validator
from pydantic_core import PydanticCustomError

from cothink.counterfactual import Bonus
from cothink.counterfactual import Name as CreditName
from cothink.losses import Aggregate

Count = Annotated[int, Field(gt=0)]
Share = Annotated[float, Field(ge=0, le=1)]
Positive = Annotated[float, Field(gt=0)]
NonNegative = Annotated[float, Field(ge=0)]

Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9_-]+$")]
"""A policy's name becomes a folder and a module name."""


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
    """One set of weights and its optimiser; `lora_r` None trains the full weights, `lora_alpha` defaults to 2 r.

    `server`: options of an `openai:` model's engine.
    """

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
    server: dict[str, Any] = Field(default_factory=dict)

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
    """Which policies learn: all of them each step, or one after the other, beginning with `first`.

    `alternate` switches after `every` steps or epochs (`by`). `phases` is ReMA's single-turn training: `iterations`
    times round the policies; each phase keeps the rows that `filter_plays` fresh plays solve at a rate the stage's
    success filter accepts, and learns from them for `epochs` passes.
    """

    name: Literal["joint", "alternate", "phases"] = "joint"
    every: Count | None = None
    by: Literal["steps", "epochs"] = "steps"
    first: str | None = None
    iterations: Count = 1
    epochs: Count = 1
    filter_plays: Count = 10


class Curriculum(Tree):
    """Rows by what they need, `meta[key]` (rounds, levels): easy ones first, all of them after `share` of the stage.

    `start` is the most a row may need at the beginning; None: four less than the most any row needs, at least 1.
    """

    key: str = "level"
    start: float | None = None
    share: Annotated[float, Field(gt=0, le=1)] = 0.4


class Gate(Tree):
    """What a team must show before the first step of an rl stage, on `rows` rows played `plays` times each.

    Accuracy within `accuracy`; a share `valid` of each role's turns whole and readable; mean rounds within `rounds`
    (a share) of what the tasks say they need, `meta["rounds"]`; and more accuracy with the `guide` than without.
    """

    rows: Count = 64
    plays: Count = 4
    accuracy: tuple[Share, Share] = (0.2, 0.8)
    valid: Share = 0.95
    rounds: NonNegative = 0.25
    guide: str | None = None


class Watch(Tree):
    """What is done about signs of collapse: nothing, saying so (`observe`), or going back and stopping (`act`).

    `limits` maps a signal, or `signal/ROLE`, to its [warn, stop]; null never speaks. Nothing is said in the first
    `warmup` steps. To `act` keeps three good states, one every `every` steps at most; `rollbacks` bounds the returns
    to one of them, each at half the learning rate.
    """

    mode: Literal["off", "observe", "act"] = "observe"
    limits: dict[str, tuple[float | None, float | None] | None] = Field(default_factory=dict)
    warmup: Count = 20
    every: Count = 10
    rollbacks: Annotated[int, Field(ge=0)] = 2

    @field_validator("limits", mode="before")
    @classmethod
    def _pairs(cls, given: Any) -> Any:
        def fits(pair: Any) -> bool:
            numbers = pair if isinstance(pair, list | tuple) else ()
            plain = all(x is None or (isinstance(x, int | float) and not isinstance(x, bool)) for x in numbers)
            return pair is None or (len(numbers) == 2 and plain)

        if isinstance(given, Mapping) and not all(map(fits, given.values())):
            raise PydanticCustomError("pair", "SIGNAL: [warn, stop] with numbers or null, or SIGNAL: null")
        return given


class Reward(Block):
    """A reward function; `role` whose turns it grades (None: the graded turn), `to` who is credited."""

    role: str | None = None
    weight: float = 1.0
    to: str | None = None


class Credit(Tree):
    """How rewards become one return per turn, or, by siblings on a tree (`c3_*`, `vine`), one advantage.

    `ccpo_solo` plays every row `solo_plays` times more (None: as often as with everyone) with the `guide` silent, and
    adds `strength` times its bonus to what the guide earns: .1 on rewards of 0 and 1 is the paper's .2 on -1 and 1.
    """

    name: CreditName = "broadcast"
    gamma: Share = 1.0
    guide: str | None = None
    strength: Positive = 0.1
    bonus: Bonus = "event"
    solo_plays: Count | None = None


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


class Influence(Tree):
    """`ROLE/influence` every so many steps, of at most `episodes` episodes: a forward pass for each of their turns."""

    every: Count = 10
    episodes: Count = 16


class Evaluate(Tree):
    """A stage that plays one of the recipe's task sets, or a named `suite` of sets, and grades it.

    `limit` cuts each set, `episodes_per_task` above 1 adds pass@k and maj@k, `temperature` overrides every role's.
    `workflow` is played instead of the recipe's: options over the recipe's own where it is the same one. `roles` are
    the seats of roles that the recipe's team lacks: a seat, or the name of the role whose seat it takes. `untrained`
    roles speak with the weights that the recipe names. `protocol: paper` plays four random subsets of 100 (or `limit`)
    questions, as MALT's paper did. `baseline` is the label of an earlier evaluation that this one is set against.
    `diagnose` asks who in the team helps, and plays everything again without each role that others read.
    """

    kind: Literal["evaluate"]
    on: str = "test"
    suite: str | tuple[str, ...] | None = None
    label: str | None = None
    limit: Count | None = None
    episodes_per_task: Count = 1
    temperature: NonNegative | None = None
    seed: int | None = None
    workflow: Block | None = None
    roles: dict[str, str | RoleSeat] | None = None
    untrained: tuple[str, ...] = ()
    protocol: Literal["full", "paper"] = "full"
    baseline: str | None = None
    diagnose: bool = False


class RL(Tree):
    """A stage that plays, grades and learns; `tasks_per_step` counts rows, `episodes_per_task` the plays of one row.

    `save_on: best` leaves the weights of the best evaluation inside the stage behind, instead of the last ones.
    `token_budget` ends the stage once that many tokens were sampled, for comparisons at equal cost; a schedule of
    phases ends it after its last phase. Neither takes more than `steps`.
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
    influence: Influence | None = None
    checkpoint_every: Count | None = None
    save_on: Literal["last", "best"] = "last"
    token_budget: Count | None = None
    curriculum: Curriculum | None = None
    gate: Gate | None = None
    watch: Watch = Watch()

    @model_validator(mode="before")
    @classmethod
    def _named(cls, data: Any) -> Any:
        """`schedule: joint`, `credit: broadcast`, `filter: none`, `watch: act` are short for blocks without options."""
        if not isinstance(data, Mapping):
            return data
        first = {"schedule": "name", "credit": "name", "filter": "name", "watch": "mode"}
        named = {k: {word: data[k]} for k, word in first.items() if isinstance(data.get(k), str)}
        if data.get("watch") is False:  # what YAML 1.1 makes of an unquoted `off`
            named["watch"] = {"mode": "off"}
        return {**data, **named}


class Collect(Tree):
    """A stage that plays a tree of alternatives on every task of a set, and keeps it for `sft` and `dpo` stages.

    `branching` is the workflow's option of that name, for this stage only: alternatives at each level (MALT: 3, 3, 3).
    `limit` cuts the set, `temperature` overrides every role's. `tokens_per_second` is what a check reckons the time
    with. The trees lie in the run folder; a killed collection repeats no call.
    """

    kind: Literal["collect"]
    on: str = "train"
    branching: tuple[Count, ...] | None = None
    limit: Count | None = None
    temperature: NonNegative | None = None
    seed: int | None = None
    tokens_per_second: Positive = 1000.0


class SFT(Tree):
    """A stage that teaches roles by examples: those of `data`, for `epochs` passes or `max_steps` optimiser steps.

    `roles` None: every role that learns. `rows_per_step` counts the rows of one optimiser step, blocks of up to
    `max_length` tokens where `packing` puts short rows together; `microbatch_rows` (None: all of a step) is memory
    only. Rows longer than `max_length` tokens are left out and counted, never cut. `held_out` rows of each role are
    not learned: the loss is measured on them. `epochs: auto` is MALT's rule: 10,000 rows, in 1 to 10 passes.
    `start: base` begins from the weights that the recipe names, whatever was learned before.
    """

    kind: Literal["sft"]
    data: Block
    roles: tuple[str, ...] | None = None
    start: Literal["current", "base"] = "current"
    epochs: Positive | Literal["auto"] | None = None
    max_steps: Count | None = None
    learning_rate: Positive = 1e-5
    scheduler: Literal["constant", "linear", "cosine"] = "cosine"
    warmup_steps: Annotated[int, Field(ge=0)] = 0
    rows_per_step: Count = 8
    microbatch_rows: Count | None = None
    max_length: Count = 4096
    packing: bool = False
    held_out: Annotated[int, Field(ge=0)] = 0
    checkpoint_every: Count | None = None
    seed: int | None = None


class DPO(Tree):
    """A stage that teaches roles to prefer the good of two answers to one prompt (arXiv 2305.18290).

    `data` is `tree`: the pairs of the collected trees. The reference of a role is its own checkpoint at the start of
    the stage. `roles` None: every role that learns but a `generator` (MALT's default). `label_smoothing` is the share
    of pairs that are taken to be the wrong way round. `adapter_scale` trains a second adapter on top of the frozen
    first one and adds it at that scale afterwards; None trains the first one on. Sizes as for `sft`, in pairs.
    """

    kind: Literal["dpo"]
    data: Block = Block(name="tree")
    roles: tuple[str, ...] | None = None
    beta: Positive = 0.2
    label_smoothing: Annotated[float, Field(ge=0, lt=0.5)] = 0.0
    adapter_scale: NonNegative | None = None
    epochs: Positive | Literal["auto"] | None = None
    max_steps: Count | None = None
    learning_rate: Positive = 1e-5
    scheduler: Literal["constant", "linear", "cosine"] = "cosine"
    warmup_steps: Annotated[int, Field(ge=0)] = 10
    pairs_per_step: Count = 8
    microbatch_pairs: Count | None = None
    max_length: Count = 4096
    checkpoint_every: Count | None = None
    seed: int | None = None


Stage = Annotated[Evaluate | Collect | SFT | DPO | RL, Discriminator("kind")]
