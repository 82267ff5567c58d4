"""Figures of a batch of episodes: of the team, of each role and of its turns; docs/metrics.md explains every key."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from cothink.estimators import net_push
from cothink.losses import aggregation_weights
from cothink.parts import Loss
from cothink.stats import mean_interval
from cothink.types import FINISH_CODES, FINISHED, Episode, ScoredTurn, Turn
from cothink.watch import entropy_covariance

TURNS_SHOWN = 8
"""Turns of a role that get figures of their own; later ones are rare and would make thousands of keys."""
REPEAT_TURNS = 256
"""Turns of a role that are searched for repetition, every n-th of them: each search builds a set."""


def of_episodes(episodes: Sequence[Episode], finish_tag: str | None = None) -> dict[str, float]:
    """Means over episodes, shares of finish reasons and verdicts, and per-role figures (`role/figure`)."""
    if not episodes:
        return {"episodes": 0.0}
    n = len(episodes)
    reasons = Counter(e.finish.reason for e in episodes)
    verdicts = Counter(e.verdict for e in episodes)
    rounds = [1 + max((t.round for t in e.turns), default=-1) for e in episodes]
    found = {
        "episodes": float(n),
        "accuracy": sum(e.accuracy or 0.0 for e in episodes) / n,
        **_interval("accuracy", episodes, [e.accuracy or 0.0 for e in episodes]),
        "rounds": sum(rounds) / n,
        "one_round": sum(r == 1 for r in rounds) / n,
        "turns": sum(sum(bool(t.completion.output_ids) for t in e.turns) for e in episodes) / n,
        "tokens": float(sum(len(t.completion.output_ids) for e in episodes for t in e.turns)),
        "unfinished": 1 - reasons[FINISHED] / n,
        "unparsable": verdicts["unparsable"] / n,
        "grading_errors": verdicts["error"] / n,
    }
    needed = [e.task.meta.get("rounds") for e in episodes]
    if all(isinstance(k, int) for k in needed):
        found["required_rounds"] = sum(needed) / n  # type: ignore[arg-type]
        found["early_finish"] = sum(r < k for r, k in zip(rounds, needed)) / n  # type: ignore[operator]
    found |= {f"finish/{reason}": reasons[reason] / n for reason in dict.fromkeys([*FINISH_CODES, *reasons])}
    for role in dict.fromkeys(t.role for e in episodes for t in e.turns):
        turns = [[t for t in e.turns if t.role == role] for e in episodes]
        figures = of_role((t for own in turns for t in own), finish_tag) | _by_turn(turns)
        found |= {f"{role}/{k}": v for k, v in figures.items()}
    return found


def of_role(turns: Iterable[Turn], finish_tag: str | None = None) -> dict[str, float]:
    """Tokens per turn, entropy, and shares of void, cut, boxed, tagged and repetitive text."""
    spoken = [t for t in turns if t.completion.output_ids]
    if not spoken:
        return {"turns": 0.0}
    n = len(spoken)
    some = spoken[:: math.ceil(n / REPEAT_TURNS)]
    found = {
        "turns": float(n),
        "tokens_per_turn": sum(len(t.completion.output_ids) for t in spoken) / n,
        "void": sum(not t.text.strip() for t in spoken) / n,
        "cut": sum(t.completion.finish_reason == "length" for t in spoken) / n,
        "boxed": sum("\\boxed" in t.text for t in spoken) / n,
        "repeated": sum(repeated(t.completion.output_ids) for t in some) / len(some),
        **_entropy(spoken),
    }
    return found if finish_tag is None else found | {"tagged": sum(finish_tag in t.completion.text for t in spoken) / n}


def _by_turn(turns: Sequence[Sequence[Turn]]) -> dict[str, float]:
    """For teams of several rounds: how many episodes have the role's k-th turn, its tokens and its entropy."""
    spoken = [[t for t in own if t.completion.output_ids] for own in turns]
    longest = max((1 + t.round for own in spoken for t in own), default=0)
    found = {}
    for k in range(min(longest, TURNS_SHOWN) if longest > 1 else 0):
        here = [t for own in spoken for t in own if t.round == k]
        if here:
            found |= {
                f"turn{k + 1}/share": sum(any(t.round == k for t in own) for own in spoken) / len(spoken),
                f"turn{k + 1}/tokens": sum(len(t.completion.output_ids) for t in here) / len(here),
                **{f"turn{k + 1}/{name}": v for name, v in _entropy(here).items()},
            }
    return found


