"""Rewards: functions of (task, turn, episode) that return a number, or None where they do not apply."""

from __future__ import annotations

import asyncio
import inspect
import math
import traceback
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass, replace

from cothink.types import Episode, Score, Task, Turn


class RewardError(RuntimeError):
    """A reward that failed or returned no number; the message names it, and the turn and task it was asked about."""


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
            value = await _value(reward, turn, episode)
            if value is None:
                continue
            to = turn.role if reward.to == "role" else reward.to
            scores.append(Score(turn.id, reward.name, reward.weight * float(value), to))
    return replace(episode, rewards=tuple(scores))


async def _value(reward: Reward, turn: Turn, episode: Episode) -> float | None:
    where = f"turn {turn.id} ({turn.role}) of task {episode.task.id}"
    try:
        value = reward.function(episode.task, turn, episode)
        if inspect.isawaitable(value):
            value = await value
    except Exception as error:
        frame = traceback.extract_tb(error.__traceback__)[-1]
        place = f"{frame.filename}, line {frame.lineno}"
        what = f"reward {reward.name} failed for {where}: {type(error).__name__}: {error} ({place})"
        raise RewardError(what) from error
    if value is not None and (not isinstance(value, int | float) or not math.isfinite(value)):
        raise RewardError(
            f"reward {reward.name} returned {value!r} for {where}; return a finite number, or None where the reward "
            "does not apply"
        )
    return value


def _turns(episode: Episode, role: str | None) -> list[Turn]:
    if role is not None:
        return [t for t in episode.turns if t.role == role]
    graded = next((t for t in episode.turns if t.id == episode.finish.turn), None)
    if graded is None:
        return list(episode.turns[-1:])
    return [t for t in episode.turns if (t.role, t.parents) == (graded.role, graded.parents)]
