"""Where an rl stage stands, and which rows it plays next: seeded epochs, the rows of a phase, a curriculum."""

from __future__ import annotations

import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from cothink.parts import RL, Curriculum
from cothink.session import Session
from cothink.signals import Memory
from cothink.types import Task


@dataclass
class Phase:
    """One phase of a schedule of phases: what its filter found so far, and how far training on its rows has come.

    `rates` maps row id -> success rate while the filter plays, None for a row whose plays all failed; `kept` holds the
    ids that passed, None before the filter is done. `number` counts from 0 over the stage.
    """

    number: int = 0
    rates: dict[str, float | None] = field(default_factory=dict)
    kept: list[str] | None = None
    cursor: int = 0
    counts: dict[str, float] = field(default_factory=dict)


@dataclass
class Progress:
    """Where an rl stage stands; all of it is saved with every checkpoint.

    `place` counts steps as an alternating schedule does: going back to a good state turns it back, `step` goes on.
    `cursor` counts rows drawn, `memory` is the estimator's, `bound` the curriculum's, `best` the state of the best
    evaluation so far (checkpoint, step, accuracy, and whether the stage has gone back to it), where it keeps one.
    """

    step: int = 0
    place: int = 0
    cursor: int = 0
    tokens: int = 0
    bound: float | None = None
    memory: dict[str, float] = field(default_factory=dict)
    phase: Phase = field(default_factory=Phase)
    watch: Memory = field(default_factory=Memory)
    best: dict[str, Any] | None = None

    @property
    def kept(self) -> list[str]:
        """Names of the checkpoints that must stay, however old."""
        return [g["checkpoint"] for g in self.watch.good] + (
            [self.best["checkpoint"]] if self.best and not self.best["left"] else []
        )

    @classmethod
    def of(cls, saved: Mapping[str, Any]) -> Progress:
        """The progress that `saved` holds."""
        inner = {"phase": Phase(**saved.get("phase", {})), "watch": Memory(**saved.get("watch", {}))}
        return cls(**{**saved, **inner})

    def saved(self) -> dict[str, Any]:
        """Plain data that `of` reads."""
        return asdict(self)


def next_rows(session: Session, stage: RL, index: int, here: Progress, count: int, seen: set[int]) -> list[Task]:
    """The next rows that are not in `seen`, the rows of this step so far; a phase's epoch may end with fewer."""
    tasks = session.tasks[stage.on]
    if stage.schedule.name == "phases":
        return _phase_rows(session, tasks, index, here.phase, count)
    allowed = set(eligible(stage, tasks, here))
    found: list[Task] = []
    while len(found) < count:
        epoch, place = divmod(here.cursor, len(tasks))
        order = _shuffled(f"{session.recipe.seed}/order/{index}/{epoch}", range(len(tasks)))
        while place < len(order) and len(found) < count:
            if order[place] in allowed and order[place] not in seen:
                seen.add(order[place])
                found.append(tasks[order[place]])
            place += 1
            here.cursor += 1
    return found


def _phase_rows(session: Session, tasks: Sequence[Task], index: int, phase: Phase, count: int) -> list[Task]:
    """The next rows of the phase's current epoch, so that an epoch holds every row once."""
    kept = phase.kept or []
    epoch, place = divmod(phase.cursor, len(kept))
    order = _shuffled(f"{session.recipe.seed}/order/{index}/phase{phase.number}/{epoch}", kept)[place : place + count]
    phase.cursor += len(order)
    by_id = {t.id: t for t in tasks}
    gone = [name for name in order if name not in by_id]
    if gone:
        raise ValueError(f"row {gone[0]!r} passed the filter of this phase and is no longer there: the data changed")
    return [by_id[name] for name in order]


def _shuffled(seed: str, items: Sequence[Any] | range) -> list[Any]:
    order = list(items)
    random.Random(seed).shuffle(order)
    return order


def eligible(stage: RL, tasks: Sequence[Task], here: Progress) -> list[int]:
    """Places of the rows that may be played now: all of them, or those within the curriculum's bound."""
    if stage.curriculum is None:
        return list(range(len(tasks)))
    needs = _needs(stage.curriculum, stage.on, tasks)
    most = bound(stage, needs, here)
    return [k for k, need in enumerate(needs) if need <= most]


def bound(stage: RL, needs: Sequence[float], here: Progress) -> float:
    """The most a row may need now: from `start` in whole steps to the hardest row's need after `share` of the stage."""
    assert stage.curriculum is not None
    top = max(needs)
    start = max(1.0, top - 4) if stage.curriculum.start is None else stage.curriculum.start
    if not min(needs) <= start < top:
        raise ValueError(
            f"curriculum.start {start:g}: the rows of tasks.{stage.on} need {min(needs):g} to {top:g} "
            f"({stage.curriculum.key}); write a number from {min(needs):g} to below {top:g}, or remove the curriculum"
        )
    done = here.step / stage.steps
    if stage.token_budget is not None:
        done = max(done, here.tokens / stage.token_budget)
    # A relative slack: the last level must not wait a step for a rounding error.
    return min(top, start + math.floor((top - start) * done / stage.curriculum.share + 1e-9))


def _needs(curriculum: Curriculum, name: str, tasks: Sequence[Task]) -> list[float]:
    needs = []
    for task in tasks:
        need = task.meta.get(curriculum.key)
        if not isinstance(need, int | float) or isinstance(need, bool):
            known = ", ".join(map(str, task.meta)) or "nothing"
            raise ValueError(
                f"curriculum.key {curriculum.key!r}: row {task.id} of tasks.{name} has no number there; "
                f"its meta holds {known}"
            )
        needs.append(float(need))
    return needs


def grown(stage: RL, tasks: Sequence[Task], here: Progress) -> bool:
    """Moves the curriculum on; True when rows have been added since the last step."""
    if stage.curriculum is None:
        return False
    before, here.bound = here.bound, bound(stage, _needs(stage.curriculum, stage.on, tasks), here)
    return before is not None and before != here.bound
