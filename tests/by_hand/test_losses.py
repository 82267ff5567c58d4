"""The policy loss against numbers worked by hand (spec/rema.md 4.6) and its laws (spec/credit.md 9)."""

import math
from collections.abc import Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cothink.batch import Batch, pad, weights_for
from cothink.losses import aggregation_weights, balanced, merge, policy
from cothink.types import Sample

# V-A: two rows of eight tokens, `None` = not trained.
TURNS = [[-1, 0, 0, 0, -1, 1, 1, -1], [-1, -1, 0, 0, -1, -1, -1, -1]]
NEW = [[0, 0.3, -0.3, 0.15, 0, 0.5, 0.1, 0], [0, 0, 2, 1, 0, 0, 0, 0]]
PAPER = {"clip": "ppo", "low": 0.2, "high": 0.2, "dual_clip": 3.0, "log_ratio_max": 3.0}
RATIOS = ["token", "turn_geo", "turn_arith", "episode_geo"]
CLIPS = ["ppo", "clip_higher", "gspo", "cispo", "sapo", "none"]


def make(turns, advantages, old=None, roles: Sequence[str] | None = None, mode="episode_turn_mean", **refs) -> Batch:
    """A float64 batch; `advantages` holds one number per row."""
    samples = [
        Sample(
            "p",
            roles[i] if roles else "r",
            f"e{i}/{roles[i] if roles else 'r'}",
            tuple(range(len(row))),
            tuple(row),
            tuple(old[i] if old else [0.0] * len(row)),
            tuple(float(a) if t >= 0 else 0.0 for t in row),
        )
        for i, (row, a) in enumerate(zip(turns, advantages))
    ]
    return pad(samples, weights_for(samples, mode, **refs), dtype=torch.float64)


def run(batch, new, **options):
    logprobs = torch.tensor(new, dtype=torch.float64, requires_grad=True)
    loss, metrics = policy(logprobs, batch, **options)
    loss.backward()
    return loss.item(), logprobs.grad, {k: v / n for k, (v, n) in metrics.items() if n}


@pytest.mark.parametrize(
    ("ratio", "mode", "loss", "clipped", "lower"),
    [
        ("token", "token_mean", -0.364098, 0.285714, 0.142857),
        ("token", "episode_token_mean", 0.174003, 0.285714, 0.142857),
        ("token", "turn_mean", -0.252411, 0.285714, 0.142857),
        ("turn_geo", "episode_turn_mean", 0.187182, 0.333333, 0.333333),
        ("turn_geo", "turn_mean", -0.250424, 0.333333, 0.333333),
        ("turn_arith", "episode_turn_mean", 0.178957, 0.333333, 0.333333),
        ("turn_arith", "turn_mean", -0.261390, 0.333333, 0.333333),
    ],
)
def test_va_losses(ratio, mode, loss, clipped, lower):
    """rema §7 row 25."""
    got, _, means = run(make(TURNS, [1, -0.5], mode=mode), NEW, ratio=ratio, **PAPER)
    assert got == pytest.approx(loss, abs=1e-5)
    assert means["clip_fraction"] == pytest.approx(clipped, abs=1e-5)
    assert means["dual_clip_fraction"] == pytest.approx(lower, abs=1e-5)
    assert means["kl_approx"] == pytest.approx(-0.535714, abs=1e-5)


@pytest.mark.parametrize(
    ("ratio", "first_turn"),
    [("turn_geo", [-0.087606] * 3), ("turn_arith", [-0.112488, -0.061735, -0.096820])],
)
def test_va_gradients(ratio, first_turn):
    """rema §7 row 25."""
    _, grad, _ = run(make(TURNS, [1, -0.5]), NEW, ratio=ratio, **PAPER)
    want = torch.zeros(2, 8, dtype=torch.float64)
    want[0, 1:4] = torch.tensor(first_turn)
    assert torch.allclose(grad, want, atol=1e-5)


