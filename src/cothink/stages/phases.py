"""Training by phases (arXiv 2503.09501): one policy learns, from the rows it solves sometimes with the others' best.

Before each phase every row is played `filter_plays` times. The policy that will learn samples; all others are greedy,
so that one greedy plan meets ten sampled solutions, or ten sampled plans one greedy solution each. Rows whose
success rate lies in the closed interval of the stage's filter are kept for the phase.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from cothink.parts import RL
from cothink.session import Session
from cothink.stages.playing import afresh, generated, play_tasks
from cothink.stages.progress import bar
from cothink.stages.rows import Phase, Progress
from cothink.types import Completion, Message, Sampling

WAVE = 4
"""The filter plays this many times the team's concurrency in one go; an interruption keeps the waves before it."""


async def ready(
    session: Session, stage: RL, index: int, here: Progress, order: Sequence[str], save: Callable[..., None]
) -> bool:
    """Brings the stage to a phase that has rows left, filtering where one begins; False after the last phase.

    `save` writes a checkpoint: after every filter, so that it is not played again, and when it is interrupted.
    """
    last = stage.schedule.iterations * len(order)
    while here.phase.number < last:
        phase = here.phase
        if phase.kept is None:
            try:
                await _filter(session, stage, index, here, order[phase.number % len(order)])
            except BaseException:
                save(together=False)
                raise
            save()
            if stage.token_budget is not None and here.tokens >= stage.token_budget:
                return False
        if phase.cursor < stage.schedule.epochs * len(phase.kept or ()):
            return True
        here.phase = Phase(phase.number + 1)
    if here.step == 0:
        low, high = stage.filter.low, stage.filter.high
        raise ValueError(
            f"no row of tasks.{stage.on} was solved at a rate from {low:g} to {high:g} in any of {last} phases: "
            "nothing was learned. Take easier or harder rows, more schedule.filter_plays, or other filter bounds"
        )
    return False


async def _filter(session: Session, stage: RL, index: int, here: Progress, learner: str) -> None:
    """Plays every row, wave by wave, and notes which of them the phase keeps."""
    tasks, phase, plays = session.tasks[stage.on], here.phase, stage.schedule.filter_plays
    if not tasks:
        raise ValueError(f"tasks.{stage.on} is empty: nothing to train on")
    left = [t for t in tasks if t.id not in phase.rates]
    wave = max(1, WAVE * session.recipe.team.concurrency // plays)
    greedy = {name: 0.0 for name, role in session.roles.items() if role.policy != learner}
    title = f"phase {phase.number + 1}: filter"
    for first in range(0, len(left), wave):
        rows = left[first : first + wave]
        engines = once(session.engines)
        afresh(session)
        mine = len(session.ranks.share(rows)) * plays
        with bar(session.console, f"{title} {first + 1}-{first + len(rows)}/{len(left)}", mine) as show:
            seed = (session.recipe.seed, "filter", index, phase.number)
            played = await play_tasks(
                session, rows, plays, seed,
                temperature=greedy, engines=engines, workflow=session.answering, on_done=show,
            )  # fmt: skip
        right: dict[str, list[float]] = {t.id: [] for t in rows}
        for episode in played.episodes:
            right[episode.task.id].append(episode.accuracy or 0.0)
        phase.rates |= {name: sum(v) / len(v) if v else None for name, v in right.items()}
        saved = sum(e.saved for e in {id(e): e for e in engines.values()}.values())
        spent = generated(played.episodes) - sum(session.ranks.gather(saved))
        here.tokens += spent
        phase.counts["tokens"] = phase.counts.get("tokens", 0.0) + spent
    _close(stage, phase)
    here.watch.reset()
    c = phase.counts
    session.say(
        f"phase {phase.number + 1}: {learner} learns from {c['kept']:.0f} of {c['rows']:.0f} rows "
        f"({c['dropped_low']:.0f} too hard, {c['dropped_high']:.0f} too easy, {c['failed']:.0f} failed)"
    )


def _close(stage: RL, phase: Phase) -> None:
    low, high = stage.filter.low, stage.filter.high
    rates = phase.rates
    phase.kept = [name for name, rate in rates.items() if rate is not None and low <= rate <= high]
    phase.counts |= {
        "rows": float(len(rates)),
        "kept": float(len(phase.kept)),
        "dropped_low": float(sum(rate is not None and rate < low for rate in rates.values())),
        "dropped_high": float(sum(rate is not None and rate > high for rate in rates.values())),
        "failed": float(sum(rate is None for rate in rates.values())),
    }
    phase.rates = {}


def figures(stage: RL, phase: Phase, policies: int) -> dict[str, float]:
    """Which phase, iteration and epoch the next step belongs to, and what the phase's filter found; from 1."""
    found = {f"phase/{name}": value for name, value in phase.counts.items()}
    epoch = phase.cursor // max(1, len(phase.kept or ()))
    return found | {
        "phase/number": phase.number + 1.0,
        "phase/iteration": phase.number // policies + 1.0,
        "phase/epoch": epoch + 1.0,
    }


class Once:
    """An engine that answers a greedy prompt once: ten plays of one row share their one greedy plan.

    `saved` counts the tokens that were handed out again. It stands in front of one set of weights and is thrown away
    before they change.
    """

    def __init__(self, engine: Any):
        self._engine = engine
        self._answers: dict[tuple[Any, ...], asyncio.Task[list[Completion]]] = {}
        self.saved = 0

    def codec(self, policy: str) -> Any:
        """The engine's own."""
        return self._engine.codec(policy)

    async def generate(
        self,
        policy: str,
        messages: Sequence[Message],
        prompt_ids: tuple[int, ...],
        sampling: Sampling,
        n: int,
        seed: int,
    ) -> list[Completion]:
        """As the engine's; at temperature 0 the first asker's answer serves all."""
        if sampling.temperature > 0:
            return await self._engine.generate(policy, messages, prompt_ids, sampling, n, seed)
        key = (policy, tuple((m.role, m.content) for m in messages), prompt_ids, sampling)
        first = key not in self._answers
        if first:
            ask = self._engine.generate(policy, messages, prompt_ids, sampling, 1, seed)
            self._answers[key] = asyncio.ensure_future(ask)
        (answer,) = await asyncio.shield(self._answers[key])
        self.saved += (n - first) * len(answer.output_ids)
        return [answer] * n


def once(engines: Mapping[str, Any]) -> dict[str, Once]:
    """The engines behind `Once`, one in front of each."""
    fronts = {id(e): Once(e) for e in engines.values()}
    return {name: fronts[id(e)] for name, e in engines.items()}
