"""What a recipe may not say, should not say, and says in vain: the configuration check of the credit methods.

Codes are those of spec/credit.md section 4: E rejects, W warns, I is legal and without effect. E22 and E23 are our own:
sampling from which nothing can be learned; an engine that cannot hold the policies.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from cothink import (
    collect_rules,
    credit_rules,
    engine_rules,
    evaluate_rules,
    loss_rules,
    reward_rules,
    schedule_rules,
    sft_rules,
    suites,
    wiring,
)
from cothink.counterfactual import BY_SIBLINGS, SOLO
from cothink.parts import DPO, SFT
from cothink.resolve import Problem, RecipeError, effective, listing, resolve, unknown

if TYPE_CHECKING:
    from cothink.parts import RL
    from cothink.recipe import Recipe

BY_EPISODE = ("episode_turn_mean", "episode_token_mean")
UNGROUPED = ("rfpp", "rae")
NOTABLE = 0.1  # a format reward heavier than this dominates group means (spec/credit.md W14)
HOT = 1e-5  # full fine-tuning of a language model above this rate has wrecked models (W13)


@dataclass(frozen=True)
class Idle:
    """A setting that does nothing for the methods chosen beside it."""

    where: tuple[str | int, ...]
    reason: str

    def problem(self) -> Problem:
        """The error for a recipe that writes it anyway."""
        path = ".".join(map(str, self.where))
        return Problem(path, f"does nothing: {self.reason}", f"nothing here (remove {path})", code="idle")


@dataclass(frozen=True)
class Findings:
    """What the rules have to say; `inert` are settings that are legal and without effect."""

    errors: tuple[Problem, ...] = ()
    warnings: tuple[Problem, ...] = ()
    inert: tuple[Problem, ...] = ()

    @property
    def codes(self) -> list[str]:
        """Every code that fired, errors first."""
        return [p.code for p in (*self.errors, *self.warnings, *self.inert)]


def check(recipe: Recipe) -> Findings:
    """The warnings and inert settings of a recipe; raises RecipeError when a rule forbids it."""
    found = findings(recipe)
    if found.errors:
        raise RecipeError(*found.errors)
    return found


def findings(recipe: Recipe) -> Findings:
    """All findings, errors included."""
    found: list[Problem] = []
    for k, stage in _learning(recipe):
        spot = _Spot(recipe, stage, f"stages.{k}")
        for rule in (_estimator, _episodes, _weights, _rewards, _no_effect):
            found += rule(spot)
        found += loss_rules.findings(spot)
        found += credit_rules.findings(spot)
        found += schedule_rules.findings(spot)
        found += reward_rules.findings(spot)
    found += _cold_start(recipe)
    found += _foreign_prompts(recipe)
    found += [*sft_rules.findings(recipe), *engine_rules.findings(recipe)]
    by_letter = {letter: tuple(p for p in found if p.code[0] == letter) for letter in "EWI"}
    return Findings(by_letter["E"], by_letter["W"], by_letter["I"])


class _Spot:
    """One rl stage with everything the rules ask about it."""

    def __init__(self, recipe: Recipe, stage: RL, where: str) -> None:
        self.recipe, self.stage, self.where = recipe, stage, where
        self.roles = {name: role for name, role in recipe.team.roles.items() if role.trainable}
        self.policies = Counter(role.policy for role in self.roles.values())
        self.estimator = stage.estimator.name
        self.estimator_options = _seen("estimator", stage.estimator)
        self.loss_options = _seen("loss", stage.loss)
        self.known_loss = stage.loss.name == "policy"
        self.turns = wiring.expected_turns(recipe)

    def option(self, name: str) -> Any:
        """The value the loss will see."""
        return self.loss_options.get(name)

    @property
    def episodes(self) -> int:
        """Plays of one row: the size of a group."""
        return self.stage.episodes_per_task

    @property
    def groups(self) -> bool:
        """Whether the estimator compares the plays of one row."""
        return ":" not in self.estimator and self.estimator not in UNGROUPED

    @property
    def group_std(self) -> bool:
        """Whether the estimator divides by a group's standard deviation."""
        return self.estimator in ("grpo", "gdpo") or (self.groups and self.estimator_options.get("std") is not None)

    def error(self, code: str, where: str, what: str, write: str) -> Problem:
        """A finding at a place inside this stage."""
        return Problem(f"{self.where}.{where}" if where else self.where, what, write, code=code)

    warn = error


def _seen(kind: str, block: Any) -> Mapping[str, Any]:
    return effective(resolve(kind, block.name), block.options)