def _entropy(turns: Iterable[Turn]) -> dict[str, float]:
    """Mean -log-prob of the sampled tokens: what was sampled at temperature 1 estimates the entropy without bias."""
    values = [-p for t in turns for p in t.completion.logprobs]
    return {"sampled_entropy": math.fsum(values) / len(values)} if values else {}


def repeated(ids: Sequence[int], n: int = 4) -> float:
    """Share of n-grams that occurred before in the same turn."""
    grams = [tuple(ids[k : k + n]) for k in range(len(ids) - n + 1)]
    return 1 - len(set(grams)) / len(grams) if grams else 0.0


def of_rewards(episodes: Sequence[Episode]) -> dict[str, float]:
    """Mean reward per episode, by name and role, its interval over rows, and the spread within them (`reward_std`)."""
    n = len(episodes)
    if not n:
        return {}
    by_name: dict[str, list[float]] = {}
    for e in episodes:
        for s in e.rewards:
            by_name.setdefault(s.name, []).append(s.value)
    found = {f"reward/{name}": math.fsum(values) / n for name, values in by_name.items()}
    totals = {"": [math.fsum(s.value for s in e.rewards) for e in episodes]}
    for role in dict.fromkeys(t.role for e in episodes for t in e.turns):
        totals[f"{role}/"] = [_received(e, role) for e in episodes]
    for prefix, values in totals.items():
        found |= {f"{prefix}reward": math.fsum(values) / n, f"{prefix}reward_std": _within(episodes, values)}
        found |= _interval(f"{prefix}reward", episodes, values)
    return found


def _interval(name: str, episodes: Sequence[Episode], values: Sequence[float]) -> dict[str, float]:
    """95 % interval of the mean over rows, one value (the mean of its plays) for each: plays of a row are alike."""
    ends = mean_interval([math.fsum(group) / len(group) for group in _rows(episodes, values)])
    return {} if ends is None else {f"{name}_low": ends[0], f"{name}_high": ends[1]}


def _rows(episodes: Sequence[Episode], values: Sequence[float]) -> list[list[float]]:
    groups: dict[str, list[float]] = {}
    for episode, value in zip(episodes, values):
        groups.setdefault(episode.task.id, []).append(value)
    return [*groups.values()]


def _received(episode: Episode, role: str) -> float:
    """What one role is credited with: the team's rewards, its own, and those of its single turns."""
    mine = {t.id for t in episode.turns if t.role == role}
    return math.fsum(s.value for s in episode.rewards if s.to in ("team", role) or (s.to == "turn" and s.turn in mine))


def _within(episodes: Sequence[Episode], values: Sequence[float]) -> float:
    """Mean over rows of the population standard deviation among the row's plays."""
    spreads = []
    for group in _rows(episodes, values):
        mean = math.fsum(group) / len(group)
        spreads.append(math.sqrt(math.fsum((v - mean) ** 2 for v in group) / len(group)))
    return math.fsum(spreads) / len(spreads)


def of_advantages(
    scored: Sequence[ScoredTurn],
    advantages: Mapping[tuple[str, str], float | Sequence[float]],
    logprobs: Mapping[tuple[str, str], Sequence[float]],
    loss: Loss,
) -> dict[str, float]:
    """Per role: `net_push`, whether the advantages pull one way, and whether they lower the entropy.

    `advantages` and `logprobs` map (episode, turn) to the turn's advantage (or one per token) and its log-probs.
    """
    units: dict[tuple[str, str], list[ScoredTurn]] = {}
    for t in scored:
        units.setdefault((t.episode, t.role), []).append(t)
    weights = aggregation_weights(
        [[t.tokens for t in own] for own in units.values()],
        loss.aggregate,
        length_ref=loss.length_ref,
        turns_ref=loss.turns_ref,
    )
    tokens: dict[str, tuple[list[float], list[float]]] = {}
    lines: list[tuple[str, float, float]] = []
    for own, by_turn in zip(units.values(), weights):
        for t, weight in zip(own, by_turn):
            value = advantages[t.episode, t.turn]
            each = [float(value)] * t.tokens if isinstance(value, int | float) else list(value)
            lines.append((t.role, weight, math.fsum(each)))
            known, given = tokens.setdefault(t.role, ([], []))
            known += logprobs[t.episode, t.turn]
            given += each
    pushes = net_push([x[0] for x in lines], [x[1] for x in lines], [x[2] for x in lines])
    found = {f"{role}/net_push": push["ratio"] for role, push in pushes.items()}
    for role, (known, given) in tokens.items():
        if not known:  # a role whose engine gives no log-probs
            continue
        each = entropy_covariance(known, given)
        found[f"{role}/entropy_covariance"] = math.fsum(each) / len(each)
    return found
