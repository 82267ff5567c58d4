"""Two roles on one policy: every mini-batch holds both, shuffled, and `role_balance` gives each half of the loss."""

from __future__ import annotations

from itertools import pairwise

import pytest

from cothink.batch import minibatches, weights_for
from cothink.types import Sample

MODES = ["token_mean", "turn_mean", "episode_token_mean", "episode_turn_mean", "const_turn"]


def rows(plays=32):
    """One row per role and play, as ReMA's shared policy gets them: meta's are short, reasoning's long."""
    found = []
    for k in range(plays):
        for role, n in (("meta", 2 + k % 3), ("reasoning", 9 + k % 5)):
            turns = (-1,) + (0,) * n
            found.append(Sample("p", role, f"e{k}/{role}", (1,) * (n + 1), turns, (0.0,) * (n + 1), (1.0,) * (n + 1)))
    return found


def test_roles_are_shuffled_inside_every_mini_batch():
    """rema §7 row 21, §4.3: 2 B n rows in one update; no mini-batch is a block of one role, or two blocks."""
    samples = rows()
    assert len(minibatches(samples, 1)[0]) == 2 * 32
    for part in minibatches(samples, 4, seed=1):
        roles = [s.role for s in part]
        assert roles.count("meta") == roles.count("reasoning") == 8
        changes = sum(a != b for a, b in pairwise(roles))
        assert 3 < changes < 15  # a block each would change once, strict turns 15 times


@pytest.mark.parametrize("mode", MODES)
def test_each_role_holds_a_constant_share_of_the_loss(mode):
    """rema §4.3: a fixed share of the loss for each role, in each mini-batch, however much one of them talks."""
    refs = {"turns_ref": 1.0, "planned_units": 16} if mode == "const_turn" else {}
    for part in minibatches(rows(), 4, seed=2):
        for balance, constant in (("equal", True), ("none", mode != "token_mean")):
            weights = weights_for(part, mode, role_balance=balance, **refs)
            share = dict.fromkeys(("meta", "reasoning"), 0.0)
            for sample, by_token in zip(part, weights):
                share[sample.role] += sum(by_token)
            assert sum(share.values()) == pytest.approx(1)
            assert (share["meta"] == pytest.approx(0.5)) == constant, (mode, balance)