def _learning(recipe: Recipe) -> Iterator[tuple[int, Any]]:
    return ((k, stage) for k, stage in enumerate(recipe.stages) if stage.kind == "rl")


def _estimator(s: _Spot) -> Iterator[Problem]:
    if s.stage.credit.name in BY_SIBLINGS:
        return
    scope, name = s.estimator_options.get("scope"), s.estimator
    siblings = scope == "prefix" and wiring.branches(s.recipe)  # a tree holds its own comparisons
    if s.groups and s.episodes < 2 and not siblings:
        what = f"{name} compares the plays of one row, and there is only one"
        yield s.error("E03", "episodes_per_task", what, "2 or more, or estimator: rfpp")
    if scope == "prefix" and not wiring.branches(s.recipe):
        what = f"scope prefix compares sibling turns, and workflow {s.recipe.team.workflow.name!r} has none"
        yield s.error("E05", "estimator.scope", what, "scope: role, or a workflow that samples siblings")
    if scope == "anchor":
        yield s.error("E06", "estimator.scope", "the tasks of a recipe define no anchor states", "scope: role")
    if name == "gdpo":
        given, needed = s.estimator_options.get("weights", {}), {r.name for r in s.stage.rewards}
        needed |= {SOLO} if s.stage.credit.name == "ccpo_solo" else set()
        if needed - set(given):
            what = f"gdpo has no weight for {listing(sorted(needed - set(given)))}"
            yield s.error("E20", "estimator.weights", what, "one number for every reward (0 leaves it out)")
    if s.group_std and s.episodes < 4:
        what = f"a group's standard deviation from {s.episodes} plays is noise"
        yield s.warn("W01", "episodes_per_task", what, "4 or more, or estimator: rloo")
    if s.estimator_options.get("whiten_scope") == "batch" and len(s.roles) > 1:
        what = f"whitening over the batch mixes the roles {listing(s.roles)}"
        yield s.warn("W02", "estimator.whiten_scope", what, "whiten_scope: role")
    if scope == "role_turn" and s.turns > 1 and not wiring.branches(s.recipe):
        what = "episodes of different length leave late turns alone in their group, with advantage 0"
        yield s.warn("W03", "estimator.scope", what, "scope: role")
    weighting = s.estimator_options.get("weighting")
    fitting = "episode" if s.stage.loss.aggregate in BY_EPISODE else "turn"
    if weighting and weighting != fitting:
        what = f"{weighting} weighting with aggregate {s.stage.loss.aggregate}: the advantages do not cancel out"
        yield s.warn("W04", "estimator.weighting", what, f"weighting: {fitting}")
    if s.group_std and s.stage.filter.name == "none":
        what = "dividing by the group's standard deviation blows up rows that are nearly solved"
        yield s.warn("W07", "filter", what, "filter: accuracy")
    if name == "rae" and s.estimator_options.get("initial") == 0:
        what = "a running baseline from 0 makes the first advantages all positive when rewards are"
        yield s.warn("W15", "estimator.initial", what, "initial: null, the mean of the first batch")


def _episodes(s: _Spot) -> Iterator[Problem]:
    stage, episodes = s.stage, s.episodes
    if stage.filter.name in ("accuracy", "spread") and episodes < 2:
        what = f"filter {stage.filter.name} compares the plays of one row, and there is only one"
        yield s.error("E11", "filter", what, "filter: none, or episodes_per_task: 2 or more")
    if stage.filter.name in ("accuracy", "success") and stage.filter.low >= stage.filter.high:
        what = f"no accuracy lies between {stage.filter.low:g} and {stage.filter.high:g}"
        yield s.error("E11", "filter", what, "low below high, such as low: 0.2, high: 0.8")
    if stage.unfinished == "bootstrap" and episodes < 2:
        what = "bootstrap takes the mean of the row's finished plays, and there is only one play"
        yield s.error("E12", "unfinished", what, "unfinished: mask, or episodes_per_task: 2 or more")
    for policy, roles in s.policies.items():
        samples = stage.tasks_per_step * episodes * roles
        if stage.updates_per_step > samples:
            what = f"policy {policy!r} gets {samples} samples a step, fewer than its updates"
            yield s.error("E19", "updates_per_step", what, f"at most {samples}")
    if stage.unfinished == "zero":
        what = "reward 0 for unfinished episodes teaches to stop early"
        yield s.warn("W08", "unfinished", what, "unfinished: mask")


