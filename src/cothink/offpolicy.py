"""What weighs a token that other numerics, or older weights, have sampled. Torch is imported only inside functions."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, get_args

if TYPE_CHECKING:
    from torch import Tensor

OffPolicy = Literal["none", "tis_token", "mis_token", "tis_turn", "mis_turn", "opsm_turn", "decoupled"]

RANGE = (0.5, 2.0)
"""The band of rho in which mis_* keeps a token or turn; tis_* cuts rho at its upper end (engine-mismatch practice)."""
DRIFT = 0.5
"""Nats per token by which opsm_turn lets a turn of negative advantage drift; the original's number is not public."""
GUARD = 20.0


def factor(
    kind: OffPolicy,
    new: Tensor,
    old: Tensor,
    rollout: Tensor,
    advantage: Tensor,
    place: Tensor,
    *,
    rho_min: float,
    rho_max: float,
    drift_max: float,
) -> tuple[Tensor, Tensor]:
    """Detached factor on each token's policy loss, and whether it was cut or dropped (spec/credit.md 3.8).

    All tensors have one entry per trained token; `place` numbers its turn. With rho = pi_old / pi_rollout, of a token
    or multiplied over its turn: tis_* min(rho, rho_max); mis_* rho inside [rho_min, rho_max], else 0; decoupled rho;
    opsm_turn 0 where the turn's advantage is negative and its mean log(pi_rollout / pi_new) exceeds drift_max, else 1.
    """
    import torch

    if kind == "none" or kind not in get_args(OffPolicy):
        raise ValueError(f"unknown offpolicy {kind!r}; write one of {', '.join(get_args(OffPolicy))}")
    with torch.no_grad():

        def total(values: Tensor) -> Tensor:
            """Sum over the token's turn, one entry per token."""
            count = int(place.max()) + 1 if len(place) else 0
            return values.new_zeros(count).index_add(0, place, values)[place]

        if kind == "opsm_turn":
            length = total(torch.ones_like(new))
            drop = (total(advantage) < 0) & (total(rollout - new) / length > drift_max)
            return (~drop).to(new.dtype), drop
        log_rho = old - rollout
        rho = (total(log_rho) if kind.endswith("_turn") else log_rho).clamp(-GUARD, GUARD).exp()
        if kind == "decoupled":
            return rho, torch.zeros_like(rho, dtype=torch.bool)
        if kind.startswith("tis"):
            return rho.clamp(max=rho_max), rho > rho_max
        out = (rho < rho_min) | (rho > rho_max)
        return torch.where(out, 0.0, rho), out


def ess_fraction(mean: float, mean_square: float) -> float:
    """Effective sample size as a share of the samples, (sum w)^2 / (n sum w^2), from the means of w and w^2."""
    return mean * mean / mean_square if mean_square else 0.0
