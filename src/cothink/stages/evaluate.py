"""The `evaluate` stage: play task sets, grade them, and record accuracy with its interval and its token cost."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from cothink import seating, stats, suites, wiring
from cothink.evaluate_rules import label_of
from cothink.parts import Evaluate
from cothink.record import write_atomic
from cothink.resolve import bind, resolve
from cothink.session import Session
from cothink.stages import teamwork
from cothink.stages.answers import Answers, Row, ask
from cothink.stages.playing import engine_figures
from cothink.stages.progress import bar
from cothink.stages.reports import markdown, percent
from cothink.stages.summary import Questions, summarise
from cothink.stages.untrained import untrained
from cothink.types import Task

Sets = Mapping[str, Sequence[Task]]


async def evaluate(session: Session, stage: Evaluate, index: int) -> dict[str, Any]:
    """Plays `stage.on` or `stage.suite` and returns (and records under the stage's label) the result.

    In a run folder every finished question is kept at once, so that an interrupted stage goes on with the next one.
    """
    label = label_of(stage, index)
    sets = _sets(session, stage)
    seed = ("evaluate", session.recipe.seed if stage.seed is None else stage.seed)

    def kept(name: str) -> Answers:
        run = session.run
        return Answers(None if run is None else run.folder / "episodes" / f"{index:02d}-{name}" / "000000.jsonl")

    team = seated(session, stage)
    with untrained(session, [team.roles[name].policy for name in stage.untrained]):
        values, rows = await _measured(team, stage, sets, seed, label, kept(label))
        if stage.diagnose:
            from cothink.stages import influence

            values["diagnosis"] = await influence.team(
                team, sets, rows, k=stage.episodes_per_task, temperature=stage.temperature, seed=seed, title=label,
                kept=lambda role: kept(f"{label}-without-{role}"),
            )  # fmt: skip
    values["on"] = stage.on if stage.suite is None else stage.suite
    values |= await _analysed(session, stage, sets, rows)
    if served := engine_figures(session, outside=True):
        values["served"] = served
    if session.run is not None:
        session.run.result(label, values)
        if len(sets) > 1 or stage.episodes_per_task > 1 or stage.diagnose:
            write_atomic(session.run.folder / f"{label}.md", markdown({"systems": {label: values}, "sets": [*sets]}))
    session.say(f"{label}: {sentence(values)}")
    return values


async def _measured(
    session: Session, stage: Evaluate, sets: Sets, seed: tuple[Any, ...], label: str, kept: Answers
) -> tuple[dict[str, Any], list[Row]]:
    """The figures and rows of a stage; each subset of the paper's protocol is played under a seed of its own."""
    parts = [sets] if stage.protocol == "full" else [{name: tasks} for name, tasks in sets.items()]
    found: list[tuple[dict[str, Any], list[Row]]] = []
    for k, part in enumerate(parts):
        found.append(
            await measure_sets(
                session, part, episodes_per_task=stage.episodes_per_task, temperature=stage.temperature,
                seed=seed if len(parts) == 1 else (*seed, k), title=label, answers=kept,
            )
        )  # fmt: skip
    if len(parts) == 1:
        return found[0]
    rows = [row for _, part in found for row in part]
    failures = sum((Counter(values["failures"]) for values, _ in found), Counter())
    seconds = round(sum(values["seconds"] for values, _ in found), 2)
    return {**summarise(rows), "failures": dict(failures), "seconds": seconds}, rows


def seated(session: Session, stage: Evaluate) -> Session:
    """The session with the team of the stage at the table."""
    if stage.workflow is None and stage.roles is None:
        return session
    block = seating.evaluated(session.recipe, stage)
    workflow = bind(resolve("workflow", block.name), block.options, "workflow")
    return replace(session, workflow=workflow, alone=None, roles=seating.seats(session.recipe, stage))


async def _analysed(session: Session, stage: Evaluate, sets: Sets, rows: Sequence[Row]) -> dict[str, Any]:
    """What the turns did, how the stage's baseline was left behind, the figures of the paper's protocol."""
    block = seating.evaluated(session.recipe, stage)
    found: dict[str, Any] = {}
    answering = wiring.declared(block, "answerers", "ANSWERERS")
    if answering and rows:
        tasks = {(name, task.id): task for name, part in sets.items() for task in part}
        found["turns"] = await teamwork.turns(rows, tasks, answering)
    if wiring.declared(block, "layouts", "LAYOUTS") is not None:
        found["prompts"] = seating.template_hashes(block, seating.seats(session.recipe, stage))
    if stage.protocol == "paper":
        found["paper"] = teamwork.paper(rows)
    if stage.baseline is not None and session.run is not None:
        before = {label_of(s, k): k for k, s in enumerate(session.recipe.stages) if s.kind == "evaluate"}
        place = session.run.folder / "episodes" / f"{before[stage.baseline]:02d}-{stage.baseline}" / "000000.jsonl"
        base = Answers(place)
        plays = [row for name, part in sets.items() for task in part for row in base.of(name, task)]
        found["transitions"] = {"from": stage.baseline, **teamwork.between(Questions(plays), Questions(rows))}
    return found


def _sets(session: Session, stage: Evaluate) -> Sets:
    """Set name -> questions; the paper's protocol draws its subsets once per set and seed of the recipe."""
    if stage.protocol == "paper":
        return teamwork.subsets(session.tasks[stage.on], stage.on, session.recipe.seed, stage.limit)
    return {name: tasks[: stage.limit] for name, tasks in _whole(session, stage).items()}


def _whole(session: Session, stage: Evaluate) -> Sets:
    if stage.suite is None:
        return {stage.on: session.tasks[stage.on]}
    found: dict[str, Sequence[Task]] = {}
    for name, tasks in suites.load(stage.suite).items():
        found[name], notes = sound(tasks)
        for note in notes:
            session.say(f"{name}: {note}")
    return found


def sound(tasks: Sequence[Task]) -> tuple[Sequence[Task], list[str]]:
    """The tasks whose gold answer is right against itself, and a note for each one that is left out."""
    from cothink.verify import check_golds

    problems = check_golds(tasks)
    bad = {line.partition(": gold ")[0] for line in problems}
    return [task for task in tasks if task.id not in bad], [f"left out {line}" for line in problems]


async def measure(
    session: Session,
    on: str,
    *,
    limit: int | None,
    episodes_per_task: int,
    temperature: float | None,
    seed: object,
    title: str,
) -> tuple[dict[str, Any], list[Row]]:
    """Plays the first `limit` tasks of a set and summarises them: the figures, and a row for each play."""
    return await measure_sets(
        session,
        {on: session.tasks[on][:limit]},
        episodes_per_task=episodes_per_task,
        temperature=temperature,
        seed=seed,
        title=title,
    )


async def measure_sets(
    session: Session,
    sets: Sets,
    *,
    episodes_per_task: int,
    temperature: float | None,
    seed: object,
    title: str,
    answers: Answers | None = None,
) -> tuple[dict[str, Any], list[Row]]:
    """As `measure`, over several sets; what `answers` holds is not played again, and what is played is added to it."""
    started = time.monotonic()
    with bar(session.console, title, sum(map(len, sets.values())) * episodes_per_task) as advance:
        rows, failures = await ask(
            session, sets, episodes_per_task, seed, temperature=temperature, answers=answers, on_done=advance
        )  # fmt: skip
    seconds = round(time.monotonic() - started, 2)
    return {**summarise(rows), "failures": dict(failures), "seconds": seconds}, rows


def difference(after: Mapping[str, Any], before: Mapping[str, Any]) -> dict[str, float]:
    """Mean difference in accuracy over the tasks that both results hold, with its paired bootstrap interval."""
    shared = sorted(after["per_task"].keys() & before["per_task"].keys())
    mean, low, high = stats.paired_bootstrap([after["per_task"][k] - before["per_task"][k] for k in shared])
    return {"mean": mean, "low": low, "high": high}


def points(d: Mapping[str, float]) -> str:
    """A difference in percentage points."""
    return f"{100 * d['mean']:+.1f} points [{100 * d['low']:+.1f}, {100 * d['high']:+.1f}]"


def sentence(values: Mapping[str, Any]) -> str:
    """One line for people."""
    k = values["k"]
    sampled = "".join(f", {kind}@{k} {percent(values[f'{kind}_at'][str(k)])}" for kind in ("pass", "maj") if k > 1)
    sets = f", macro {percent(values['macro'])}" if len(values["sets"]) > 1 else ""
    shares = {word: values["verdicts"].get(word, 0.0) for word in ("unparsable", "error")}
    apart = "".join(f", {100 * share:.0f} % {word}" for word, share in shares.items() if share)
    failed = "".join(f", {n} {_FAILURES.get(kind, kind)}" for kind, n in values.get("failures", {}).items() if n)
    levels = " ".join(f"{level}:{share:.2f}" for level, share in values["levels"].items())
    return (
        f"accuracy {values['accuracy']:.3f} [{values['low']:.3f}, {values['high']:.3f}] on {values['n']} tasks{sampled}"
        f"{sets}{apart}, {values['tokens']:,} tokens, {values['rounds']:.1f} rounds{failed}"
        + (f", by level {levels}" if levels else "")
    )


_FAILURES = {
    "deadline": "past the deadline (wrong)",
    "overlong_task": "longer than the context (wrong)",
    "error": "left out by errors (evaluate again to retry them)",
}
