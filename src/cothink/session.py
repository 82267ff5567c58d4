"""A session: everything a recipe names, loaded and bound, ready for its stages."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from cothink import models, wiring
from cothink.parts import DPO, RL, SFT
from cothink.ranks import Ranks
from cothink.recipe import Recipe
from cothink.record import Run
from cothink.report.markup import visible
from cothink.resolve import bind, resolve
from cothink.rewards import Reward
from cothink.tasks import DataError
from cothink.types import Role, Task


@dataclass
class Session:
    """The loaded team, its tasks and its run folder.

    `policies` holds what can be trained (a `Policy` or a table), `engines` who speaks for each policy name.
    """

    recipe: Recipe
    roles: dict[str, Role]
    workflow: Any
    policies: dict[str, Any]
    engines: dict[str, Any]
    tasks: dict[str, Sequence[Task]] = field(default_factory=dict)
    run: Run | None = None
    console: Any = None
    trackers: Any = None
    alone: Any = None
    ranks: Ranks = field(default_factory=Ranks)

    @property
    def answering(self) -> Any:
        """The workflow as it is played for its answer alone, without turns that only training uses."""
        return self.alone or self.workflow

    def say(self, text: str) -> None:
        """Prints one line, when there is somebody to read it."""
        if self.console is not None:
            self.console.print(visible(text), markup=False, highlight=False, soft_wrap=True)

    def trainable(self) -> list[str]:
        """Names of the policies that some trainable role uses, in recipe order."""
        used = {role.policy for role in self.roles.values() if role.trainable}
        return [name for name in self.policies if name in used]


def assemble(recipe: Recipe, weights: Path | None = None, *, with_tasks: bool = True) -> Session:
    """Loads the models, engines and (when asked) tasks of a recipe; `weights` is a checkpoint folder to start from."""
    tasks = load_tasks(recipe) if with_tasks else {}
    inside = {n: p for n, p in recipe.policies.items() if not models.is_outside(p.model)}
    policies: dict[str, Any] = {}
    engines: dict[str, Any] = {}
    if inside:
        from cothink.loading import load_policies

        policies = load_policies(inside, models.where, _schedule_lengths(recipe, tasks), recipe.seed)
        if weights is not None:
            for policy in policies.values():
                policy.load(weights)
        local = bind(resolve("engine", recipe.engine.name), recipe.engine.options, "engine")(policies)
        engines = dict.fromkeys(policies, local)
    for name, part in recipe.policies.items():
        if models.is_outside(part.model):
            from cothink.engines.openai import engine

            engines[name] = bind(engine, part.server, f"policies.{name}.server")(part.model)
    run, options = resolve("workflow", recipe.team.workflow.name), recipe.team.workflow.options
    both = ({}, wiring.alone(recipe.team.workflow))
    workflow, alone = (bind(run, {**options, **more}, "team.workflow") for more in both)
    return Session(recipe, recipe.roles(), workflow, policies, engines, tasks, alone=alone)


def load_tasks(recipe: Recipe) -> dict[str, Sequence[Task]]:
    """The task sets that the stages use."""
    used = set()
    for stage in recipe.stages:
        if isinstance(stage, SFT | DPO):
            continue
        used.add(stage.on)
        if isinstance(stage, RL) and stage.evaluate is not None:
            used.add(stage.evaluate.on)
    found = {}
    for name, block in recipe.tasks.items():
        if name in used:
            try:
                found[name] = bind(resolve("tasks", block.name), block.options, f"tasks.{name}")()
            except DataError as error:
                raise DataError(f"tasks.{name}: {error}") from error
    return found


def bound_rewards(stage: RL) -> list[Reward]:
    """The stage's reward functions with their options."""
    found = []
    for k, block in enumerate(stage.rewards):
        function = bind(resolve("reward", block.name), block.options, f"rewards.{k}")
        to = block.to or ("team" if block.role is None else "role")
        found.append(Reward(block.name, function, block.role, block.weight, to))
    return found


def bound_estimator(stage: RL, memory: dict[str, float]) -> Any:
    """The stage's estimator; one that keeps running averages gets `memory`, which the checkpoints hold."""
    function = resolve("estimator", stage.estimator.name)
    ready = bind(function, stage.estimator.options, "estimator")
    return partial(ready, state=memory) if "state" in inspect.signature(function).parameters else ready


def bound_loss(stage: RL) -> Any:
    """The stage's loss function with its options."""
    return bind(resolve("loss", stage.loss.name), stage.loss.options, "loss")


def _schedule_lengths(recipe: Recipe, tasks: Mapping[str, Sequence[Task]]) -> Mapping[str, int]:
    """Optimiser steps per policy over all rl stages, at most: what a decaying learning rate counts down to.

    Phases end when their rows do, which nobody knows beforehand: each policy may take all the steps there are.
    """
    trained = {role.policy for role in recipe.team.roles.values() if role.trainable}
    total = dict.fromkeys(recipe.policies, 0)
    for stage in recipe.stages:
        if not isinstance(stage, RL):
            continue
        order = learning_order([p for p in recipe.policies if p in trained], recipe.roles(), stage)
        rows = len(tasks.get(stage.on, ())) or stage.tasks_per_step
        for step in range(stage.steps):
            epoch = step * stage.tasks_per_step // rows
            for name in order if stage.schedule.name == "phases" else learners(order, stage, step, epoch):
                total[name] += stage.updates_per_step
    return total


def learning_order(names: Sequence[str], roles: Mapping[str, Role], stage: RL) -> list[str]:
    """The policies that learn, beginning with the one the schedule names (by policy or by role)."""
    first = stage.schedule.first
    start = 0 if first is None else list(names).index(roles[first].policy if first in roles else first)
    return [*names[start:], *names[:start]]


def learners(order: Sequence[str], stage: RL, step: int, epoch: int = 0, phase: int = 0) -> Sequence[str]:
    """The policies that learn: all, or the one whose block it is; `step`, `epoch` and `phase` count from 0."""
    schedule = stage.schedule
    if schedule.name == "joint":
        return order
    if schedule.name == "phases":
        return [order[phase % len(order)]]
    return [order[(step if schedule.by == "steps" else epoch) // (schedule.every or 1) % len(order)]]
