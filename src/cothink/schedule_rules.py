"""What the schedule, the curriculum and the watch of an rl stage may not say, should not say, and say in vain."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from cothink.resolve import Problem, listing, nearest
from cothink.signals import NAMES


def findings(s: Any) -> Iterator[Problem]:
    """Everything there is to say about one stage; `s` is the stage as the rules see it."""
    for rule in (_success_filter, _schedule, _curriculum, _watch, _best):
        yield from rule(s)


def _schedule(s: Any) -> Iterator[Problem]:
    plan, shared = s.stage.schedule, [p for p, roles in s.policies.items() if roles > 1]
    if plan.name == "joint":
        if len(s.policies) > 1:
            what = f"{len(s.policies)} policies learn at once, so each one's partners keep moving"
            yield s.warn("W11", "schedule", what, "schedule: alternate, or half the learning rate")
        return
    if plan.name == "alternate" and plan.every is None:
        yield s.error("E17", "schedule.every", f"alternate needs the {plan.by} of one block", "every: 10")
    if len(s.policies) < 2:
        what = f"there is one policy to train ({listing(s.policies)}): nobody to alternate with"
        yield s.error("E17", "schedule", what, "schedule: joint, or a policy of its own for each role")
    elif shared and plan.name == "alternate":
        what = f"the roles of {listing(shared)} share weights: the one that waits moves as well"
        yield s.warn("W10", "schedule", what, "a policy of its own for each role")
    elif shared:
        what = f"the roles of {listing(shared)} share weights, and a phase freezes all roles but one policy's"
        yield s.error("E17", "schedule", what, "a policy of its own for each role, or schedule: alternate")
    if plan.name == "phases":
        yield from _phases(s)


def _phases(s: Any) -> Iterator[Problem]:
    stage = s.stage
    if s.turns > 1:
        what = f"phases filter by one greedy answer of each waiting role, and a role has up to {s.turns} turns here"
        yield s.error("E23", "schedule", what, "schedule: {name: alternate, every: 10}, or a workflow of one round")
    if stage.filter.name != "success":
        what = f"phases keep rows by their success rate, and the filter is {stage.filter.name}"
        yield s.error("E23", "filter", what, "filter: {name: success, low: 0.2, high: 0.8}")
    if stage.curriculum is not None:
        what = "the filter of each phase chooses the rows already"
        yield s.error("E23", "curriculum", what, "one of the two: remove curriculum, or schedule: alternate")
    for name in s.policies:
        if s.recipe.policies[name].scheduler != "constant":
            what = "nobody knows how many steps phases take, so the rate will not have decayed when they end"
            yield Problem(f"policies.{name}.scheduler", what, "scheduler: constant", code="W19")


def _success_filter(s: Any) -> Iterator[Problem]:
    rule = s.stage.filter
    if rule.name == "success" and (rule.low, rule.high) == (0.0, 1.0):
        what = "every success rate lies between 0 and 1, so the filter keeps every row"
        yield s.error("E11", "filter", what, "low and high, such as low: 0.2, high: 0.8; or filter: none")


def _curriculum(s: Any) -> Iterator[Problem]:
    if s.stage.curriculum is not None and s.stage.schedule.name == "alternate" and s.stage.schedule.by == "epochs":
        what = "an epoch of a growing set of rows has no fixed length"
        yield s.error("E23", "schedule.by", what, "by: steps, or remove curriculum")


def _watch(s: Any) -> Iterator[Problem]:
    subjects = {*s.recipe.team.roles, *s.policies}
    for key in s.stage.watch.limits:
        name, _, subject = key.partition("/")
        where = f"{s.where}.watch.limits.{key}"
        if name not in NAMES:
            yield Problem(where, "unknown signal", f"one of: {listing(NAMES)}", nearest(name, NAMES), "E01")
        elif subject and subject not in subjects:
            yield Problem(where, "unknown role or policy", f"one of: {listing(sorted(subjects))}", code="E01")


def idle(stage: Any) -> list[tuple[bool, str, Iterable[str]]]:
    """Settings of the schedule and the watch that do nothing beside the others: (applies, reason, keys)."""
    name, mode = stage.schedule.name, stage.watch.mode
    return [
        (name == "joint", "a joint schedule has no blocks", ["schedule.every", "schedule.by", "schedule.first"]),
        (name == "phases", "a phase ends with its rows", ["schedule.every", "schedule.by"]),
        (name == "phases", "no row is played in place of another in a phase", ["oversample_max"]),
        (name != "phases", f"schedule {name} has no phases",
         ["schedule.iterations", "schedule.epochs", "schedule.filter_plays"]),
        (mode == "off", "the watch is off", ["watch.limits", "watch.warmup"]),
        (mode != "act", f"a watch in mode {mode} never goes back", ["watch.every", "watch.rollbacks"]),
    ]  # fmt: skip


def words(recipe: Any, stage: Any, rows: int | None) -> Iterator[str]:
    """What schedule, curriculum and watch mean, for the preview; `rows` is the size of the data set, if known."""
    trained = {role.policy: None for role in recipe.team.roles.values() if role.trainable}
    plan, roles = stage.schedule, recipe.team.roles
    first = plan.first or next(iter(trained))
    if plan.name == "alternate":
        yield f"  one policy learns at a time, {plan.every} {plan.by} each, {first} first"
    if plan.name == "phases":
        phases, plays = plan.iterations * len(trained), plan.filter_plays
        rate = f"{stage.filter.low:g} to {stage.filter.high:g}"
        every = "all rows" if rows is None else f"{rows:,} rows"
        cost = "" if rows is None else f" = {rows * plays:,} episodes"
        yield f"  {phases} phases: {plan.iterations} times {listing(trained)}, {first} first; in each one policy learns"
        yield f"  for {plan.epochs} epochs from the rows solved at a rate of {rate}"
        yield f"  before each phase its filter plays {every} x {plays}{cost}, which the sums below leave out"
    if stage.curriculum is not None:
        start = "four below the most" if stage.curriculum.start is None else f"{stage.curriculum.start:g}"
        share = f"all after {100 * stage.curriculum.share:g} % of the stage"
        yield f"  curriculum: rows by meta {stage.curriculum.key}, from {start}, {share}"
    if stage.watch.mode != "off":
        bounds = f", goes back at most {stage.watch.rollbacks} times" if stage.watch.mode == "act" else ""
        yield f"  watch: {stage.watch.mode}s on {len(NAMES)} signals for {listing(roles)}{bounds}"


def _best(s: Any) -> Iterator[Problem]:
    stage = s.stage
    if stage.save_on != "best":
        return
    if stage.evaluate is None:
        what = "best of what? The stage evaluates nothing while it trains"
        yield s.error("E25", "save_on", what, "evaluate: {every: 10}, or save_on: last")
    elif stage.evaluate.every > stage.steps:
        what = f"save_on: best chooses among evaluations, and the first one comes after {stage.evaluate.every} steps"
        yield s.error("E25", "evaluate.every", what, f"every: {stage.steps} or less")
