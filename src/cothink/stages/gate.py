"""The cold-start gate: an rl stage begins only with a team that can learn (spec/credit.md 3.13)."""

from __future__ import annotations

import json
import random
from collections.abc import Mapping, Sequence
from typing import Any

from cothink.parts import RL, Gate
from cothink.record import write_atomic
from cothink.session import Session
from cothink.stages.influence import without
from cothink.stages.playing import afresh, generated, play_tasks
from cothink.stages.progress import bar
from cothink.stages.rows import Progress, eligible
from cothink.types import Episode


class NotReady(RuntimeError):
    """The team is not ready for reinforcement learning; the message says in what."""


async def check(session: Session, stage: RL, index: int, here: Progress) -> None:
    """Plays some rows with the training temperatures and raises NotReady where the team falls short of the gate.

    The figures lie in the run folder as `gate-NN.json`; what was sampled counts in the stage's tokens.
    """
    gate, tasks = stage.gate, session.tasks[stage.on]
    assert gate is not None
    places = eligible(stage, tasks, here)
    chosen = random.Random(f"{session.recipe.seed}/gate/{index}").sample(places, min(gate.rows, len(places)))
    rows = [tasks[k] for k in chosen]
    seed = (session.recipe.seed, "gate", index)
    afresh(session)
    with bar(session.console, f"gate of stage {index}", len(rows) * gate.plays) as show:
        joint = (await play_tasks(session, rows, gate.plays, seed, on_done=show)).episodes
    here.tokens += generated(joint)
    found = figures(joint)
    if gate.guide is not None:
        solo = (await play_tasks(without(session, gate.guide), rows, gate.plays, seed)).episodes
        here.tokens += generated(solo)
        found |= {"solo/accuracy": figures(solo).get("accuracy", 0.0)}
        found["solo/gain"] = found.get("accuracy", 0.0) - found["solo/accuracy"]
    failed = shortcomings(gate, found)
    if session.run is not None:
        values = {**found, "passed": not failed, "failed": failed}
        write_atomic(session.run.folder / f"gate-{index:02d}.json", json.dumps(values, indent=2))
    session.say(f"gate of stage {index}: {'passed' if not failed else 'not passed'}, accuracy {found['accuracy']:.3f}")
    if failed:
        raise NotReady(
            f"stage {index}: the team is not ready for rl: {'; '.join(failed)}. Teach it first (kind: sft), take "
            f"easier or harder rows (tasks.{stage.on}, curriculum), or write other limits into stages.{index}.gate"
        )


def figures(episodes: Sequence[Episode]) -> dict[str, float]:
    """Accuracy, rounds, and per role the share of valid turns: not blank, not cut, and readable where it is graded."""
    n = len(episodes)
    found = {"episodes": float(n), "accuracy": sum(e.accuracy or 0.0 for e in episodes) / n if n else 0.0}
    needed = [e.task.meta.get("rounds") for e in episodes]
    numbers = [float(k) for k in needed if isinstance(k, int | float)]
    if n and len(numbers) == n:
        found["required_rounds"] = sum(numbers) / n
        found["rounds"] = sum(1 + max((t.round for t in e.turns), default=-1) for e in episodes) / n
    valid: dict[str, list[bool]] = {}
    for e in episodes:
        for t in e.turns:
            readable = t.id != e.finish.turn or e.verdict != "unparsable"
            whole = bool(t.text.strip()) and t.completion.finish_reason != "length"
            valid.setdefault(t.role, []).append(whole and readable)
    return found | {f"{role}/valid": sum(v) / len(v) for role, v in valid.items()}


def shortcomings(gate: Gate, found: Mapping[str, Any]) -> list[str]:
    """Every condition of the gate that the figures do not meet, in words."""
    if not found["episodes"]:
        return ["no play came through"]
    low, high = gate.accuracy
    said = []
    if not low <= found["accuracy"] <= high:
        said.append(f"accuracy {found['accuracy']:.3f} lies outside {low:g} to {high:g}")
    for key, share in found.items():
        if key.endswith("/valid") and share < gate.valid:
            what = "turns are whole and readable"
            said.append(f"{100 * share:.1f} % of {key.removesuffix('/valid')}'s {what}, not {100 * gate.valid:g} %")
    if "rounds" in found and abs(found["rounds"] - found["required_rounds"]) > gate.rounds * found["required_rounds"]:
        needs = f"{found['required_rounds']:.2f} that its tasks need, by more than {100 * gate.rounds:g} %"
        said.append(f"{found['rounds']:.2f} rounds a play are not the {needs}")
    if gate.guide is not None and found["solo/gain"] <= 0:
        said.append(f"{gate.guide} adds {found['solo/gain']:+.3f} to the accuracy without it, not more than 0")
    return said
