"""Losses over a batch of tokens or turns, and the weight of every token. Torch is imported only inside functions."""

from __future__ import annotations

import math
from collections.abc import Mapping, MutableMapping, Sequence
from typing import TYPE_CHECKING, Literal, NamedTuple, get_args

from cothink.offpolicy import DRIFT, RANGE, OffPolicy, factor

if TYPE_CHECKING:
    from torch import Tensor

    from cothink.batch import Batch

Aggregate = Literal["token_mean", "turn_mean", "episode_token_mean", "episode_turn_mean", "const_token", "const_turn"]
Ratio = Literal["token", "turn_geo", "turn_arith", "episode_geo"]
Clip = Literal["ppo", "clip_higher", "gspo", "cispo", "sapo", "none"]
KL = Literal["none", "k2", "k3", "k3_iw", "k3_st"]
Metrics = dict[str, tuple[float, float]]

GUARD = 20.0
"""Exponents are held within +-GUARD: exp(20) is finite in every float type and far outside every trust region."""
RANGES: Mapping[str, tuple[float, float]] = {
    "ppo": (0.2, 0.2),
    "clip_higher": (0.2, 0.28),  # DAPO, arXiv 2503.14476
    "gspo": (3e-4, 4e-4),  # arXiv 2507.18071
    "cispo": (0.0, 1.28),  # floor and ceiling of the ratio itself, arXiv 2506.13585
}
SAPO_TAU = (1.0, 1.05)
"""SAPO's temperatures for A > 0 and otherwise (arXiv 2511.20347)."""


def policy(
    logprobs: Tensor,
    batch: Batch,
    *,
    ratio: Ratio = "token",
    clip: Clip = "clip_higher",
    low: float | None = None,
    high: float | None = None,
    dual_clip: float | None = 3.0,
    log_ratio_max: float | None = 20.0,
    kl: KL = "none",
    kl_beta: float = 0.0,
    entropy: float = 0.0,
    offpolicy: OffPolicy = "none",
    rho_min: float = RANGE[0],
    rho_max: float = RANGE[1],
    drift_max: float = DRIFT,
) -> tuple[Tensor, Metrics]:
    """Clipped policy loss: ratio (per token, turn or unit) x clip, in the batch's weights, plus KL, minus entropy.

    `logprobs` [B, L] are the current policy's. `low` and `high` are distances from 1 (cispo: the ratio's floor and
    ceiling), None = the usual ones of `clip`. A turn counts once, with the weight of all its tokens and its mean
    advantage. Metrics are (sum, count) pairs, see `merge`. A batch without trained tokens gives 0 with gradient 0.
    `offpolicy` weighs the clipped term alone; it needs `batch.rollout`, the engine's log-probs beside the trainer's.
    """
    import torch

    bounds = _bounds(clip, low, high)
    if kl == "none" and kl_beta:
        raise ValueError(f"kl_beta {kl_beta} has no effect with kl none; write kl: k3 or drop kl_beta")
    trained = batch.turns >= 0
    new, old = logprobs[trained], batch.logprobs[trained].to(logprobs.dtype)
    advantage, weight = batch.advantages[trained].to(new.dtype), batch.weights[trained].to(new.dtype)
    delta = new - old
    held, cut = weight, None
    if offpolicy != "none":
        if batch.rollout is None:
            raise ValueError(f"offpolicy {offpolicy} needs batch.rollout, the log-probs of the engine that sampled")
        rollout, (_, place) = batch.rollout[trained].to(new.dtype), _turns(batch, trained)
        bounds_of = {"rho_min": rho_min, "rho_max": rho_max, "drift_max": drift_max}
        scale, cut = factor(offpolicy, new, old, rollout, advantage, place, **bounds_of)
        held = weight * scale
    parts = _parts(ratio, delta, new, advantage, held, batch, trained, log_ratio_max)
    entries = _surrogate(clip, parts.ratio, parts.advantage, parts.logp, bounds, dual_clip)
    loss = (parts.weight * entries.loss).sum()
    reference = None if batch.ref_logprobs is None else new - batch.ref_logprobs[trained].to(new.dtype)
    if kl != "none":
        if reference is None:
            raise ValueError(f"kl {kl} needs batch.ref_logprobs, the log-probs under the reference weights")
        loss = loss + kl_beta * (weight * _kl(kl, reference, delta)).sum()
    if entropy:
        if batch.entropy is None:
            raise ValueError("an entropy coefficient needs batch.entropy, filled by the policy")
        loss = loss - entropy * (weight * batch.entropy[trained]).sum()

    with torch.no_grad():
        over = parts.log_ratio > (math.inf if log_ratio_max is None else log_ratio_max)
        by_part = {
            "clip_fraction": entries.clipped,
            "dual_clip_fraction": entries.dual,
            "log_ratio_clamp_fraction": over,
            "ratio_max": parts.ratio,
        }
        by_token = {"kl_approx": -delta, "kl_update": _k3(-delta)}
        if cut is not None:
            by_token["offpolicy_fraction"] = cut
        if batch.entropy is not None:
            by_token["entropy"] = batch.entropy[trained]
        if reference is not None:
            by_token |= {"kl_ref_k1": reference, "kl_ref_abs": reference.abs(), "kl_ref_k3": _k3(reference)}
        metrics = _metrics(by_part, parts.role, batch.roles) | _metrics(by_token, batch.role[trained], batch.roles)
    return loss, metrics


