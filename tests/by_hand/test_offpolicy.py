"""Off-policy correction between the engine's log-probs and the trainer's, by hand (spec/credit.md 3.8)."""

from __future__ import annotations

import math

import pytest
import torch

from cothink.batch import pad, weights_for
from cothink.losses import policy
from cothink.types import Sample

LOG2, LOG3 = math.log(2), math.log(3)


def run(rollout, old, new, advantage, turns=None, mode="token_mean", **options):
    """Loss, gradient and metrics of one row whose first token is the prompt."""
    n = len(old)
    turns = [0] * n if turns is None else turns
    columns = tuple(range(n + 1)), (-1, *turns), (0.0, *old), (0.0, *[advantage] * n)
    row = Sample("p", "r", "e/r", *columns, rollout=(0.0, *rollout))
    batch = pad([row], weights_for([row], mode), dtype=torch.float64)
    logprobs = torch.tensor([[0.0, *new]], dtype=torch.float64, requires_grad=True)
    loss, metrics = policy(logprobs, batch, **options)
    loss.backward()
    return loss.item(), logprobs.grad[0, 1:].tolist(), {k: v / n for k, (v, n) in metrics.items() if n}


# rho = pi_old / pi_rollout of three tokens is 3, 1/3 and 1; A = 1, on-policy after that, so that loss = -mean(c)
OLD, ROLLOUT = [-1.0, -1.0, -1.0], [-1.0 - LOG3, -1.0 + LOG3, -1.0]


@pytest.mark.parametrize(
    ("kind", "factors", "share"),
    [
        ("tis_token", [2, 1 / 3, 1], 1 / 3),
        ("mis_token", [0, 0, 1], 2 / 3),
        ("decoupled", [3, 1 / 3, 1], 0),
        ("tis_turn", [1, 1, 1], 0),  # 3 x 1/3 x 1
        ("mis_turn", [1, 1, 1], 0),
    ],
)
def test_factors_of_one_turn(kind, factors, share):
    """credit §3.8."""
    loss, grad, means = run(ROLLOUT, OLD, OLD, 1.0, offpolicy=kind)
    assert loss == pytest.approx(-sum(factors) / 3)
    assert grad == pytest.approx([-c / 3 for c in factors])  # the factor itself has no gradient
    assert means["offpolicy_fraction"] == pytest.approx(share)


def test_turn_products_and_their_bounds():
    """credit §3.8: two turns with products 4 and 1/4."""
    turns, rollout = [0, 0, 1, 1], [-1 - LOG2] * 2 + [-1 + LOG2] * 2
    old = [-1.0] * 4
    assert run(rollout, old, old, 1.0, turns, offpolicy="tis_turn")[1] == pytest.approx([-0.5, -0.5, -1 / 16, -1 / 16])
    assert run(rollout, old, old, 1.0, turns, offpolicy="mis_turn")[1] == pytest.approx([0, 0, 0, 0])
    wide = {"rho_min": 0.2, "rho_max": 5.0}
    got = run(rollout, old, old, 1.0, turns, offpolicy="mis_turn", **wide)[1]
    assert got == pytest.approx([-1, -1, -1 / 16, -1 / 16])
    geo = run(rollout, old, old, 1.0, turns, "turn_mean", offpolicy="tis_turn", ratio="turn_geo")[1]
    assert geo == pytest.approx([-0.5, -0.5, -1 / 16, -1 / 16])  # the same with one ratio a turn


def test_masked_sequences_only_where_they_drift_and_failed():
    """credit §3.8: a drift of ln 2 a token from the engine's to the new log-probs."""
    rollout, new = [-1.0, -1.0], [-1.0 - LOG2] * 2
    for advantage, limit, kept in ((-1.0, 0.5, 0), (-1.0, 0.7, 1), (1.0, 0.5, 1)):
        _, grad, means = run(
            rollout, rollout, new, advantage, offpolicy="opsm_turn", drift_max=limit, clip="none"
        )  # fmt: skip
        assert grad == pytest.approx([-advantage * 0.5 * 0.5 * kept] * 2)
        assert means["offpolicy_fraction"] == 1 - kept


def test_the_reference_term_is_not_corrected():
    """credit §2: the factor stands at the clipped term alone."""
    row = Sample("p", "r", "e/r", (1, 2), (-1, 0), (0.0, -1.0), (0.0, 0.0), rollout=(0.0, -9.0))
    batch = pad([row], weights_for([row], "token_mean"), dtype=torch.float64)
    batch.ref_logprobs = torch.tensor([[0.0, -1.5]], dtype=torch.float64)
    loss, _ = policy(
        torch.tensor([[0.0, -1.0]], dtype=torch.float64), batch, kl="k2", kl_beta=1.0, offpolicy="mis_token"
    )
    assert loss.item() == pytest.approx(0.125)


def test_without_the_engines_numbers_there_is_nothing_to_correct():
    """credit §4 E14."""
    row = Sample("p", "r", "e/r", (1, 2), (-1, 0), (0.0, -1.0), (0.0, 1.0))
    batch = pad([row], weights_for([row], "token_mean"))
    assert batch.rollout is None
    with pytest.raises(ValueError, match=r"needs batch\.rollout"):
        policy(torch.zeros(1, 2), batch, offpolicy="tis_token")
    with pytest.raises(ValueError, match="unknown offpolicy 'tis'"):
        run(OLD, OLD, OLD, 1.0, offpolicy="tis")


@pytest.mark.parametrize("kind", ["tis_token", "mis_turn", "opsm_turn", "decoupled"])
def test_nothing_to_train_stays_finite(kind):
    row = Sample("p", "r", "e/r", (1, 2), (-1, -1), (0.0, 0.0), (0.0, 0.0), rollout=(0.0, 0.0))
    batch = pad([row], weights_for([row], "token_mean"))
    loss, metrics = policy(torch.zeros(1, 2, requires_grad=True), batch, offpolicy=kind)
    assert loss.item() == 0 and all(math.isfinite(x) for pair in metrics.values() for x in pair)
