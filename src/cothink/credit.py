"""Rewards become one return per turn: over chains, trees and joins, for unfinished episodes, and after filters."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from numbers import Rational
from typing import Literal, TypeVar

from cothink.types import FINISHED, Episode, Score, ScoredTurn, Turn

Credit = Literal["broadcast", "turn_return"]
Pooling = Literal["children", "leaves"]
Unfinished = Literal["zero", "keep", "mask", "bootstrap"]
Number = float | Fraction
Key = TypeVar("Key")


def returns(
    turns: Sequence[Turn], own: Mapping[str, Number], gamma: Number = 1, pooling: Pooling = "children"
) -> dict[str, Number | None]:
    """Return of every turn: own reward + gamma * mean return of the scored turns that answer it.

    One recursion for chains (reward-to-go), trees (value iteration) and joins (a turn with several parents counts
    once for each of them). A turn without own reward and without a scored child is None, never 0, and its parent's
    mean leaves it out. Integers and Fractions stay exact. `leaves` pools over all scored leaves below instead of
    over the children; the two differ on unequal trees. `turns` must list parents before children.
    """
    return _recursion(turns, own, lambda child: gamma, pooling)


def _recursion(
    turns: Sequence[Turn], own: Mapping[str, Number], discount: Callable[[Turn], Number], pooling: Pooling = "children"
) -> dict[str, Number | None]:
    children: dict[str, list[Turn]] = {}
    for turn in turns:
        if turn.id in children:
            raise ValueError(f"turn id {turn.id!r} occurs twice; ids must be unique within an episode")
        for parent in dict.fromkeys(turn.parents):
            if parent not in children:
                raise ValueError(f"turn {turn.id!r} answers {parent!r}, which is not listed before it")
            children[parent].append(turn)
        children[turn.id] = []
    _known(own, children)
    values: dict[str, Number | None] = {}
    leaves: dict[str, int] = {}
    for turn in reversed(turns):
        below = [(discount(c) * v, leaves[c.id]) for c in children[turn.id] if (v := values[c.id]) is not None]
        reward = own.get(turn.id)
        leaves[turn.id] = sum(n for _, n in below) or 1
        if not below:
            values[turn.id] = reward
            continue
        weighted = [(v, n if pooling == "leaves" else 1) for v, n in below]
        mean = _ratio(sum(v * n for v, n in weighted), sum(n for _, n in weighted))
        values[turn.id] = mean if reward is None else reward + mean
    return {turn.id: values[turn.id] for turn in turns}


def _known(named: Iterable[str], turns: Iterable[str]) -> None:
    unknown = set(named) - set(turns)
    if unknown:
        raise ValueError(f"rewards name turns that are not in the episode: {sorted(unknown)}")


def _ratio(total: Number, count: int) -> Number:
    return Fraction(total) / count if isinstance(total, Rational) else total / count


def branches(turns: Sequence[Turn]) -> bool:
    """True for a tree of alternatives: two turns of one role answer the same parents, and nothing joins them later."""
    places = [(t.parents, t.role) for t in turns]
    return len(set(places)) < len(places) and all(len(t.parents) < 2 for t in turns)


def turn_returns(episode: Episode, credit: Credit = "broadcast", gamma: float = 1.0) -> dict[str, float | None]:
    """Return of every turn of an episode, None where nothing applies or where nothing was sampled.

    `broadcast`: every turn of a role gets the sum of the team's scores and of the role's own, wherever they lie.
    `turn_return`: a score reaches its turn and the turns before it; gamma counts the role's *own* turns (one per
    round), so that both roles of a round see a shared terminal reward alike (spec/credit.md 3.1). A score `to` a
    role reaches only that role, one `to` `turn` only that turn. On a tree of alternatives broadcasting is undefined
    (one leaf's reward would reach turns it does not follow from): the recursion with gamma 1 takes its place.
    """
    if credit not in ("broadcast", "turn_return"):
        raise ValueError(f"unknown credit {credit!r}; write broadcast or turn_return")
    if credit == "broadcast" and gamma != 1:
        raise ValueError("gamma has no effect on broadcast credit; remove it or write credit turn_return")
    _known((s.turn for s in episode.rewards), (t.id for t in episode.turns))
    everywhere = credit == "broadcast" and not branches(episode.turns)
    alone = sums(s for s in episode.rewards if s.to == "turn")
    result: dict[str, float | None] = {}
    for role in dict.fromkeys(t.role for t in episode.turns):
        own = sums(s for s in episode.rewards if s.to in ("team", role))
        if everywhere:
            shared = math.fsum(own.values()) if own else None
            values = {t.id: shared for t in episode.turns}
        else:
            values = _recursion(episode.turns, own, lambda child, role=role: gamma if child.role == role else 1.0)
        for turn in episode.turns:
            if turn.role == role:
                parts = [v for v in (values[turn.id], alone.get(turn.id)) if v is not None]
                result[turn.id] = float(sum(parts)) if parts and turn.completion.output_ids else None
    return result


def sums(scores: Iterable[Score]) -> dict[str, float]:
    """Turn id -> sum of its rewards."""
    total: dict[str, float] = {}
    for score in scores:
        total[score.turn] = total.get(score.turn, 0.0) + score.value
    return total


def scored(
    episodes: Iterable[Episode],
    *,
    credit: Credit = "broadcast",
    gamma: float = 1.0,
    anchor: Callable[[Turn, Episode], str | None] | None = None,
) -> list[ScoredTurn]:
    """Every sampled turn that has a return, with its group keys, in episode and turn order."""
    rows = []
    for episode in episodes:
        values = turn_returns(episode, credit, gamma)
        names = dict.fromkeys(s.name for s in episode.rewards)
        parts = {
            name: turn_returns(
                replace(episode, rewards=tuple(s for s in episode.rewards if s.name == name)), credit, gamma
            )
            for name in names
        }
        places = _places(episode.turns)
        for turn in episode.turns:
            value = values[turn.id]
            if value is None:
                continue
            # Root turns of all episodes of a task share a prompt; later ones only share it within their episode.
            parents = f"{episode.id}:{'+'.join(turn.parents)}" if turn.parents else ""
            rows.append(
                ScoredTurn(
                    task=episode.task.id,
                    episode=episode.id,
                    role=turn.role,
                    policy=turn.policy,
                    index=places[turn.id],
                    value=value,
                    tokens=len(turn.completion.output_ids),
                    turn=turn.id,
                    prefix=f"{parents}>{turn.role}",
                    anchor=anchor(turn, episode) if anchor else None,
                    components={n: v for n, by_turn in parts.items() if (v := by_turn[turn.id]) is not None},
                )
            )
    return rows


def _places(turns: Sequence[Turn]) -> dict[str, int]:
    """How many turns of its own role lie before each turn, on the longest path: siblings share one place."""
    seen: dict[str, dict[str, int]] = {}
    places = {}
    for turn in turns:
        counts: dict[str, int] = {}
        for parent in turn.parents:
            for role, count in seen[parent].items():
                counts[role] = max(counts.get(role, 0), count)
        places[turn.id] = counts.get(turn.role, 0)
        seen[turn.id] = {**counts, turn.role: places[turn.id] + 1}
    return places


@dataclass(frozen=True, slots=True)
class Settled:
    """Episodes after the unfinished rule: `episodes` stay (rewards adjusted), `masked` leave statistics and loss."""

    episodes: list[Episode]
    masked: list[Episode]
    capped: bool


def settle_unfinished(
    episodes: Sequence[Episode],
    mode: Unfinished = "mask",
    *,
    mask_cap: float = 0.25,
    order: Sequence[int] | None = None,
) -> Settled:
    """Apply the rule for episodes that did not finish (spec/credit.md 3.10, spec/rema.md 2).

    `zero`: every reward becomes 0. `keep`: nothing changes. `mask`: at most floor(mask_cap * N) of them leave, the
    first ones in `order` (a permutation of range(N), normally seeded), the rest count as zero. `bootstrap`: the mean
    reward of the task's finished episodes; without any, as `mask`.
    """
    if mode not in ("zero", "keep", "mask", "bootstrap"):
        raise ValueError(f"unknown rule {mode!r} for unfinished episodes; write zero, keep, mask or bootstrap")
    kept: dict[int, Episode] = {}
    without: list[int] = []
    finished: dict[str, list[Episode]] = {}
    for episode in episodes:
        if episode.finish.reason == FINISHED:
            finished.setdefault(episode.task.id, []).append(episode)
    for i in range(len(episodes)) if order is None else order:
        episode = episodes[i]
        peers = finished.get(episode.task.id, [])
        if mode == "keep" or episode.finish.reason == FINISHED:
            kept[i] = episode
        elif mode == "zero":
            kept[i] = _zeroed(episode)
        elif mode == "bootstrap" and peers and episode.turns:
            kept[i] = _bootstrapped(episode, peers)
        else:
            without.append(i)
    room = math.floor(mask_cap * len(episodes))
    for i in without[room:]:
        kept[i] = _zeroed(episodes[i])
    masked = [episodes[i] for i in sorted(without[:room])]
    return Settled([kept[i] for i in sorted(kept)], masked, capped=len(without) > room)


def _zeroed(episode: Episode) -> Episode:
    rewards = tuple(replace(s, value=0.0) for s in episode.rewards)
    if not rewards and episode.turns:
        rewards = (Score(episode.turns[-1].id, "unfinished", 0.0),)
    return replace(episode, rewards=rewards)


def _bootstrapped(episode: Episode, peers: Sequence[Episode]) -> Episode:
    """The peers' mean reward per name and receiver, placed on the last turn; rewards of single turns are dropped."""
    total: dict[tuple[str, str], float] = {}
    for score in itertools.chain.from_iterable(p.rewards for p in peers):
        if score.to != "turn":
            total[score.name, score.to] = total.get((score.name, score.to), 0.0) + score.value
    last = episode.turns[-1].id
    return replace(episode, rewards=tuple(Score(last, name, v / len(peers), to) for (name, to), v in total.items()))


def accuracy_filter(groups: Mapping[Key, Sequence[float]], low: float = 0.0, high: float = 1.0) -> list[Key]:
    """Keys of the groups with low < mean accuracy < high (DAPO); give it unshaped accuracies."""
    return [key for key, values in groups.items() if low < math.fsum(values) / len(values) < high]


def success_filter(groups: Mapping[Key, Sequence[float]], low: float = 0.2, high: float = 0.8) -> list[Key]:
    """Keys of the groups whose success rate lies in [low, high], both ends included (ReMA's task filter)."""
    return [key for key, values in groups.items() if low <= math.fsum(values) / len(values) <= high]


def spread_filter(groups: Mapping[Key, Sequence[float]], top_p: float = 0.9) -> list[Key]:
    """Keys of the groups with the largest reward spread, until they hold `top_p` of all spread (RAGEN).

    A group without spread never stays, so the answer is empty when no group has any.
    """
    spread = {key: _deviation(values) for key, values in groups.items()}
    kept, share, goal = set(), 0.0, top_p * math.fsum(spread.values())
    for key in sorted(spread, key=lambda k: -spread[k]):
        # A relative slack: the sum of the parts may miss the whole by a rounding error.
        if spread[key] <= 1e-8 or share >= goal * (1 - 1e-12):
            break
        kept.add(key)
        share += spread[key]
    return [key for key in groups if key in kept]


def _deviation(values: Sequence[float]) -> float:
    mean = math.fsum(values) / len(values)
    return math.sqrt(math.fsum((v - mean) ** 2 for v in values) / len(values))


def void_turns(episode: Episode) -> list[str]:
    """Ids of the sampled turns whose text is blank."""
    return [t.id for t in episode.turns if t.completion.output_ids and not t.text.strip()]


def drop_void(episodes: Iterable[Episode]) -> list[Episode]:
    """The episodes without a void turn (SimpleTIR); log how many go, it hides a role that fails."""
    return [e for e in episodes if not void_turns(e)]


def labels(values: Mapping[str, Number | None], theta: float | str = 0.5) -> dict[str, bool | None]:
    """Good or bad: value > theta, strictly and exactly for Fractions; None stays unlabelled (MALT)."""
    bar = Fraction(str(theta))
    return {key: None if v is None else v > bar for key, v in values.items()}


def sibling_pairs(turns: Sequence[Turn], good: Mapping[str, bool | None]) -> list[tuple[str, str]]:
    """Every (good, bad) pair of ids among turns of one role that answer the same parents."""
    groups: dict[tuple[tuple[str, ...], str], list[str]] = {}
    for turn in turns:
        groups.setdefault((turn.parents, turn.role), []).append(turn.id)
    return [
        (chosen, rejected)
        for ids in groups.values()
        for chosen in ids
        if good[chosen]
        for rejected in ids
        if good[rejected] is False
    ]


def sibling_advantages(
    values: Sequence[float], critic: Sequence[float] | None = None, alpha: float = 0.0
) -> list[float]:
    """C3: each sibling's value minus the mean of the others, of which `alpha` comes from critic scores; alone: 0."""
    others = len(values) - 1
    if others < 1:
        return [0.0] * len(values)
    guess = values if critic is None else critic
    total, total_guess = math.fsum(values), math.fsum(guess)
    return [v - ((1 - alpha) * (total - v) + alpha * (total_guess - q)) / others for v, q in zip(values, guess)]