class _Parts(NamedTuple):
    """What the clip sees, one entry per token or per turn."""

    ratio: Tensor
    log_ratio: Tensor
    advantage: Tensor
    weight: Tensor
    logp: Tensor  # log pi of the token, or its mean over the turn
    role: Tensor


def _parts(
    ratio: Ratio,
    delta: Tensor,
    new: Tensor,
    advantage: Tensor,
    weight: Tensor,
    batch: Batch,
    trained: Tensor,
    ceiling: float | None,
) -> _Parts:
    import torch

    role = batch.role[trained]

    def ratio_of(log_ratio: Tensor) -> Tensor:
        return _exp(log_ratio if ceiling is None else log_ratio.clamp(max=ceiling))

    if ratio == "token":
        return _Parts(ratio_of(delta), delta, advantage, weight, new, role)
    if ratio not in get_args(Ratio):
        raise ValueError(f"unknown ratio {ratio!r}; write one of {', '.join(get_args(Ratio))}")
    pairs, place = _turns(batch, trained)

    def total(values: Tensor) -> Tensor:
        return values.new_zeros(len(pairs)).index_add(0, place, values)

    length = total(torch.ones_like(weight))
    log_ratio = total(delta) / length
    if ratio == "turn_arith":
        value = total(ratio_of(delta)) / length
        # The clamp acts on tokens here: a turn counts as clamped when its largest token is.
        log_ratio = torch.full_like(length, -math.inf).scatter_reduce(0, place, delta.detach(), "amax")
    elif ratio == "episode_geo":
        _, mine = torch.unique(pairs[:, 0], return_inverse=True)
        sums = torch.stack((total(delta), length), 1)
        sums = torch.zeros_like(sums).index_add(0, mine, sums)
        log_ratio = (sums[:, 0] / sums[:, 1])[mine]
        value = ratio_of(log_ratio)
    else:
        value = ratio_of(log_ratio)
    role = role.new_zeros(len(pairs)).scatter(0, place, role)
    return _Parts(value, log_ratio, total(advantage) / length, total(weight), total(new) / length, role)


def _turns(batch: Batch, trained: Tensor) -> tuple[Tensor, Tensor]:
    """The (unit, turn) pairs of a batch, and for each trained token which of them it belongs to."""
    import torch

    pairs = torch.stack((batch.unit[trained], batch.turns[trained]), 1)
    return torch.unique(pairs, dim=0, return_inverse=True)


def _bounds(clip: Clip, low: float | None, high: float | None) -> tuple[float, float]:
    """Smallest and largest ratio that is not cut."""
    if clip not in get_args(Clip):
        raise ValueError(f"unknown clip {clip!r}; write one of {', '.join(get_args(Clip))}")
    if clip in ("sapo", "none"):
        if low is not None or high is not None:
            raise ValueError(f"low and high have no effect with clip {clip}; remove them")
        return 0.0, math.inf
    usual = RANGES[clip]
    below, above = usual[0] if low is None else low, usual[1] if high is None else high
    return (below, above) if clip == "cispo" else (1 - below, 1 + above)


class _Entries(NamedTuple):
    loss: Tensor
    clipped: Tensor
    dual: Tensor


def _surrogate(
    clip: Clip, ratio: Tensor, advantage: Tensor, logp: Tensor, bounds: tuple[float, float], dual_clip: float | None
) -> _Entries:
    """Loss of each entry, whether the clipped branch won, and whether the dual clip did."""
    import torch

    no = torch.zeros_like(ratio, dtype=torch.bool)
    if clip == "none":
        return _Entries(-advantage * ratio, no, no)
    if clip == "sapo":
        tau = torch.where(advantage > 0, SAPO_TAU[0], SAPO_TAU[1]).to(ratio.dtype)
        return _Entries(-(4 / tau) * torch.sigmoid(tau * (ratio - 1)) * advantage, no, no)
    cut = ratio.clamp(*bounds)
    if clip == "cispo":
        return _Entries(-cut.detach() * advantage * logp, cut != ratio, no)
    free, held = -advantage * ratio, -advantage * cut
    loss, clipped, dual = torch.maximum(free, held), held > free, no
    if dual_clip is not None and clip != "gspo":
        roof = -advantage * dual_clip
        dual = (advantage < 0) & (loss > roof)
        loss = torch.where(dual, roof, loss)
    return _Entries(loss, clipped, dual)


def _exp(x: Tensor) -> Tensor:
    return x.clamp(-GUARD, GUARD).exp()


def _k3(d: Tensor) -> Tensor:
    # Both terms stop at the guard: a linear term alone would push a far too unlikely token further down.
    return _exp(-d) - 1 + d.clamp(min=-GUARD)


