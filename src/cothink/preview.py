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

from cothink import credit_rules, fit, rules, schedule_rules, seating, suites, wiring, workload
from cothink.conversations import NotHere
from cothink.evaluate_rules import QUESTIONS, SUBSETS
from cothink.parts import DPO, RL, SFT, Block, Collect, Evaluate
from cothink.recipe import Recipe
from cothink.resolve import Problem, RecipeError, bind, effective, resolve
from cothink.sft_rules import passes, taught
from cothink.shapes import ShapeError, local, shape
from cothink.tasks import DataError, data_root, report
from cothink.types import Episode, Role, Task
from cothink.workload import CHARACTERS

PLACEHOLDER = Task("check/0", "(a question of this data set)", "(its answer)")
UNKNOWN = 400
"""Characters of a question in data that is not here."""
SHOWN = 6
"""Turns of the scripted episode that are printed at most."""


@dataclass(frozen=True)
class Data:
    """The rows of one data set, or why they are not here."""

    rows: int | None
    first: Task
    note: str = ""
    characters: float = 0.0  # of a question, on average


@dataclass(frozen=True)
class Calls:
    """Upper bounds for one episode: calls, turns and new tokens, per role."""

    calls: Mapping[str, int]
    tokens: int


def lines(recipe: Recipe, device: fit.Device | None = None) -> Iterator[str]:
    """The whole preview, line by line; raises RecipeError at its end where the recipe does not fit on a `device`."""
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
        describe = {"rl": _rl, "sft": _sft, "dpo": _dpo, "collect": _collect}.get(stage.kind, _evaluate)
        yield from describe(f"stage {k}", recipe, stage, data, most)
    findings = rules.findings(recipe)
    for problem in (*findings.errors, *findings.warnings):
        yield f"{problem.code}  {problem.where}: {problem.what}; write {problem.write}"
    if findings.inert:
        yield "without effect: " + "; ".join(f"{p.what} ({p.code})" for p in findings.inert)
    yield "one episode, played by a script:"
    yield from transcript(play(recipe, first)[0])
    yield from _fits(recipe, data, device)


def _fits(recipe: Recipe, data: Mapping[str, Data], device: fit.Device | None) -> Iterator[str]:
    """What a process needs of memory, and where a device is named, whether it has that."""
    work = workload.Work(_chats(recipe, data), {name: found.rows for name, found in data.items()})
    try:
        found = fit.moments(recipe, work, device or fit.Device())
    except ShapeError as error:
        if device is not None:
            raise RecipeError(Problem("policies", str(error))) from error
        yield f"memory: {error}"
        return
    if device is None:
        yield fit.line(recipe, found)
        return
    yield from fit.table(recipe, found, device)
    problems = fit.problems(recipe, work, device)
    if problems:
        raise RecipeError(*problems)


def _chats(recipe: Recipe, data: Mapping[str, Data]) -> list[workload.Chat]:
    """The chats of a play of the recipe's team in which every answer is as long as it may be."""
    learned = next((s.on for s in recipe.stages if isinstance(s, RL)), next(iter(data)))
    found, roles = data[learned], recipe.roles()
    task = replace(found.first, question="?" * max(1, round(found.characters or UNKNOWN)))
    if found.first is PLACEHOLDER:
        task = replace(task, meta={key: f"(the {key} of this task)" for key in wiring.needs(recipe)})

    def calls(letter: str) -> list[Any]:
        block = recipe.team.workflow
        return _played(recipe, task, block, roles, lambda c: letter * (CHARACTERS * c.sampling.max_tokens))[1]

    return workload.chats(calls("x"), calls("y"), workload.longest(recipe))


