"""Credit by what would have happened otherwise: without a guide, and after another turn in the same place."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Literal

from cothink.credit import returns, scored, sibling_advantages, sums
from cothink.types import Episode, Score, ScoredTurn, Turn

Name = Literal["broadcast", "turn_return", "ccpo_solo", "c3_suffix", "c3_local", "vine"]
Bonus = Literal["event", "continuous"]
BY_SIBLINGS = ("c3_suffix", "c3_local", "vine")
"""Credits that are advantages already: no estimator follows them."""
SOLO = "counterfactual"
"""The name of the guide's bonus among the rewards."""


def guide_bonus(joint: float, solo: float, kind: Bonus = "event") -> float:
    """What a guide's message was worth, of outcomes in [-1, 1]: the team's and the mean of plays without the guide.

    `event`: +1 where the team won and would mostly have lost, -1 the other way round, else 0; `continuous`: half the
    difference (CCPO, arXiv 2603.21563).
    """
    if kind == "continuous":
        return (joint - solo) / 2
    return float(joint > 0 > solo) - float(joint < 0 < solo)


def with_bonus(
    episodes: Iterable[Episode], solo: Mapping[str, float], guide: str, strength: float, kind: Bonus = "event"
) -> list[Episode]:
    """The episodes with the guide's bonus as one more reward, to the guide alone.

    `solo` maps task id -> mean accuracy of plays without the guide; a task that is not there gets no bonus.
    """
    found = []
    for e in episodes:
        if e.task.id in solo and e.turns:
            value = strength * guide_bonus(2 * (e.accuracy or 0.0) - 1, 2 * solo[e.task.id] - 1, kind)
            e = replace(e, rewards=(*e.rewards, Score(e.turns[-1].id, SOLO, value, guide)))
        found.append(e)
    return found


def step_advantage(reward: float, before: float, after: float, gamma: float = 1.0) -> float:
    """r + gamma V(state after) - V(state before), values by playing on from a state (VinePPO, arXiv 2410.01679)."""
    return reward + gamma * after - before


def sibling_credit(episode: Episode, name: Name, gamma: float = 1.0) -> dict[str, float]:
    """Advantage of every turn of a tree that its siblings say something about (spec/credit.md 3.1, 6.7, 6.8).

    A turn's value is the mean return of what follows it, by the rewards its role may see. `c3_local`: its value minus
    the mean of its siblings'. `c3_suffix`: the same, and the turns after it that have no siblings of their own take it
    over. `vine`: own reward + gamma x value of the state after it - value of the state before, the mean over all that
    was sampled there. Turns before the first place with alternatives are in no answer: they stay context.
    """
    joins = [t.id for t in episode.turns if len(t.parents) > 1]
    if joins:
        raise ValueError(f"credit {name} follows trees, and turn {joins[0]!r} of {episode.id!r} answers several turns")
    groups: dict[tuple[tuple[str, ...], str], list[Turn]] = {}
    for turn in episode.turns:
        groups.setdefault((turn.parents, turn.role), []).append(turn)
    alone = sums(s for s in episode.rewards if s.to == "turn")
    found: dict[str, float] = {}
    for role in dict.fromkeys(t.role for t in episode.turns):
        own = sums(s for s in episode.rewards if s.to in ("team", role))
        values = {k: float(v) for k, v in returns(episode.turns, own, gamma).items() if v is not None}
        here: dict[str, float] = {}
        for siblings in groups.values():
            known = [t for t in siblings if t.id in values]
            if len(known) < 2:
                continue
            mine = [alone.get(t.id, 0.0) if t.role == role else 0.0 for t in known]
            at = [values[t.id] + r for t, r in zip(known, mine)]
            if name == "vine":
                before = math.fsum(at) / len(at)
                rewards = [own.get(t.id, 0.0) + r for t, r in zip(known, mine)]
                # The recursion's value is reward + gamma x value of the state after it.
                parts = [step_advantage(r, before, v - r) for r, v in zip(rewards, at)]
            else:
                parts = sibling_advantages(at)
            here |= {t.id: a for t, a in zip(known, parts)}
        if name == "c3_suffix":
            for turn in episode.turns:
                above = here.get(turn.parents[0]) if turn.parents else None
                if turn.id not in here and above is not None and turn.id in values:
                    here[turn.id] = above
        spoken = {t.id for t in episode.turns if t.role == role and t.completion.output_ids}
        found |= {k: v for k, v in here.items() if k in spoken}
    return found


def influence(full: Sequence[float], masked: Sequence[float], groups: Sequence[str]) -> tuple[list[float], list[float]]:
    """What turns did to the log-prob of the next one, and the mean over equivalent steps (Dr. MAMR, arXiv 2511.02303).

    `full` and `masked` are log-probs of the next turn with and without the turn. Positive: it made the next one
    likelier; the sign is this project's, as the published one is not certain.
    """
    gains = [f - m for f, m in zip(full, masked, strict=True)]
    by_step: dict[str, list[float]] = {}
    for gain, group in zip(gains, groups, strict=True):
        by_step.setdefault(group, []).append(gain)
    return gains, [math.fsum(by_step[g]) / len(by_step[g]) for g in groups]


def advantages(
    episodes: Sequence[Episode],
    name: Name,
    gamma: float,
    estimator: Callable[[list[ScoredTurn]], Sequence[float | Sequence[float]]],
) -> tuple[list[ScoredTurn], Sequence[float | Sequence[float]]]:
    """Every turn with a return, and its advantage: by the estimator, or by its siblings where the credit says so."""
    if name not in BY_SIBLINGS:
        turns = scored(episodes, credit="turn_return" if name == "turn_return" else "broadcast", gamma=gamma)
        return turns, estimator(turns)
    by_turn = {(e.id, k): v for e in episodes for k, v in sibling_credit(e, name, gamma).items()}
    turns = [t for t in scored(episodes) if (t.episode, t.turn) in by_turn]
    return turns, [by_turn[t.episode, t.turn] for t in turns]
