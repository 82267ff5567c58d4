"""The `evaluate` stage: play a task set, grade it, and record accuracy with its interval and its token cost."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from cothink import stats
from cothink.parts import Evaluate
from cothink.record import episode_row
from cothink.session import Session
from cothink.stages.playing import generated, play_tasks, prompted
from cothink.stages.progress import bar
from cothink.team import Played
from cothink.types import Episode


async def evaluate(session: Session, stage: Evaluate, index: int) -> dict[str, Any]:
    """Plays `stage.on` and returns (and records under the stage's label) the result."""
    label = stage.label or f"evaluate-{index}"
    values, played = await measure(
        session,
        stage.on,
        limit=stage.limit,
        episodes_per_task=stage.episodes_per_task,
        temperature=stage.temperature,
        seed=("evaluate", session.recipe.seed if stage.seed is None else stage.seed),
        title=label,
    )
    if session.run is not None:
        session.run.episodes(f"{index:02d}-{label}", 0, map(episode_row, played.episodes))
        session.run.result(label, values)
    session.say(f"[bold]{label}[/bold]: {sentence(values)}")
    return values


async def measure(
    session: Session,
    on: str,
    *,
    limit: int | None,
    episodes_per_task: int,
    temperature: float | None,
    seed: object,
    title: str,
) -> tuple[dict[str, Any], Played]:
    """Plays the first `limit` tasks of a set and summarises them."""
    tasks = session.tasks[on][:limit]
    started = time.monotonic()
    with bar(session.console, title, len(tasks) * episodes_per_task) as advance:
        played = await play_tasks(
            session, tasks, episodes_per_task, seed, temperature=temperature, on_done=advance
        )  # fmt: skip
    values = summarise(played.episodes)
    failures = Counter(f.kind for f in played.failures)
    return {**values, "failures": dict(failures), "seconds": round(time.monotonic() - started, 2)}, played


def summarise(episodes: Sequence[Episode]) -> dict[str, Any]:
    """Accuracy with a 95 % interval (Wilson for one play a task, else bootstrap over tasks), and where it comes from.

    `per_task` maps task id -> mean accuracy: what paired comparisons need.
    """
    by_task: dict[str, list[float]] = {}
    levels: dict[str, list[float]] = {}
    for e in episodes:
        by_task.setdefault(e.task.id, []).append(e.accuracy or 0.0)
        if "level" in e.task.meta:
            levels.setdefault(str(e.task.meta["level"]), []).append(e.accuracy or 0.0)
    per_task = {k: sum(v) / len(v) for k, v in by_task.items()}
    n = len(per_task)
    right = sum(per_task.values())
    if not n:
        low, high = 0.0, 1.0
    elif all(len(v) == 1 for v in by_task.values()):
        low, high = stats.wilson(round(right), n)
    else:
        _, low, high = stats.bootstrap_mean(list(per_task.values()))
    reasons = Counter(e.finish.reason for e in episodes)
    verdicts = Counter(str(e.verdict) for e in episodes)
    total = len(episodes)
    return {
        "accuracy": right / n if n else 0.0,
        "low": low,
        "high": high,
        "n": n,
        "episodes": total,
        "tokens": generated(episodes),
        "prompt_tokens": prompted(episodes),
        "calls": sum(bool(t.completion.prompt_ids) for e in episodes for t in e.turns),
        "rounds": sum(1 + max((t.round for t in e.turns), default=-1) for e in episodes) / total if total else 0.0,
        "finish": {k: v / total for k, v in sorted(reasons.items())},
        "verdicts": {k: v / total for k, v in sorted(verdicts.items())},
        "levels": {k: sum(v) / len(v) for k, v in sorted(levels.items())},
        "per_task": per_task,
    }


def difference(after: Mapping[str, Any], before: Mapping[str, Any]) -> dict[str, float]:
    """Mean difference in accuracy over the tasks that both results hold, with its paired bootstrap interval."""
    shared = sorted(after["per_task"].keys() & before["per_task"].keys())
    mean, low, high = stats.paired_bootstrap([after["per_task"][k] - before["per_task"][k] for k in shared])
    return {"mean": mean, "low": low, "high": high}


def points(d: Mapping[str, float]) -> str:
    """A difference in percentage points."""
    return f"{100 * d['mean']:+.1f} points [{100 * d['low']:+.1f}, {100 * d['high']:+.1f}]"


def sentence(values: dict[str, Any]) -> str:
    """One line for people."""
    levels = " ".join(f"{k}:{v:.2f}" for k, v in values["levels"].items())
    left_out = "".join(f", {count} left out ({kind})" for kind, count in values.get("failures", {}).items())
    return (
        f"accuracy {values['accuracy']:.3f} [{values['low']:.3f}, {values['high']:.3f}] on {values['n']} tasks, "
        f"{values['tokens']:,} tokens, {values['rounds']:.1f} rounds{left_out}"
        + (f", by level {levels}" if levels else "")
    )
