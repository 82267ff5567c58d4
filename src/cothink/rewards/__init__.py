"""Rewards: functions of (task, turn, episode) that return a number, or None where they do not apply."""

from __future__ import annotations

import asyncio
import inspect
import math
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass, replace

from cothink.types import Episode, Score, Task, Turn

RewardFunction = Callable[[Task, Turn, Episode], "float | Awaitable[float | None] | None"]


@dataclass(frozen=True, slots=True)
class Reward:
    """A reward as the recipe asks for it.

    `role`: whose turns are scored (None: the graded turn, and those sampled beside it: same role, same parents). `to`:
    who is credited: `team`, `role` (the role of the scored turn) or `turn`.
    """

    name: str
    function: RewardFunction
    role: str | None = None
    weight: float = 1.0
    to: str = "team"


async def score(episodes: Iterable[Episode], rewards: Sequence[Reward]) -> list[Episode]:
    """The episodes with one `Score` for every reward that applies; a value that is not a finite number is an error."""
    return list(await asyncio.gather(*(_score(e, rewards) for e in episodes)))


async def _score(episode: Episode, rewards: Sequence[Reward]) -> Episode:
    scores = list(episode.rewards)
    for reward in rewards:
        for turn in _turns(episode, reward.role):
            value = reward.function(episode.task, turn, episode)
            if inspect.isawaitable(value):
                value = await value
            if value is None:
                continue
            if not isinstance(value, int | float) or not math.isfinite(value):
                raise ValueError(
                    f"reward {reward.name} returned {value!r} for turn {turn.id} of task {episode.task.id}; "
                    "return a finite number, or None where the reward does not apply"
                )
            to = turn.role if reward.to == "role" else reward.to
            scores.append(Score(turn.id, reward.name, reward.weight * float(value), to))
    return replace(episode, rewards=tuple(scores))


def _turns(episode: Episode, role: str | None) -> list[Turn]:
    if role is not None:
        return [t for t in episode.turns if t.role == role]
    graded = next((t for t in episode.turns if t.id == episode.finish.turn), None)
    if graded is None:
        return list(episode.turns[-1:])
    return [t for t in episode.turns if (t.role, t.parents) == (graded.role, graded.parents)]
