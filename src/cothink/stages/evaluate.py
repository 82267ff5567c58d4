"""The `evaluate` stage: play task sets, grade them, and record accuracy with its interval and its token cost."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

from cothink import stats, suites
from cothink.parts import Evaluate
from cothink.record import write_atomic
from cothink.session import Session
from cothink.stages.answers import Answers, Row, ask
from cothink.stages.progress import bar
from cothink.stages.reports import markdown, percent
from cothink.stages.summary import summarise
from cothink.types import Task

Sets = Mapping[str, Sequence[Task]]


async def evaluate(session: Session, stage: Evaluate, index: int) -> dict[str, Any]:
    """Plays `stage.on` or `stage.suite` and returns (and records under the stage's label) the result.

    In a run folder every finished question is kept at once, so that an interrupted stage goes on with the next one.
    """
    label = stage.label or f"evaluate-{index}"
    sets = _sets(session, stage)
    kept = None
    if session.run is not None:
        kept = Answers(session.run.folder / "episodes" / f"{index:02d}-{label}" / "000000.jsonl")
    values, _ = await measure_sets(
        session,
        {name: tasks[: stage.limit] for name, tasks in sets.items()},
        episodes_per_task=stage.episodes_per_task,
        temperature=stage.temperature,
        seed=("evaluate", session.recipe.seed if stage.seed is None else stage.seed),
        title=label,
        answers=kept,
    )
    values["on"] = stage.on if stage.suite is None else stage.suite
    if session.run is not None:
        session.run.result(label, values)
        if len(sets) > 1 or stage.episodes_per_task > 1:
            write_atomic(session.run.folder / f"{label}.md", markdown({"systems": {label: values}, "sets": [*sets]}))
    session.say(f"[bold]{label}[/bold]: {sentence(values)}")
    return values


def _sets(session: Session, stage: Evaluate) -> Sets:
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