def _weights(s: _Spot) -> Iterator[Problem]:
    for name in s.policies:
        policy = s.recipe.policies[name]
        if policy.lora_r is None and policy.learning_rate > HOT and not policy.model.startswith("builtin:"):
            where, what = f"policies.{name}.learning_rate", f"{policy.learning_rate:g} is hot for full weights"
            yield Problem(where, what, "1e-6, or lora_r: 16", code="W13")
    for policy in s.policies:
        if s.recipe.policies[policy].lora_dropout > 0:
            what = "rl needs the log-probs that were sampled, and dropout changes them"
            yield Problem(f"policies.{policy}.lora_dropout", what, "lora_dropout: 0.0", code="E22")
    for name, role in s.roles.items():
        if role.top_p < 1 or role.top_k > 0:
            what = "log-probs of a cut distribution are not those that are trained"
            fine = s.recipe.engine.options.get("dtype") != "bfloat16"
            ours = s.recipe.engine.name in ("local", "vllm", "ray")
            strict = ours and fine and s.recipe.policies[role.policy].dtype == "float32"
            what += "; the trainer refuses the first update" if strict else ""
            yield Problem(f"team.roles.{name}", what, "top_p: 1.0 and top_k: 0", code="E22" if strict else "W12")
        if role.temperature == 0:
            what = "at temperature 0 all plays of a row are equal, so nothing is learned"
            yield Problem(f"team.roles.{name}.temperature", what, "temperature: 1.0, or trainable: false", code="E22")


def _rewards(s: _Spot) -> Iterator[Problem]:
    for k, reward in enumerate(s.stage.rewards):
        if reward.name.startswith("format.") and abs(reward.weight) > NOTABLE and len(s.stage.rewards) > 1:
            what = f"{reward.name} at weight {reward.weight:g} is added to the answer's reward and can outweigh it"
            yield s.warn("W14", f"rewards.{k}.weight", what, f"{NOTABLE} or less")


def _no_effect(s: _Spot) -> Iterator[Problem]:
    stage = s.stage
    if stage.updates_per_step == 1:
        if s.known_loss:
            what = "ratio, clip, dual_clip and log_ratio_max: every ratio is exactly 1 at updates_per_step 1"
            yield s.error("I01", "loss", what, "")
        if stage.kl_stop is not None:
            yield s.error("I05", "kl_stop", "kl_stop acts between the updates of one step, and there is one", "")
    shared = all((r.to or ("role" if r.role else "team")) == "team" for r in stage.rewards)
    options = s.estimator_options
    if options.get("scope") == "role" and options.get("weighting") == "episode" and shared and len(s.roles) > 1:
        yield s.error("I02", "estimator.scope", "scope role equals scope task while all roles share the reward", "")
    if stage.credit.name == "turn_return" and stage.credit.gamma == 1 and shared:
        yield s.error("I04", "credit", "turn_return with gamma 1 equals broadcast while rewards come at the end", "")
    if s.estimator == "gdpo" and len(stage.rewards) == 1:
        yield s.error("I06", "estimator", "gdpo with one reward is grpo", "")
    if stage.role_balance == "equal" and max(s.policies.values(), default=0) < 2:
        yield s.error("I06", "role_balance", "role_balance where no policy serves two roles", "")


def _cold_start(recipe: Recipe) -> Iterator[Problem]:
    kinds = [stage.kind for stage in recipe.stages]
    first = next(((k, stage) for k, stage in _learning(recipe)), None)
    if first is None or first[1].gate is not None or first[1].curriculum is not None:
        return
    if "evaluate" not in kinds[: first[0]]:
        what = "nothing measures the cold start: rl needs a success rate between .2 and .8 to begin with"
        yield Problem(f"stages.{first[0]}", what, "gate: {}, an evaluate stage before it, or a curriculum", code="W17")


def _foreign_prompts(recipe: Recipe) -> Iterator[Problem]:
    """The built-in model obeys the one-line prompts it was trained on and no others (code of ours)."""
    from cothink.builtin.prompts import PROMPTS

    for name, role in recipe.roles().items():
        if recipe.policies[role.policy].model == "builtin:tiny" and role.system not in PROMPTS.values():
            what = f"builtin:tiny has never seen the system prompt of {name!r} and will not obey it"
            known = ", ".join(repr(p) for p in PROMPTS.values())
            yield Problem(f"team.roles.{name}.system", what, f"one of {known}", code="W18")