@pytest.mark.parametrize(
    ("ratio", "want"),
    [("turn_geo", [1.051271, 1.349859, 4.481689]), ("turn_arith", [1.084170, 1.376946, 5.053669])],
)
def test_va_turn_ratios(ratio, want):
    """rema §7 row 25."""
    alone = [[[t if t == k else -1 for t in row]] for row, k in ((TURNS[0], 0), (TURNS[0], 1), (TURNS[1], 0))]
    values = [
        run(make(row, [-1]), [new], ratio=ratio, clip="none", log_ratio_max=3.0)[2]["ratio_max"]
        for row, new in zip(alone, (NEW[0], NEW[0], NEW[1]))
    ]
    assert values == pytest.approx(want, abs=1e-5)


@pytest.mark.parametrize(
    ("advantage", "want"),
    [(1, [-0.5, -0.9, -1.1, -1.2, -1.2, -1.2]), (-1, [0.8, 0.9, 1.1, 1.25, 1.5, 3])],
)
def test_elementary_loss(advantage, want):
    """rema §7 row 27."""
    got = [run(make([[-1, 0]], [advantage]), [[0, math.log(r)]], **PAPER)[0] for r in (0.5, 0.9, 1.1, 1.25, 1.5, 4)]
    assert got == pytest.approx(want, abs=1e-9)


def spent(units, token_losses, mode, **refs):
    weights = aggregation_weights(units, mode, **refs)
    return sum(w * n * x for ws, ns, xs in zip(weights, units, token_losses) for w, n, x in zip(ws, ns, xs))


def test_aggregation_table():
    """rema §7 row 26; credit §3.6."""
    units, token_losses = [[4], [2, 2, 4]], [[1], [2, 2, 2]]
    want = {"token_mean": 5 / 3, "episode_token_mean": 1.5, "turn_mean": 1.75, "episode_turn_mean": 1.5}
    assert {m: spent(units, token_losses, m) for m in want} == pytest.approx(want)
    assert spent(units, token_losses, "const_token", length_ref=4, turns_ref=5) == pytest.approx(0.5)
    assert spent(units, token_losses, "const_turn", turns_ref=5) == pytest.approx(0.7)
    units, token_losses = [[4], [2, 6]], [[1], [3, 1]]
    want = {"token_mean": 4 / 3, "episode_token_mean": 1.25, "episode_turn_mean": 1.5, "turn_mean": 5 / 3}
    assert {m: spent(units, token_losses, m) for m in want} == pytest.approx(want)


def test_empty_turns_and_units_are_in_no_mean_but_planned_units_are_constant():
    """rema §7 row 28."""
    full = aggregation_weights([[4], [2, 2]], "episode_turn_mean")
    assert aggregation_weights([[4], [], [0], [2, 0, 2]], "episode_turn_mean") == [
        full[0], [], [0.0], [full[1][0], 0.0, full[1][1]],
    ]  # fmt: skip
    (one,), (planned,) = (aggregation_weights([[4]], "const_turn", turns_ref=2, planned_units=n) for n in (None, 8))
    assert planned[0] == one[0] / 8
    with pytest.raises(ValueError, match="turns_ref"):
        aggregation_weights([[4]], "const_turn")
    with pytest.raises(ValueError, match="length_ref"):
        aggregation_weights([[4]], "const_token", turns_ref=1)
    with pytest.raises(ValueError, match="turn_mean"):
        aggregation_weights([[4]], "mean")  # type: ignore[arg-type]


def test_roles_can_be_balanced():
    """credit §3.11."""
    units, roles = [[2], [2, 2, 2]], ["meta", "solver"]
    weights = balanced(aggregation_weights(units, "turn_mean"), units, roles)
    assert [sum(w * n for w, n in zip(ws, ns)) for ws, ns in zip(weights, units)] == pytest.approx([0.5, 0.5])
    assert balanced([[0.0], [0.25]], [[2], [4]], roles) == [[0.0], [0.25]]


def test_log_ratio_of_800_stays_finite_and_none_is_accepted():
    """rema §7 row 27."""
    for ceiling in (3.0, 20.0, None):
        for ratio in RATIOS:
            for clip in CLIPS:
                for sign in (1, -1):
                    loss, grad, means = run(
                        make([[-1, 0, 0]], [-1]), [[0, 800.0 * sign, 0]],
                        ratio=ratio, clip=clip, dual_clip=None, log_ratio_max=ceiling,
                    )  # fmt: skip
                    assert math.isfinite(loss) and torch.isfinite(grad).all(), (ratio, clip, ceiling)
                    assert all(map(math.isfinite, means.values()))
    loss, grad, means = run(make([[-1, 0]], [-1]), [[0, 800.0]], **PAPER)
    assert (loss, grad.abs().sum(), means["log_ratio_clamp_fraction"]) == (3.0, 0.0, 1.0)


