"""Returns become advantages. One function per estimator; its keyword-only parameters are its options.

Binding for all: a group with fewer than two members, or without spread, gets advantage 0 (spec/credit.md 3.2).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, MutableMapping, Sequence
from typing import Literal, TypeVar, get_args

from cothink.types import ScoredTurn

Scope = Literal["task", "role", "role_turn", "anchor", "prefix", "batch"]
Weighting = Literal["turn", "episode"]
Std = Literal["unbiased", "population"]
Baseline = Literal["mean", "leave_turn_out", "leave_episode_out", "length_weighted"]
WhitenScope = Literal["role", "batch"]
Key = TypeVar("Key")

TINY = 1e-8
"""A spread below this is no spread."""


def grpo(
    scored: Sequence[ScoredTurn],
    *,
    scope: Scope = "role",
    weighting: Weighting = "turn",
    std: Std = "unbiased",
    eps: float = 1e-6,
    min_members_for_std: int = 4,
) -> list[float]:
    """(R - group mean) / (group std + eps) (arXiv 2402.03300).

    A group with fewer than `min_members_for_std` members takes the std of its whole task; 2 turns that off.
    """
    return _centred(scored, scope=scope, weighting=weighting, std=std, eps=eps, min_members_for_std=min_members_for_std)


def dr_grpo(scored: Sequence[ScoredTurn], *, scope: Scope = "role", weighting: Weighting = "turn") -> list[float]:
    """R - group mean (arXiv 2503.20783)."""
    return _centred(scored, scope=scope, weighting=weighting)


def rloo(
    scored: Sequence[ScoredTurn],
    *,
    scope: Scope = "role",
    weighting: Weighting = "turn",
    leave_out: Literal["episode", "turn"] = "episode",
) -> list[float]:
    """R - mean of the others (arXiv 2402.14740).

    Others are the turns of other episodes: a baseline that holds the same episode's turns is biased by O(1/n). In
    scope `prefix` the others are always the sibling turns, which lie in the same episode.
    """
    by_turn = leave_out == "turn" or scope == "prefix"
    return _centred(
        scored, scope=scope, weighting=weighting, baseline="leave_turn_out" if by_turn else "leave_episode_out"
    )


def opo(scored: Sequence[ScoredTurn], *, scope: Scope = "role") -> list[float]:
    """R - length-weighted group mean (arXiv 2505.23585)."""
    return _centred(scored, scope=scope, baseline="length_weighted")


def rfpp(
    scored: Sequence[ScoredTurn],
    *,
    gamma_token: float = 1.0,
    whiten_scope: WhitenScope = "role",
    eps: float = 1e-8,
) -> list[list[float]]:
    """REINFORCE++: the turn's return on its last token, discounted backwards inside the turn, then whitened.

    One number per trained token (arXiv 2501.03262). Nothing flows from one turn into another.
    """
    tokens = [[t.value * gamma_token**j for j in reversed(range(t.tokens))] for t in scored]
    result: list[list[float]] = [[] for _ in scored]
    for members in _pools(scored, whiten_scope):
        shift, scale = _whitening([(v, 1) for i in members for v in tokens[i]], eps)
        for i in members:
            result[i] = [(v - shift) * scale for v in tokens[i]]
    return result


def rfpp_baseline(
    scored: Sequence[ScoredTurn],
    *,
    scope: Scope = "role",
    weighting: Weighting = "turn",
    whiten_scope: WhitenScope = "role",
    eps: float = 1e-8,
) -> list[float]:
    """R - group mean, then whitened over all trained tokens; filter first, it pushes solved groups down."""
    centre = _centred(scored, scope=scope, weighting=weighting)
    result = [0.0] * len(scored)
    for members in _pools(scored, whiten_scope):
        shift, scale = _whitening([(centre[i], scored[i].tokens) for i in members], eps)
        for i in members:
            result[i] = (centre[i] - shift) * scale
    return result


def gdpo(
    scored: Sequence[ScoredTurn],
    *,
    weights: Mapping[str, float],
    scope: Scope = "role",
    weighting: Weighting = "turn",
    std: Std = "unbiased",
    eps: float = 1e-6,
) -> list[float]:
    """Normalise every named reward on its own, then add them with `weights` (arXiv 2601.05242)."""
    missing = {name for t in scored for name in t.components} - set(weights)
    if missing:
        raise ValueError(f"gdpo: estimator.weights lacks the rewards {sorted(missing)}; write a weight for each (or 0)")
    result = [0.0] * len(scored)
    for name, weight in weights.items():
        members = [i for i, t in enumerate(scored) if name in t.components]
        parts = _centred(
            [scored[i] for i in members],
            scope=scope,
            weighting=weighting,
            std=std,
            eps=eps,
            values=[scored[i].components[name] for i in members],
        )
        for i, part in zip(members, parts):
            result[i] += weight * part
    return result


def rae(
    scored: Sequence[ScoredTurn],
    state: MutableMapping[str, float] | None = None,
    *,
    scope: Scope = "batch",
    alpha: float = 0.95,
    initial: float | None = None,
) -> list[float]:
    """R - running average of the key's returns, which is updated only afterwards (arXiv 2506.24119).

    `state` maps key -> average and is changed in place; keep it between steps and in checkpoints. Each episode
    updates its key once, with the mean of its turns. A new key starts at `initial`, None = its mean in this batch.
    """
    state = {} if state is None else state
    result = [0.0] * len(scored)
    for key, members in _by(scored, scope).items():
        name = "|".join(map(str, key))
        if name not in state:
            state[name] = _mean(scored[i].value for i in members) if initial is None else initial
        for own in _split(members, lambda i: scored[i].episode).values():
            for i in own:
                result[i] = scored[i].value - state[name]
            state[name] = alpha * state[name] + (1 - alpha) * _mean(scored[i].value for i in own)
    return result


def _centred(
    scored: Sequence[ScoredTurn],
    *,
    scope: Scope = "role",
    baseline: Baseline = "mean",
    weighting: Weighting = "turn",
    std: Std | None = None,
    eps: float = 1e-6,
    min_members_for_std: int = 2,
    values: Sequence[float] | None = None,
) -> list[float]:
    """The core of every group estimator: value - baseline, divided by (std + eps) if a std is named.

    Members are turns, or episodes with the mean of their turns (`weighting`); mean and std use the same members.
    """
    values = [t.value for t in scored] if values is None else values
    groups = _by(scored, scope)
    tasks = _by(scored, "task") if std and scope in ("role", "role_turn", "anchor", "prefix") else {}
    result = [0.0] * len(scored)
    for members in groups.values():
        units = _units(scored, members, values, weighting)
        if len(units) < 2 or _spread([values[i] for i in members], "population") < TINY:
            continue
        scale = 1.0
        if std:
            if len(units) < min_members_for_std and tasks:
                units = _units(scored, tasks[(scored[members[0]].task,)], values, weighting)
            deviation = _spread(units, std)
            if deviation < TINY:
                continue
            scale = 1.0 / (deviation + eps)
        for i, advantage in zip(members, _centre(scored, members, values, baseline, weighting)):
            result[i] = advantage * scale
    return result


def _centre(
    scored: Sequence[ScoredTurn],
    members: Sequence[int],
    values: Sequence[float],
    baseline: Baseline,
    weighting: Weighting,
) -> list[float]:
    if baseline == "length_weighted":
        lengths = [scored[i].tokens for i in members]
        mean = math.fsum(n * values[i] for n, i in zip(lengths, members)) / sum(lengths)
        return [values[i] - mean for i in members]
    units = _units(scored, members, values, weighting)
    total, count = math.fsum(units), len(units)
    if baseline == "mean":
        return [values[i] - total / count for i in members]
    if baseline == "leave_turn_out" and weighting == "turn":
        return [values[i] - (total - values[i]) / (count - 1) for i in members]
    own = {e: _units(scored, m, values, weighting) for e, m in _split(members, lambda i: scored[i].episode).items()}
    others = {e: count - len(part) for e, part in own.items()}
    rest = {e: (total - math.fsum(part)) / others[e] for e, part in own.items() if others[e]}
    # An episode that is alone in its group has nobody to be compared with.
    return [values[i] - rest.get(scored[i].episode, values[i]) for i in members]


def _units(
    scored: Sequence[ScoredTurn], members: Sequence[int], values: Sequence[float], weighting: Weighting
) -> list[float]:
    if weighting == "turn":
        return [values[i] for i in members]
    return [_mean(values[i] for i in own) for own in _split(members, lambda i: scored[i].episode).values()]


def _by(scored: Sequence[ScoredTurn], scope: Scope) -> dict[tuple[str, ...], list[int]]:
    """Places of the turns of every group, by its key."""
    if scope not in get_args(Scope):
        raise ValueError(f"unknown scope {scope!r}; write one of {', '.join(get_args(Scope))}")

    def key(i: int) -> tuple[str, ...]:
        turn = scored[i]
        if scope == "batch":
            return (turn.role,)
        if scope == "task":
            return (turn.task,)
        if scope == "prefix":
            return (turn.task, turn.role, turn.prefix)
        if scope == "role_turn":
            return (turn.task, turn.role, str(turn.index))
        if scope == "anchor":
            if turn.anchor is None:
                raise ValueError(f"scope anchor: turn {turn.turn!r} of task {turn.task!r} has no anchor state")
            return (turn.task, turn.role, turn.anchor)
        return (turn.task, turn.role)

    return _split(range(len(scored)), key)


def _split(places: Iterable[int], key: Callable[[int], Key]) -> dict[Key, list[int]]:
    groups: dict[Key, list[int]] = {}
    for i in places:
        groups.setdefault(key(i), []).append(i)
    return groups


def _mean(values: Iterable[float]) -> float:
    # fsum rounds once, so that the order of the turns cannot change a result.
    numbers = list(values)
    return math.fsum(numbers) / len(numbers)


def _spread(values: Sequence[float], std: Std) -> float:
    count = len(values) - (std == "unbiased")
    if count < 1:
        return 0.0
    mean = _mean(values)
    return math.sqrt(math.fsum((v - mean) ** 2 for v in values) / count)


def _pools(scored: Sequence[ScoredTurn], whiten_scope: WhitenScope) -> list[list[int]]:
    return list(_by(scored, "batch").values()) if whiten_scope == "role" else [list(range(len(scored)))]


def _whitening(pairs: Sequence[tuple[float, int]], eps: float) -> tuple[float, float]:
    """Shift and scale from (value, multiplicity) pairs with the unbiased variance; scale 0 without spread."""
    count = sum(n for _, n in pairs)
    if count < 2:
        return 0.0, 0.0
    mean = math.fsum(v * n for v, n in pairs) / count
    variance = math.fsum(n * (v - mean) ** 2 for v, n in pairs) / (count - 1)
    return mean, 0.0 if math.sqrt(variance) < TINY else 1.0 / math.sqrt(variance + eps)


def net_push(
    roles: Sequence[str], weights: Sequence[float], advantages: Sequence[float]
) -> dict[str, dict[str, float]]:
    """Per role: signed = sum w*A, absolute = sum w*|A|, ratio = |signed| / absolute (watch signal 19)."""
    result = {}
    for role, members in _split(range(len(roles)), lambda i: roles[i]).items():
        signed = math.fsum(weights[i] * advantages[i] for i in members)
        absolute = math.fsum(abs(weights[i] * advantages[i]) for i in members)
        result[role] = {"signed": signed, "absolute": absolute, "ratio": abs(signed) / absolute if absolute else 0.0}
    return result


def group_metrics(
    scored: Sequence[ScoredTurn], *, scope: Scope = "role", weighting: Weighting = "turn"
) -> dict[str, float]:
    """Shares of turns in groups that teach nothing (one member; no spread) and the mean in-group std."""
    values = [t.value for t in scored]
    single = flat = 0
    spreads = []
    for members in _by(scored, scope).values():
        units = _units(scored, members, values, weighting)
        spreads.append(_spread(units, "population"))
        single += len(members) * (len(units) < 2)
        flat += len(members) * (len(units) > 1 and spreads[-1] < TINY)
    turns = max(len(scored), 1)
    return {
        "singleton_share": single / turns,
        "degenerate_share": flat / turns,
        "group_std": _mean(spreads) if spreads else 0.0,
    }
