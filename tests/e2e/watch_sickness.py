"""Runs that are made sick on purpose: teams of tables and a small random model, healthy up to the step that breaks."""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import cothink
from cothink.chat import InternCodec
from cothink.engines.local import engine as local
from cothink.engines.table import TableEngine, TablePolicy
from cothink.estimators import rloo
from cothink.recipe import Recipe
from cothink.record import Run
from cothink.resolve import bind, resolve
from cothink.session import Session
from cothink.stages.guard import Collapse
from cothink.stages.rl import rl
from cothink.types import FINISHED, Completion, Episode, Finish, Message, ScoredTurn, Task, Turn

BREAKS = 13
"""The first step in which something is wrong: the watch listens from the 12th on, and start values take ten."""
WATCH = {"mode": "act", "warmup": 11, "rollbacks": 0}


def boxed(k: int) -> str:
    return f"\\boxed{{{k}}}"


def right(task: Task, turn: Turn, broken: bool = False) -> float:
    """What a healthy table team is paid for."""
    return float(turn.text == boxed(int(task.answer)))


def dice(task: Task, turn: Turn, broken: bool = False) -> float:
    """A reward that a random model cannot learn: its figures stay what they are."""
    return (sum(turn.completion.output_ids) % 7) / 7


@dataclass
class Trouble:
    """What is wrong with a run, and the step it is at.

    `returns` gives (turn, text) the return it is trained on instead of its own; `pays` gives (task, turn, whether it is
    broken by now) the reward; `base` is the estimator; `engine` may change what the engine says, or its policies.
    """

    returns: Callable[[ScoredTurn, str], float] | None = None
    pays: Callable[[Task, Turn, bool], float] = right
    base: Callable[[Sequence[ScoredTurn]], list[float]] = rloo
    engine: Callable[[Any, list[Completion]], list[Completion]] | None = None
    lost: bool = False
    step: int = 1
    texts: dict[tuple[str, str], str] = field(default_factory=dict)

    @property
    def broken(self) -> bool:
        return self.step >= BREAKS


NOW = Trouble()
"""Of the run that is going on: a recipe names functions, not objects."""


def begin(trouble: Trouble) -> None:
    global NOW
    NOW = trouble


def estimator(scored: Sequence[ScoredTurn]) -> list[float]:
    """Leave-one-out; called once a step, so it counts them."""
    hidden = NOW.returns if NOW.broken else None
    NOW.step += 1
    if hidden is not None:
        scored = [replace(t, value=hidden(t, NOW.texts[t.episode, t.turn])) for t in scored]
    return NOW.base(scored)


def paid(task: Task, turn: Turn, episode: Episode) -> float:
    """The reward of every run here; remembers what was said."""
    NOW.texts |= {(episode.id, t.id): t.text for t in episode.turns}
    return NOW.pays(task, turn, NOW.broken)


class Engine:
    """The local engine, and what the trouble makes of its answers."""

    def __init__(self, policies: Any):
        self.inner = local(policies)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    async def generate(self, *args: Any) -> list[Completion]:
        """See `Engine`."""
        done = await self.inner.generate(*args)
        return NOW.engine(self.inner.policies, done) if NOW.engine and NOW.broken else done


async def handing(task: Task, team: Any) -> Finish:
    """A plan and its execution; when broken, the plan is lost on the way."""
    plan = await team.chat("meta").say(task.question)
    heard = "" if NOW.lost and NOW.broken else plan.text
    answer = await team.chat("reasoning").say(f"Question:\n{task.question}\n\nInstruction:\n{heard}", after=plan)
    return Finish(FINISHED, answer.text, answer.id)


Shares = Callable[[Sequence[Message]], Mapping[str, float]]


class Beginner(TablePolicy):
    """A table that begins with given shares of its actions, and that can go back to what it was."""

    def __init__(self, name: str, shares: Shares, codec: InternCodec, learning_rate: float):
        super().__init__(name, lambda messages: list(shares(messages)), codec, learning_rate)
        self._shares, self._saved = shares, {}

    def probabilities(self, prompt: tuple[int, ...], messages: Sequence[Message] = ()) -> dict[int, float]:
        """See `TablePolicy`."""
        if prompt not in self._logits:
            row = {self._codec.intern("assistant", a): math.log(share) for a, share in self._shares(messages).items()}
            self._logits[prompt] = row
        return super().probabilities(prompt, messages)

    def save(self, folder: Path) -> None:
        """See `Policy`; `load` wants ids, which texts do not tell."""
        super().save(folder)
        self._saved[folder.name.removesuffix(".part")] = deepcopy(self._logits)

    def load(self, folder: Path, state: Path | None = None) -> None:
        """See `Policy`."""
        self._logits = deepcopy(self._saved[folder.name])

    def forget_optimizer(self) -> None:
        """A table has none."""

    def scale_rate(self, factor: float) -> None:
        """See `Policy`."""
        self.learning_rate *= factor