def test_kl_values_gradients_and_errors():
    """rema §7 row 29; credit §9 row 11."""
    batch = make([[-1, 0, 1]], [0], mode="turn_mean")
    batch.ref_logprobs = torch.tensor([[0, -1.5, -1.8]], dtype=torch.float64)
    loss, grad, means = run(batch, [[0.0, -1, -2]], kl="k3", kl_beta=0.5)
    assert loss == pytest.approx(0.25 * (0.106531 + 0.021403), abs=1e-6)
    assert grad[0, 1:].tolist() == pytest.approx([0.25 * 0.393469, -0.25 * 0.221403], abs=1e-6)
    assert means["kl_ref_abs"] == pytest.approx(0.35) and means["kl_ref_k1"] == pytest.approx(0.15)
    # d k3 / d log pi keeps the sign of d or is 0, also where the exponent is guarded
    batch.ref_logprobs = torch.tensor([[0, -1.5, -1.8]], dtype=torch.float64) * 400
    for kl in ("k2", "k3", "k3_iw", "k3_st"):
        loss, grad, _ = run(batch, [[0.0, -1, -2000]], kl=kl, kl_beta=1.0)
        assert loss >= 0 and math.isfinite(loss) and torch.isfinite(grad).all()
        assert kl == "k3_iw" or (grad[0, 1] > 0 and grad[0, 2] <= 0)
    batch.ref_logprobs = None
    with pytest.raises(ValueError, match="ref_logprobs"):
        run(batch, [[0.0, -1, -2]], kl="k3", kl_beta=0.1)
    with pytest.raises(ValueError, match="no effect"):
        run(batch, [[0.0, -1, -2]], kl_beta=0.1)


def test_entropy_is_subtracted_with_the_same_weights():
    """rema §7 row 29; credit §3.13."""
    batch = make([[-1, 0, 0]], [0])
    logits = torch.tensor([1.0, 2.0], dtype=torch.float64, requires_grad=True)
    batch.entropy = torch.cat((torch.zeros(1, dtype=torch.float64), logits)).unsqueeze(0)
    loss, metrics = policy(torch.zeros(1, 3, dtype=torch.float64), batch, entropy=0.1)
    loss.backward()
    assert loss.item() == pytest.approx(-0.15) and logits.grad.tolist() == pytest.approx([-0.05, -0.05])
    assert metrics["entropy"] == (3.0, 2.0)
    batch.entropy = None
    with pytest.raises(ValueError, match="entropy"):
        policy(torch.zeros(1, 3, dtype=torch.float64), batch, entropy=0.1)


def test_low_and_high_mean_nothing_without_a_clip():
    with pytest.raises(ValueError, match="no effect"):
        run(make([[-1, 0]], [1]), [[0, 0.0]], clip="sapo", high=0.2)
    for bad in ({"clip": "clip_lower"}, {"ratio": "sentence"}, {"kl": "k1"}):
        batch = make([[-1, 0]], [1])
        batch.ref_logprobs = torch.zeros(1, 2)
        with pytest.raises(ValueError, match="unknown"):
            run(batch, [[0, 0.0]], **bad)


def test_metrics_are_sums_per_role_that_merge():
    batch = make([[-1, 0, 0], [-1, 0, -1]], [1, -1], roles=["meta", "solver"])
    _, metrics = policy(torch.tensor([[0, 0.5, 0.0], [0, 0.1, 0]], dtype=torch.float64), batch)
    assert metrics["clip_fraction"] == (1.0, 3.0)
    assert metrics["meta/clip_fraction"] == (1.0, 2.0) and metrics["solver/clip_fraction"] == (0.0, 1.0)
    assert metrics["solver/ratio_max"] == pytest.approx((math.exp(0.1), 1.0))
    total: dict[str, tuple[float, float]] = {}
    merge(total, metrics)
    merge(total, metrics)
    assert total["clip_fraction"] == (2.0, 6.0) and total["ratio_max"] == pytest.approx((math.exp(0.5), 1.0))


