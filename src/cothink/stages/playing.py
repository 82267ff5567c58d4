"""What every stage does with a team: play tasks, grade the final texts, count tokens."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from cothink.rewards import Reward, score
from cothink.session import Session
from cothink.team import Job, Played, play, stable_seed
from cothink.types import Episode, PlayError, Task
from cothink.verify import averify_task


async def play_tasks(
    session: Session,
    tasks: Sequence[Task],
    episodes_per_task: int,
    seed: object,
    *,
    temperature: float | Mapping[str, float] | None = None,
    engines: Mapping[str, Any] | None = None,
    workflow: Any = None,
    on_done: Callable[[int], None] | None = None,
    rewards: Sequence[Reward] = (),
) -> Played:
    """Plays every task `episodes_per_task` times, grades each final text and gives out the rewards.

    Several processes play whole tasks, each its share, and all get everything, in the order of one process.

    `temperature` overrides that of every role, or of the roles it names; `engines` and `workflow` stand in for the
    session's.
    """
    given = dict.fromkeys(session.roles, temperature) if not isinstance(temperature, Mapping) else temperature
    roles = dict(session.roles)
    for name, heat in given.items():
        if heat is not None:
            roles[name] = replace(roles[name], sampling=replace(roles[name].sampling, temperature=heat))
    ranks, team = session.ranks, session.recipe.team
    jobs = [
        Job(task, f"{task.id}#{k}", stable_seed(seed, task.id, k))
        for task in ranks.share(tasks)
        for k in range(episodes_per_task)
    ]
    played = await play(
        jobs,
        session.workflow if workflow is None else workflow,
        roles,
        session.engines if engines is None else engines,
        concurrency=team.concurrency,
        deadline=team.deadline,
        on_done=on_done,
        share=ranks.count > 1,
    )
    played = replace(played, episodes=tuple(await score(await grade(played.episodes), rewards)))
    return played if ranks.count == 1 else _whole(ranks.gather(played), tasks)


def _whole(parts: Sequence[Played], tasks: Sequence[Task]) -> Played:
    """Everybody's share in the order of the tasks; raises PlayError where every play failed, one by an error."""
    place = {task.id: k for k, task in enumerate(tasks)}
    episodes = sorted((e for part in parts for e in part.episodes), key=lambda e: place[e.task.id])
    failures = sorted((f for part in parts for f in part.failures), key=lambda f: place[f.task])
    errors = [f for f in failures if f.kind == "error"]
    if errors and not episodes:
        raise PlayError(f"all {len(failures)} episodes failed; the first error: {errors[0].message}")
    return Played(tuple(episodes), tuple(failures))


def afresh(session: Session) -> None:
    """Lets the engines forget earlier chats, at every place where a run may be resumed.

    How a processor rounds a product depends on which rows are computed together, and so on what is remembered.
    """
    for engine in {id(e): e for e in session.engines.values()}.values():
        forget = getattr(engine, "forget", None)
        if forget is not None:
            forget()


def engine_figures(session: Session, outside: bool = False) -> dict[str, float]:
    """What engines count about themselves since they were last asked; `outside`: those of servers alone."""
    asked = [e for name, e in session.engines.items() if not (outside and name in session.policies)]
    engines = {id(e): e for e in asked}.values()
    return {key: value for e in engines if hasattr(e, "figures") for key, value in e.figures().items()}


async def grade(episodes: Iterable[Episode]) -> list[Episode]:
    """The episodes with accuracy (1 right, 0 anything else) and verdict of their final text."""

    async def one(episode: Episode) -> Episode:
        verdict = await averify_task(episode.task, episode.finish.text)
        return replace(episode, accuracy=float(verdict.verdict == "right"), verdict=verdict.verdict)

    return list(await asyncio.gather(*(one(e) for e in episodes)))


def generated(episodes: Iterable[Episode]) -> int:
    """Sampled tokens of all turns."""
    return sum(len(t.completion.output_ids) for e in episodes for t in e.turns)


def prompted(episodes: Iterable[Episode]) -> int:
    """Prompt tokens of all turns, repeated prefixes counted each time."""
    return sum(len(t.completion.prompt_ids) for e in episodes for t in e.turns)
