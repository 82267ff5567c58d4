"""What a recipe would do, in words, without doing it: sizes, memory, and one episode played by a script."""

from __future__ import annotations

import asyncio
import json
import math
import struct
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from cothink import rules, schedule_rules, suites, wiring
from cothink.conversations import NotHere
from cothink.parts import RL, SFT, Evaluate
from cothink.recipe import Recipe
from cothink.resolve import Problem, RecipeError, bind, effective, resolve
from cothink.sft_rules import taught
from cothink.tasks import DataError, data_root, report
from cothink.types import Episode, Role, Task

PLACEHOLDER = Task("check/0", "(a question of this data set)", "(its answer)")
SHOWN = 6
"""Turns of the scripted episode that are printed at most."""


@dataclass(frozen=True)
class Data:
    """The rows of one data set, or why they are not here."""

    rows: int | None
    first: Task
    note: str = ""


@dataclass(frozen=True)
class Calls:
    """Upper bounds for one episode: calls, turns and new tokens, per role."""

    calls: Mapping[str, int]
    tokens: int


def lines(recipe: Recipe) -> Iterator[str]:
    """The whole preview, line by line."""
    data = {name: _data(recipe, name) for name in recipe.tasks}
    first = next(iter(data.values())).first
    most = _most(recipe, first)
    options = ", ".join(f"{k} {v}" for k, v in recipe.team.workflow.options.items())
    workflow = recipe.team.workflow.name + (f" ({options})" if options else "")
    yield f"{recipe.name}: workflow {workflow}, engine {recipe.engine.name}, seed {recipe.seed}"
    for name, policy in recipe.policies.items():
        roles = " and ".join(r for r, seat in recipe.team.roles.items() if seat.policy == name)
        yield f"policy {name} ({roles}): {policy.model}, {_memory(policy)}"
    for name, found in data.items():
        rows = "rows unknown" if found.rows is None else f"{found.rows:,} rows"
        yield f"tasks {name} ({recipe.tasks[name].name}): {rows}{': ' + found.note if found.note else ''}"
    for k, stage in enumerate(recipe.stages):
        describe = {"rl": _rl, "sft": _sft}.get(stage.kind, _evaluate)
        yield from describe(f"stage {k}", recipe, stage, data, most)
    findings = rules.findings(recipe)
    for problem in (*findings.errors, *findings.warnings):
        yield f"{problem.code}  {problem.where}: {problem.what}; write {problem.write}"
    if findings.inert:
        yield "without effect: " + "; ".join(f"{p.what} ({p.code})" for p in findings.inert)
    yield "one episode, played by a script:"
    yield from transcript(play(recipe, first)[0])


def play(recipe: Recipe, task: Task, *, finish: bool = True) -> tuple[Episode, list[Any]]:
    """One episode with placeholder answers, and the calls it made; `finish` says the finish tag right away."""
    from cothink import team
    from cothink.engines import scripted

    if task is PLACEHOLDER:
        task = replace(task, meta={key: f"(the {key} of this task)" for key in wiring.needs(recipe)})
    roles = recipe.roles()
    run = resolve("workflow", recipe.team.workflow.name)
    tag = effective(run, recipe.team.workflow.options).get("finish_tag") if finish else None
    engine = scripted.engine(_replies(roles, f" {tag}" if tag else ""))
    workflow = bind(run, recipe.team.workflow.options, "team.workflow")
    jobs = [team.Job(task, "check", recipe.seed)]
    played = asyncio.run(team.play(jobs, workflow, roles, dict.fromkeys(recipe.policies, engine)))
    return played.episodes[0], engine.calls


def transcript(episode: Episode) -> Iterator[str]:
    """The turns of an episode, one line each, and how it ended."""
    for k, turn in enumerate(episode.turns):
        if k < SHOWN or k == len(episode.turns) - 1:
            answers = f" (answers {', '.join(turn.parents)})" if turn.parents else ""
            yield f"  {turn.id}{answers} {turn.role}: {_short(turn.text)}"
        elif k == SHOWN:
            yield f"  ... {len(episode.turns) - SHOWN - 1} turns more"
    yield f"  {episode.finish.reason}; graded: turn {episode.finish.turn}"