def test_nothing_to_train_gives_zero_and_zero_gradient():
    """credit §9 row 12."""
    for rows in ([[-1, -1]], [[-1, 0], [-1, -1]]):
        for ratio in RATIOS:
            batch = make(rows, [1] * len(rows))
            new = torch.full((len(rows), 2), float("nan"), dtype=torch.float64)
            new[batch.turns >= 0] = 0.0
            new.requires_grad_(True)
            loss, metrics = policy(new, batch, ratio=ratio, clip="ppo")
            loss.backward()
            assert math.isfinite(loss.item()) and torch.isfinite(new.grad).all()
            assert new.grad[batch.turns < 0].abs().sum() == 0
            assert all(math.isfinite(x) for pair in metrics.values() for x in pair)


moves = st.lists(st.floats(-1.5, 1.5, allow_nan=False, width=32), min_size=6, max_size=6)


@settings(max_examples=25, deadline=None, derandomize=True)
@given(moves, st.sampled_from(RATIOS), st.floats(-2, 2))
def test_laws_of_the_clip(d, ratio, advantage):
    """credit §9 rows 6 and 10."""
    batch = make([[-1, 0, 0, 1, 1, 1, 1]], [advantage])
    row = [[0.0, *d]]
    loose = run(batch, row, ratio=ratio, clip="none")[0]
    tight = run(batch, row, ratio=ratio, clip="ppo", dual_clip=None)[0]
    dual = run(batch, row, ratio=ratio, clip="ppo", dual_clip=3.0)[0]
    assert tight >= loose - 1e-12  # a clip never increases the objective
    assert dual <= tight + 1e-12  # the dual clip never increases the loss
    geo, arith = (run(batch, row, ratio=r, clip="none")[0] for r in ("turn_geo", "turn_arith"))
    assert advantage * (geo - arith) >= -1e-9 * (1 + abs(geo))  # loss = -A r: the arithmetic ratio is the larger one


@settings(max_examples=20, deadline=None, derandomize=True)
@given(moves)
def test_at_the_old_policy_every_ratio_and_clip_agree(logps):
    """credit §9 row 7."""
    batch = make([[-1, 0, 0, 1, 1, 1, 1], [-1, 0, -1, -1, -1, -1, -1]], [0.7, -1.3], old=[[0, *logps]] * 2)
    want = -(batch.weights * batch.advantages)
    for ratio in RATIOS[:3]:
        for clip in CLIPS:
            loss, grad, means = run(batch, [[0, *logps]] * 2, ratio=ratio, clip=clip)
            assert torch.allclose(grad, want, atol=1e-12), (ratio, clip)
            assert means["clip_fraction"] == 0 and means["kl_update"] == 0
            if clip not in ("sapo", "cispo"):
                assert loss == pytest.approx(want.sum().item())


def test_const_modes_are_sums_of_single_episode_gradients():
    """credit §9 row 8."""
    turns, advantages = [[-1, 0, 0, 1], [-1, 0, -1, -1]], [1.0, -2.0]
    new = [[0, 0.1, -0.2, 0.05], [0, 0.02, 0, 0]]
    for mode, adds_up in [("const_turn", True), ("const_token", True), ("turn_mean", False), ("token_mean", False)]:
        refs = {"turns_ref": 2, "length_ref": 3, "planned_units": 2} if mode.startswith("const") else {}
        _, whole, _ = run(make(turns, advantages, mode=mode, **refs), new)
        parts = [run(make([turns[i]], [advantages[i]], mode=mode, **refs), [new[i]])[1] for i in (0, 1)]
        assert torch.allclose(whole, torch.cat(parts), atol=1e-12) is adds_up


def test_turn_arith_equals_turn_geo_iff_all_tokens_moved_alike():
    """credit §9 row 6."""
    batch = make([[-1, 0, 0]], [-1])
    same, apart = [[0, 0.3, 0.3]], [[0, 0.1, 0.5]]
    values = [[run(batch, d, ratio=r, clip="none")[0] for r in ("turn_geo", "turn_arith")] for d in (same, apart)]
    assert values[0][0] == pytest.approx(values[0][1]) and values[1][1] > values[1][0] + 1e-3