def play(recipe: Recipe, task: Task, *, finish: bool = True) -> tuple[Episode, list[Any]]:
    """One episode with placeholder answers, and the calls it made; `finish` says the finish tag right away."""
    if task is PLACEHOLDER:
        task = replace(task, meta={key: f"(the {key} of this task)" for key in wiring.needs(recipe)})
    roles = recipe.roles()
    run = resolve("workflow", recipe.team.workflow.name)
    tag = effective(run, recipe.team.workflow.options).get("finish_tag") if finish else None
    return _played(recipe, task, recipe.team.workflow, roles, _replies(roles, f" {tag}" if tag else ""))


def _played(
    recipe: Recipe, task: Task, block: Block, roles: Mapping[str, Role], reply: Callable[[Any], str]
) -> tuple[Episode, list[Any]]:
    from cothink import team
    from cothink.engines import scripted

    engine = scripted.engine(reply)
    workflow = bind(resolve("workflow", block.name), block.options, "team.workflow")
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
    return _count(*play(recipe, task, finish=False))


def _count(episode: Episode, calls: Sequence[Any]) -> Calls:
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
    length = sum(len(task.question) for task in tasks) / len(tasks)
    return Data(len(tasks), tasks[0], report(tasks).replace("\n", "; "), length)


def _evaluate(label: str, recipe: Recipe, stage: Any, data: Mapping[str, Data], most: Calls) -> Iterator[str]:
    assert isinstance(stage, Evaluate)
    sets = {stage.on: data[stage.on]} if stage.suite is None else _suite(stage.suite)
    if stage.workflow is not None or stage.roles is not None:
        block, roles = seating.evaluated(recipe, stage), seating.seats(recipe, stage)
        most = _count(*_played(recipe, data[stage.on].first, block, roles, _replies(roles, "")))
    who = f"{stage.label} on" if stage.label else "on"
    if stage.untrained:
        who = f"{who.removesuffix('on')}with {' and '.join(stage.untrained)} untrained on"
    if stage.protocol == "paper":
        rows = SUBSETS * (stage.limit or QUESTIONS)
        plays = _plays(rows, stage.episodes_per_task, most)
        yield f"{label}: evaluate {who} {SUBSETS} random subsets of {stage.on}, {plays}"
        return
    for name, found in sets.items():
        rows = found.rows if stage.limit is None else min(stage.limit, found.rows or stage.limit)
        note = f" ({found.note})" if stage.suite is not None and found.note else ""
        yield f"{label}: evaluate {who} {name}, {_plays(rows, stage.episodes_per_task, most)}{note}"


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
    yield from credit_rules.words(stage)
    yield from schedule_rules.words(recipe, stage, rows)
    passes = f", {total / rows:.2g} passes over {stage.on}" if rows else ""
    every = sum(most.calls.values())
    yield (
        f"  in all {total:,} rows{passes}, {stage.steps * episodes:,} episodes, "
        f"at most {stage.steps * episodes * every:,} calls and {_tokens(stage.steps * episodes * most.tokens)}"
    )
    if stage.token_budget is not None:
        yield f"  ends early once {_tokens(stage.token_budget)} were sampled"


def _collect(label: str, recipe: Recipe, stage: Any, data: Mapping[str, Data], most: Calls) -> Iterator[str]:
    assert isinstance(stage, Collect)
    found = data[stage.on]
    episode, calls = _longest(recipe, stage, found)
    parents = {p for turn in episode.turns for p in turn.parents}
    leaves = sum(turn.id not in parents for turn in episode.turns)
    branching = stage.branching or recipe.team.workflow.options.get("branching")
    shape = f" of branching {list(branching)}" if branching else ""
    yield f"{label}: collect on {stage.on}, a tree{shape} on every row; a tree is"
    each = {"calls": len(calls), "completions": sum(call.n for call in calls), "leaves": leaves}
    read = sum(len(m.content) for call in calls for m in call.messages) / CHARACTERS
    said = sum(call.n * call.sampling.max_tokens for call in calls)
    words = "{calls:,} calls ({calls:,} prompts to read), {completions:,} completions, {leaves:,} leaves"
    yield f"  {words.format(**each)}, at most {_number(read)} prompt tokens and {_tokens(said)}"
    rows = found.rows if stage.limit is None else min(stage.limit, found.rows or stage.limit)
    if rows is None:
        yield "  rows unknown: what all trees cost is said once the data is here"
        return
    whole = {key: rows * count for key, count in each.items()}
    yield f"  in all {rows:,} trees, {words.format(**whole)}, at most {_number(rows * read)} prompt tokens"
    hours = rows * said / stage.tokens_per_second / 3600
    minutes = max(1, round(60 * hours))
    time = f"{hours:.1f} hours" if hours >= 1 else f"{minutes} minute{'s' * (minutes > 1)}"
    rate = f"{_number(stage.tokens_per_second)} new tokens a second (tokens_per_second of the stage)"
    yield f"  and {_tokens(rows * said)}: {time} at {rate}"