def _replies(roles: Mapping[str, Role], ending: str) -> Callable[[Any], str]:
    def reply(call: Any) -> str:
        system = call.messages[0].content if call.messages[0].role == "system" else ""
        mine = [r for r in roles.values() if r.policy == call.policy]
        name = next((r.name for r in mine if r.system == system), mine[0].name)
        return f"({name} reads {len(call.messages)} messages and says up to {call.sampling.max_tokens} tokens){ending}"

    return reply


def _most(recipe: Recipe, task: Task) -> Calls:
    """Counts an episode in which nobody ever says the finish tag."""
    episode, calls = play(recipe, task, finish=False)
    tokens = sum(call.n * call.sampling.max_tokens for call in calls)
    return Calls(Counter(turn.role for turn in episode.turns), tokens)


def _data(recipe: Recipe, name: str) -> Data:
    block = recipe.tasks[name]
    return _loaded(block.name, block.options, f"tasks.{name}")


def _loaded(loader: str, options: Mapping[str, Any], where: str) -> Data:
    if "hub" in options:
        return Data(None, PLACEHOLDER, f"on the hub ({options['hub']}), not read by a check")
    try:
        tasks = bind(resolve("tasks", loader, where), options, where)()
    except ValueError as error:
        if isinstance(error, DataError) and "path" not in options and not data_root().is_dir():
            # Data that lives elsewhere: the recipe is right all the same.
            return Data(None, PLACEHOLDER, f"not here: {error}")
        raise RecipeError(Problem(where, str(error), code="E01")) from error
    tasks = tasks if isinstance(tasks, Sequence) else list(tasks)
    if not tasks:
        raise RecipeError(Problem(where, "the loader returned no rows"))
    return Data(len(tasks), tasks[0], report(tasks).replace("\n", "; "))


def _evaluate(label: str, recipe: Recipe, stage: Any, data: Mapping[str, Data], most: Calls) -> Iterator[str]:
    assert isinstance(stage, Evaluate)
    sets = {stage.on: data[stage.on]} if stage.suite is None else _suite(stage.suite)
    for name, found in sets.items():
        rows = found.rows if stage.limit is None else min(stage.limit, found.rows or stage.limit)
        note = f" ({found.note})" if stage.suite is not None and found.note else ""
        yield f"{label}: evaluate on {name}, {_plays(rows, stage.episodes_per_task, most)}{note}"


def _suite(suite: Any) -> dict[str, Data]:
    return {name: _loaded(found.loader, found.options, f"suite {name}") for name, found in suites.sets(suite).items()}


def _rl(label: str, recipe: Recipe, stage: Any, data: Mapping[str, Data], most: Calls) -> Iterator[str]:
    assert isinstance(stage, RL)
    episodes = stage.tasks_per_step * stage.episodes_per_task
    trained = [name for name, role in recipe.team.roles.items() if role.trainable]
    samples = " + ".join(f"{episodes:,} of {name}" for name in trained)
    updates = f"{stage.updates_per_step} update{'s' * (stage.updates_per_step > 1)} per policy"
    most_steps = "at most " if stage.schedule.name == "phases" else ""
    yield f"{label}: rl on {stage.on}, {most_steps}{stage.steps:,} steps; a step is"
    yield f"  {_plays(stage.tasks_per_step, stage.episodes_per_task, most)}"
    yield f"  {episodes * len(trained):,} samples ({samples}), {updates}"
    if stage.filter.name != "none" and stage.schedule.name != "phases":
        yield f"  rows that teach nothing are dropped; up to {stage.oversample_max:g} times as many are played instead"
    rows, total = data[stage.on].rows, stage.steps * stage.tasks_per_step
    yield from schedule_rules.words(recipe, stage, rows)
    passes = f", {total / rows:.2g} passes over {stage.on}" if rows else ""
    every = sum(most.calls.values())
    yield (
        f"  in all {total:,} rows{passes}, {stage.steps * episodes:,} episodes, "
        f"at most {stage.steps * episodes * every:,} calls and {_tokens(stage.steps * episodes * most.tokens)}"
    )
    if stage.token_budget is not None:
        yield f"  ends early once {_tokens(stage.token_budget)} were sampled"