def links(recipe: Recipe) -> list[Problem]:
    """Names inside the recipe that point nowhere, and parts nothing points to."""
    roles, policies, problems = recipe.team.roles, recipe.policies, []
    for name, role in roles.items():
        if role.policy not in policies:
            problems.append(unknown(f"team.roles.{name}.policy", "policy", role.policy, policies))
    used = {role.policy for role in roles.values()} | evaluate_rules.policies(recipe)
    for name in (p for p in policies if p not in used):
        problems.append(
            Problem(f"policies.{name}", "no role uses this policy", f"policy: {name} in a role", code="idle")
        )
    labels: dict[str, int] = {}
    for k, stage in enumerate(recipe.stages):
        where = f"stages.{k}"
        label = (stage.label or f"evaluate-{k}") if stage.kind == "evaluate" else None
        if label is not None and labels.setdefault(label, k) != k:
            what = f"stage {labels[label]} has the label {label!r} too, and results are kept by label"
            problems.append(Problem(f"{where}.label", what, "a label of its own", code="E01"))
        if isinstance(stage, SFT | DPO):
            problems += sft_rules.links(recipe, stage, where)
        elif stage.kind == "evaluate" and stage.suite is not None:
            problems += suites.problems(stage.suite, f"{where}.suite")
        elif stage.on not in recipe.tasks:
            problems.append(unknown(f"{where}.on", "tasks", stage.on, recipe.tasks))
        if stage.kind == "evaluate":
            problems += evaluate_rules.links(recipe, stage, k)
        if stage.kind == "collect":
            problems += collect_rules.links(recipe, stage, k)
        if stage.kind == "rl":
            problems += _rl_links(recipe, stage, where)
    return problems


def _rl_links(recipe: Recipe, stage: Any, where: str) -> Iterator[Problem]:
    roles, receivers = recipe.team.roles, ("team", "role", "turn", *recipe.team.roles)
    if stage.evaluate is not None and stage.evaluate.on not in recipe.tasks:
        yield unknown(f"{where}.evaluate.on", "tasks", stage.evaluate.on, recipe.tasks)
    for j, reward in enumerate(stage.rewards):
        if reward.role is not None and reward.role not in roles:
            yield unknown(f"{where}.rewards.{j}.role", "role", reward.role, roles)
        if reward.to is not None and reward.to not in receivers:
            yield unknown(f"{where}.rewards.{j}.to", "receiver", reward.to, receivers)
    first, trained = stage.schedule.first, {n: r.policy for n, r in roles.items() if r.trainable}
    if first is not None and first not in (*trained, *trained.values()):
        names = tuple(dict.fromkeys((*trained, *trained.values())))
        yield unknown(f"{where}.schedule.first", "trained policy or role", first, names)
    if not trained:
        yield Problem(
            "team.roles", "an rl stage needs a role that learns", "trainable: true in one of them", code="E01"
        )
    for name, policy in trained.items():
        if policy in recipe.policies and recipe.policies[policy].model.startswith("openai:"):
            what = f"role {name!r} is trained, and {recipe.policies[policy].model} has no weights here"
            yield Problem(f"team.roles.{name}.trainable", what, "trainable: false", code="E01")


def idle(recipe: Recipe) -> list[Idle]:
    """Every setting, written or not, that does nothing for the methods chosen beside it."""
    by_stage = (i for k, stage in _learning(recipe) for i in _idle_stage(recipe, k, stage))
    elsewhere = (Idle(*found) for found in (*sft_rules.idle(recipe), *suites.idle(recipe)))
    return [*_idle_policies(recipe), *elsewhere, *by_stage]


def _idle_policies(recipe: Recipe) -> Iterator[Idle]:
    learning = {role.policy for role in recipe.team.roles.values() if role.trainable}
    for name, policy in recipe.policies.items():
        if name not in learning:
            for key in (k for k in type(policy).model_fields if k not in ("model", "dtype", "server")):
                yield Idle(("policies", name, key), "no role of this policy is trained")
        elif policy.lora_r is None:
            for key in ("lora_alpha", "lora_dropout", "target_modules"):
                yield Idle(("policies", name, key), "without lora_r there is no adapter")


def _idle_stage(recipe: Recipe, k: int, stage: Any) -> Iterator[Idle]:
    at = ("stages", k)
    unused: list[tuple[bool, str, Iterable[str]]] = [
        (stage.unfinished in ("zero", "keep"), f"unfinished {stage.unfinished} masks nothing", ["mask_cap"]),
        *schedule_rules.idle(stage),
        *credit_rules.idle(recipe, stage),
        (stage.filter.name not in ("accuracy", "success"), f"filter {stage.filter.name} has no bounds",
         ["filter.low", "filter.high"]),
        (stage.filter.name != "spread", "only filter spread has it", ["filter.top_p"]),
        (stage.filter.name == "none", "without a filter no row is played in place of another", ["oversample_max"]),
        *loss_rules.idle(recipe, stage),
    ]  # fmt: skip
    for applies, reason, keys in unused:
        if applies:
            yield from (Idle((*at, *key.split(".")), reason) for key in keys)