def _longest(recipe: Recipe, stage: Any, found: Data) -> tuple[Episode, list[Any]]:
    """One tree in which every answer takes all the tokens it may, and the calls it made."""
    task = replace(found.first, question="x" * max(1, round(found.characters)))
    roles = seating.heated(recipe.roles(), stage.temperature)
    block = seating.workflow(recipe, stage)
    return _played(recipe, task, block, roles, lambda call: "x" * (CHARACTERS * call.sampling.max_tokens))


def _sft(label: str, recipe: Recipe, stage: Any, data: Mapping[str, Data], most: Calls) -> Iterator[str]:
    assert isinstance(stage, SFT)
    names = taught(recipe, stage)
    roles = {name: role for name, role in recipe.roles().items() if name in names}
    policies = {roles[name].policy: [n for n in names if roles[n].policy == roles[name].policy] for name in names}
    blocks = f"packed blocks of up to {stage.max_length:,} tokens" if stage.packing else "rows"
    step = f"{stage.rows_per_step} {blocks} each"
    yield f"{label}: sft of {' and '.join(names)} on {stage.data.name}, {_length(stage)} of {step}"
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
        steps = f", at most {math.ceil(each * passes(stage.epochs, rows)):,} steps" if stage.epochs else ""
        yield f"  policy {policy}: " + " + ".join(f"{n:,} of {role}" for role, n in counts.items()) + f" rows{steps}"
    yield from (f"  {note}" for note in found.notes)
    yield f"  rows longer than {stage.max_length:,} tokens are left out, which the run counts"


def _dpo(label: str, recipe: Recipe, stage: Any, data: Mapping[str, Data], most: Calls) -> Iterator[str]:
    assert isinstance(stage, DPO)
    scale = "" if stage.adapter_scale is None else f", a second adapter at scale {stage.adapter_scale:g}"
    smooth = f", label smoothing {stage.label_smoothing:g}" if stage.label_smoothing else ""
    yield (
        f"{label}: dpo of {' and '.join(taught(recipe, stage))} on pairs of {stage.data.name}, {_length(stage)} of "
        f"{stage.pairs_per_step} pairs each, beta {stage.beta:g}{smooth}{scale}"
    )
    yield f"  pairs with a side longer than {stage.max_length:,} tokens are left out, which the run counts"


def _length(stage: SFT | DPO) -> str:
    if stage.epochs == "auto":
        return "1 to 10 epochs by the number of rows"
    return f"{stage.epochs:g} epoch{'s' * (stage.epochs != 1)}" if stage.epochs else f"{stage.max_steps:,} steps"


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
    try:
        count = shape(policy.model).parameters
    except ShapeError:
        folder = local(policy.model)
        count = parameters(folder) if folder else None
    if count is None:
        return f"{method}, size known once it is loaded"
    width = 2 if policy.dtype == "bfloat16" and policy.lora_r is not None else 4  # full weights stay float32
    weights = count * width
    # AdamW keeps two moments beside the gradient, all in the type of the weights.
    training = f", {_bytes(4 * weights)} with gradients and AdamW" if policy.lora_r is None else " plus the adapter"
    return f"{method}, {_number(count)} parameters, {_bytes(weights)}{training}"


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