def _sft(label: str, recipe: Recipe, stage: Any, data: Mapping[str, Data], most: Calls) -> Iterator[str]:
    assert isinstance(stage, SFT)
    names = taught(recipe, stage)
    roles = {name: role for name, role in recipe.roles().items() if name in names}
    policies = {roles[name].policy: [n for n in names if roles[n].policy == roles[name].policy] for name in names}
    length = f"{stage.epochs:g} epoch{'s' * (stage.epochs != 1)}" if stage.epochs else f"{stage.max_steps:,} steps"
    blocks = f"packed blocks of up to {stage.max_length:,} tokens" if stage.packing else "rows"
    yield f"{label}: sft of {' and '.join(names)} on {stage.data.name}, {length} of {stage.rows_per_step} {blocks} each"
    where = f"stages.{label.removeprefix('stage ')}.data"
    try:
        found = bind(resolve("conversations", stage.data.name, where), stage.data.options, where)(roles)
    except NotHere as error:
        # Examples may come from an earlier stage or another machine: the recipe is right all the same.
        yield f"  rows unknown: {error}"
        return
    except ValueError as error:
        raise RecipeError(Problem(where, str(error), code="E01")) from error
    for policy, mine in policies.items():
        counts = {name: sum(example.role == name for example in found) for name in mine}
        rows = sum(counts.values()) - stage.held_out * len(mine)
        each = math.ceil(rows / stage.rows_per_step)
        steps = f", at most {math.ceil(each * stage.epochs):,} steps" if stage.epochs else ""
        yield f"  policy {policy}: " + " + ".join(f"{n:,} of {role}" for role, n in counts.items()) + f" rows{steps}"
    yield from (f"  {note}" for note in found.notes)
    yield f"  rows longer than {stage.max_length:,} tokens are left out, which the run counts"


def _plays(rows: int | None, each: int, most: Calls) -> str:
    """Rows, episodes, calls and tokens in words."""
    if rows is None:
        return f"every row x {each} plays, at most {sum(most.calls.values())} calls an episode"
    episodes = rows * each
    calls = ", ".join(f"{n} of {role}" for role, n in most.calls.items())
    return (
        f"{rows:,} rows x {each} play{'s' * (each > 1)} = {episodes:,} episodes, "
        f"at most {episodes * sum(most.calls.values()):,} calls ({calls} an episode) "
        f"and {_tokens(episodes * most.tokens)}"
    )


def _tokens(count: int) -> str:
    return f"{_number(count)} new tokens"


def _number(count: float) -> str:
    for size, unit in ((1e9, " billion"), (1e6, " million")):
        if count >= size:
            return f"{count / size:.3g}{unit}"
    return f"{count:,.0f}"


def _memory(policy: Any) -> str:
    """Parameters and bytes of a model that lies in a local folder."""
    from cothink import models

    if models.is_outside(policy.model):
        return "frozen, behind a server"
    method = "full weights" if policy.lora_r is None else f"LoRA r {policy.lora_r}"
    folder = _folder(policy.model)
    count = parameters(folder) if folder else None
    if count is None:
        return f"{method}, size known once it is loaded"
    width = 2 if policy.dtype == "bfloat16" and policy.lora_r is not None else 4  # full weights stay float32
    weights = count * width
    # AdamW keeps two moments beside the gradient, all in the type of the weights.
    training = f", {_bytes(4 * weights)} with gradients and AdamW" if policy.lora_r is None else " plus the adapter"
    return f"{method}, {_number(count)} parameters, {_bytes(weights)}{training}"


def _folder(model: str) -> Path | None:
    from cothink import builtin, models

    if model.startswith("builtin:"):
        return builtin.path()
    if model == models.SMOLLM2:
        return models.cache_root() / models.SMOLLM2
    return Path(model).expanduser() if model.startswith((".", "/", "~")) else None


def parameters(folder: Path) -> int | None:
    """The number of weights in a folder of safetensors, read from the files' headers; None when there are none."""
    total = 0
    for path in folder.glob("*.safetensors"):
        with path.open("rb") as file:
            (length,) = struct.unpack("<Q", file.read(8))
            header = json.loads(file.read(length))
        total += sum(math.prod(entry["shape"]) for name, entry in header.items() if name != "__metadata__")
    return total or None


def _bytes(count: float) -> str:
    for size, unit in ((1e9, "GB"), (1e6, "MB")):
        if count >= size:
            return f"{count / size:.3g} {unit}"
    return f"{count / 1e3:.3g} kB"


def _short(text: str, width: int = 100) -> str:
    flat = " ".join(text.split())
    return flat if len(flat) <= width else flat[: width - 3] + "..."