class Heard:
    """What a run folder says about its health; `end` is the message of a run that was stopped."""

    def __init__(self, folder: Path, end: str = ""):
        self.end = end
        self.rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        self.words = [(row["step"], line) for row in self.rows for line in row.get("watch", ())]
        place = folder / "stopped.json"
        self.mark = json.loads(place.read_text()) if place.exists() else None

    @property
    def first(self) -> list[str]:
        """The signals that spoke at the first step at which any did, worst first."""
        said = [line.split()[1].split("/")[0].split(":")[0] for at, line in self.words if at == self.words[0][0]]
        return list(dict.fromkeys(said))


def tables(
    folder: Path,
    trouble: Trouble,
    workflow: Any,
    shares: Mapping[str, Shares],
    *,
    rate: float = 1.5,
    needs: Mapping[str, Any] | None = None,
    frozen: Sequence[str] = (),
    **stage: Any,
) -> Heard:
    """A team of tables in a real rl stage with a run folder: 8 rows of 8 plays a step, up to 30 steps."""
    recipe = Recipe.load(
        {
            "name": "sick",
            "seed": 5,
            "team": {
                "workflow": workflow,
                "roles": {r: {"policy": r, "system": r, "trainable": r not in frozen} for r in shares},
            },
            "policies": {r: {"model": "table"} for r in shares},
            "tasks": {"train": {"name": "wordsums", "count": 5}, "test": {"name": "wordsums", "count": 5}},
            "stages": [{**STAGE, "steps": 30, "tasks_per_step": 8, **stage}],
        }
    )
    codec = InternCodec()
    made = {r: Beginner(r, shares[r], codec, rate) for r in shares}
    block = recipe.team.workflow
    play = bind(resolve("workflow", block.name), block.options, "team.workflow")
    rows = [Task(f"t{k}", f"q{k}", str(k), dict(needs or {})) for k in range(8)]
    session = Session(
        recipe, recipe.roles(), play, dict(made), dict.fromkeys(made, TableEngine(made, codec)),
        {"train": rows, "test": rows}, Run(folder, recipe.to_yaml(), 5),
    )  # fmt: skip
    begin(trouble)
    try:
        asyncio.run(rl(session, recipe.stages[0], 0))  # type: ignore[arg-type]
    except Collapse as error:
        return Heard(folder, str(error))
    finally:
        session.run.close()  # type: ignore[union-attr]
    return Heard(folder)


STAGE = {
    "kind": "rl", "episodes_per_task": 8, "filter": "none", "unfinished": "keep", "watch": WATCH,
    "estimator": "watch_sickness:estimator", "rewards": ["watch_sickness:paid"],
}  # fmt: skip


def model(
    folder: Path, trouble: Trouble, tiny: Path, roles: Mapping[str, Any], workflow: str = "solo", *,
    rate: float = 1e-4, **stage: Any,
) -> Heard:  # fmt: skip
    """A recipe on a small random model: 4 rows of 6 plays a step, up to 18 steps."""
    recipe = {
        "name": "sick",
        "seed": 1,
        "team": {
            "workflow": workflow,
            "roles": {r: {"policy": "p", "system": r, "max_tokens": 12, **seat} for r, seat in roles.items()},
        },
        "policies": {"p": {"model": str(tiny), "learning_rate": rate}},
        "engine": "watch_sickness:Engine",
        "tasks": {"train": {"name": "wordsums", "levels": 1, "distractors": 0, "count": 4}},
        "stages": [{**STAGE, "steps": 18, "tasks_per_step": 4, "episodes_per_task": 6, **stage}],
    }
    begin(trouble)
    try:
        cothink.run(recipe, out=folder)
    except Collapse as error:
        return Heard(folder, str(error))
    return Heard(folder)