def _kl(kl: KL, d: Tensor, delta: Tensor) -> Tensor:
    """KL term of each token; d = log pi - log pi_ref, delta = log pi - log pi_old (spec/credit.md 3.7)."""
    if kl == "k2":
        return d**2 / 2
    if kl == "k3":
        return _k3(d)
    if kl == "k3_iw":
        return _exp(delta) * _k3(d)
    if kl == "k3_st":
        return d**2 / 2 + (_k3(d) - d**2 / 2).detach()
    raise ValueError(f"unknown kl {kl!r}; write one of {', '.join(get_args(KL))}")


def _metrics(columns: Mapping[str, Tensor], role: Tensor, roles: Sequence[str]) -> Metrics:
    """(sum, count) of every column, over all entries and per role as `role/name`; maxima as (maximum, 1)."""
    import torch

    names, pairs = [], []
    for prefix, chosen in [("", None), *((f"{name}/", role == k) for k, name in enumerate(roles))]:
        for name, column in columns.items():
            values = (column if chosen is None else column[chosen]).double()
            if name.endswith("_max") and len(values):
                pairs.append(torch.stack((values.max(), values.new_ones(()))))
            else:
                pairs.append(torch.stack((values.sum(), values.new_tensor(float(len(values))))))
            names.append(prefix + name)
    # One transfer from the device for all numbers.
    return {name: (pair[0], pair[1]) for name, pair in zip(names, torch.stack(pairs).tolist())}


def merge(total: MutableMapping[str, tuple[float, float]], new: Mapping[str, tuple[float, float]]) -> None:
    """Adds one micro-batch's metrics to the running ones: sums and counts add up, `_max` takes the larger."""
    for name, (value, count) in new.items():
        have = total.get(name)
        if have is None or (name.endswith("_max") and have[1] == 0):
            total[name] = (value, count)
        elif name.endswith("_max"):
            total[name] = (max(have[0], value), 1.0) if count else have
        else:
            total[name] = (have[0] + value, have[1] + count)


def aggregation_weights(
    units: Sequence[Sequence[int]],
    mode: Aggregate,
    *,
    length_ref: float | None = None,
    turns_ref: float | None = None,
    planned_units: float | None = None,
) -> list[list[float]]:
    """Weight of each token of a turn, from the turn lengths of every unit of the optimiser batch.

    Loss = sum of weight * token loss. Turns and units without trained tokens are in no mean. In const_* the number
    of units is `planned_units`, what was planned before masking (None: all that are given), so that the loss is a
    plain sum over units.
    """
    if mode not in get_args(Aggregate):
        raise ValueError(f"unknown aggregation {mode!r}; write one of {', '.join(get_args(Aggregate))}")
    tokens = [sum(unit) for unit in units]
    turns = [sum(n > 0 for n in unit) for unit in units]
    filled = sum(n > 0 for n in tokens)
    planned = len(units) if planned_units is None else planned_units
    if mode.startswith("const"):
        if not turns_ref or turns_ref <= 0:
            raise ValueError(f"{mode} needs turns_ref > 0, the usual number of turns of a unit")
        if mode == "const_token" and (not length_ref or length_ref <= 0):
            raise ValueError("const_token needs length_ref > 0, the token limit of a turn")

    def denominator(u: int, length: int) -> float:
        if mode == "token_mean":
            return sum(tokens)
        if mode == "turn_mean":
            return length * sum(turns)
        if mode == "episode_token_mean":
            return filled * tokens[u]
        if mode == "episode_turn_mean":
            return filled * turns[u] * length
        if mode == "const_token":
            return planned * (turns_ref or 0) * (length_ref or 0)
        return planned * (turns_ref or 0) * length

    return [[1 / denominator(u, n) if n else 0.0 for n in unit] for u, unit in enumerate(units)]


def balanced(
    weights: Sequence[Sequence[float]], units: Sequence[Sequence[int]], roles: Sequence[str]
) -> list[list[float]]:
    """The same token weights, scaled so that every role holds an equal share of the unchanged total."""
    held: dict[str, float] = {}
    for role, by_turn, lengths in zip(roles, weights, units):
        held[role] = held.get(role, 0.0) + math.fsum(w * n for w, n in zip(by_turn, lengths))
    present = {role: h for role, h in held.items() if h > 0}
    scale = {role: math.fsum(present.values()) / len(present) / h for role, h in present.items()}
    return [[w * scale.get(role, 0.0) for w in by_turn] for role, by_turn in zip(roles, weights)]


class Steps(NamedTuple):
    """What a mini-batch size means: rows there are, rows asked for, steps taken, factor on the loss."""

    rows: int
    minibatch_rows: int
    steps: int
    loss_scale: float


def optimiser_steps(tasks: int, samples_per_task: int, roles: int, ranks: int, mini_batch_tasks: int) -> Steps:
    """Steps per batch when the mini-batch is given in tasks and scaled by roles and samples, as ReMA's script does.

    A mini-batch larger than the data silently scales the loss down; cothink's `updates_per_step` cannot do that.
    """
    rows = tasks * samples_per_task * roles // ranks
    asked = mini_batch_tasks * samples_per_task * roles // ranks
    return Steps(rows, asked, max(1, -(-rows // asked)), min(1.0, rows / asked))
