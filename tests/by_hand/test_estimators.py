"""Advantages against numbers worked by hand and the laws every estimator keeps (spec/credit.md 3.2, 3.3, 9)."""

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cothink import estimators
from cothink.estimators import dr_grpo, gdpo, group_metrics, grpo, net_push, opo, rae, rfpp, rfpp_baseline, rloo
from cothink.types import ScoredTurn

MEAN_BASED = {"grpo": grpo, "dr_grpo": dr_grpo, "rloo": rloo}
GROUPED = {**MEAN_BASED, "opo": opo, "rfpp_baseline": rfpp_baseline}


def scored(*entries):
    """Turns from (task, episode, role, value) or (..., index, tokens)."""
    full = [(*e, *(0, 1)[len(e) - 4 :]) for e in entries]
    return [ScoredTurn(t, e, r, "p", i, float(v), n) for t, e, r, v, i, n in full]


def group(*values):
    return scored(*(("t", f"e{i}", "r", v) for i, v in enumerate(values)))


@pytest.mark.parametrize(
    ("values", "want"),
    [
        ([1, 0, 0], [1.154699, -0.577349, -0.577349]),
        ([1, 0, 0, 0], [1.499997, -0.499999, -0.499999, -0.499999]),
        ([1, 1, 0, 0], [0.866024, 0.866024, -0.866024, -0.866024]),
        ([1], [0]),
        ([1, 1, 1], [0, 0, 0]),
        ([], []),
    ],
)
def test_grpo_by_hand(values, want):
    """rema §7 row 22."""
    assert grpo(group(*values)) == pytest.approx(want, abs=2e-6)


def test_others_by_hand():
    """rema §7 row 24."""
    assert rloo(group(1, 0, 0)) == pytest.approx([1, -0.5, -0.5])
    assert dr_grpo(group(1, 0, 0)) == pytest.approx([2 / 3, -1 / 3, -1 / 3])
    assert opo(scored(("t", "a", "r", 1, 0, 3), ("t", "b", "r", 0, 0, 1))) == pytest.approx([0.25, -0.75])
    (failure,) = {a for a in grpo(group(*[1] * 15, 0)) if a < 0}
    assert failure == pytest.approx(-3.75, abs=1e-4)


def test_reinforce_pp_token_returns_by_hand():
    turns = scored(("t", "a", "r", 1, 0, 3), ("t", "a", "r", 0.5, 1, 2))
    out = rfpp(turns, gamma_token=0.9)
    assert out[0] + out[1] == pytest.approx([0.318779, 0.686601, 1.095293, -1.152509, -0.948164], abs=1e-6)


def test_whitening_stays_within_a_role_unless_asked_otherwise():
    turns = scored(("t", "a", "meta", 10), ("t", "b", "meta", 12), ("t", "a", "solver", 0), ("t", "b", "solver", 1))
    assert [x for (x,) in rfpp(turns)] == pytest.approx([-0.707107, 0.707107] * 2, abs=1e-6)
    assert rfpp(turns, whiten_scope="batch")[0][0] > 0.5


def test_leaving_the_turn_out_keeps_its_twins_in_the_baseline():
    """credit §3.3."""
    turns = scored(
        *(("t", e, "r", v, i) for e, v, i in [("a", 1, 0), ("a", 1, 1), ("b", 0, 0)]),
    )
    assert rloo(turns) == [1, 1, -1]
    assert rloo(turns, leave_out="turn") == pytest.approx([0.5, 0.5, -1])
    assert rloo(scored(("t", "a", "r", 1, 0), ("t", "a", "r", 0, 1))) == [0, 0]


def test_siblings_of_one_episode_are_compared_in_scope_prefix():
    turns = [ScoredTurn("t", "e", "r", "p", 0, v, 1, prefix="e:0>r") for v in (5 / 9, 2 / 9, 5 / 9)]
    assert dr_grpo(turns, scope="prefix") == pytest.approx([1 / 9, -2 / 9, 1 / 9])
    assert rloo(turns, scope="prefix") == pytest.approx([1 / 6, -1 / 3, 1 / 6])


def test_episode_weighting_leaves_no_push_where_the_loss_weighs_episodes():
    turns = scored(*(("t", e, "r", v, i) for e, v, i in [("a", 1, 0), ("a", 1, 1), ("a", 1, 2), ("b", 0, 0)]))
    weights = [1 / 6, 1 / 6, 1 / 6, 1 / 2]
    for weighting, zero in (("episode", True), ("turn", False)):
        push = net_push([t.role for t in turns], weights, dr_grpo(turns, weighting=weighting))["r"]
        assert (abs(push["signed"]) < 1e-12) is zero


def test_small_groups_borrow_the_std_of_their_task():
    """credit §3.3."""
    meta = [("t", f"e{i}", "meta", v) for i, v in enumerate([1, 0, 0, 0])]
    turns = scored(*meta, ("t", "e0", "rescue", 1), ("t", "e1", "rescue", 0))
    own, borrowed = grpo(turns, min_members_for_std=2)[-1], grpo(turns)[-1]
    assert own == pytest.approx(-0.707107, abs=1e-5)
    assert borrowed == pytest.approx(-0.5 / (math.sqrt(4 / 3 / 5) + 1e-6))


def test_running_average_starts_at_the_first_batch_and_survives():
    state: dict[str, float] = {}
    assert rae(group(1, 0, 1, 0), state) == pytest.approx([0.5, -0.525, 0.50125, -0.5238125])
    assert rae(group(1), state) == pytest.approx([1 - 0.497621875], abs=1e-6)
    assert rae(scored(("t", "e", "r", 1, 0), ("t", "e", "r", 1, 1)), {"r": 0.0}) == [1, 1]  # one update an episode


def test_gdpo_normalises_every_reward_alone_and_wants_all_weights():
    turns = [
        ScoredTurn("t", f"e{i}", "r", "p", 0, 0.0, 1, components=c)
        for i, c in enumerate([{"a": 1.0}, {"a": 0.0}, {"a": 1.0, "f": 1.0}, {"a": 0.0, "f": 0.0}])
    ]
    assert gdpo(turns, weights={"a": 1, "f": 0.1}) == pytest.approx([0.866, -0.866, 0.937, -0.937], abs=1e-3)
    with pytest.raises(ValueError, match="'f'"):
        gdpo(turns, weights={"a": 1})


def test_share_of_turns_that_teach_nothing():
    turns = scored(*((t, f"e{i}", "r", v) for i, (t, v) in enumerate(["a1", "b1", "b1", "c0", "c1"])))
    assert group_metrics(turns) == pytest.approx(
        {"singleton_share": 0.2, "degenerate_share": 0.4, "group_std": 0.5 / 3}
    )
    assert group_metrics([]) == {"singleton_share": 0, "degenerate_share": 0, "group_std": 0}


def test_bad_scopes_name_the_good_ones():
    with pytest.raises(ValueError, match="role_turn"):
        rloo(group(1, 0), scope="roles")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="no anchor"):
        rloo(group(1, 0), scope="anchor")


values = st.integers(-3, 3).map(lambda k: k / 2)
batches = st.lists(st.tuples(st.sampled_from("ab"), st.sampled_from(["m", "s"]), values), min_size=1, max_size=12)


def numbers(out):
    return [x[0] if isinstance(x, list) else x for x in out]


@settings(max_examples=40, deadline=None, derandomize=True)
@given(batches, st.randoms(use_true_random=False))
def test_laws_with_one_turn_per_episode(rows, rng):
    """credit §9 rows 1, 2 and 4."""
    turns = scored(*((t, f"e{i}", r, v) for i, (t, r, v) in enumerate(rows)))
    order = rng.sample(range(len(turns)), len(turns))
    for name, estimator in {**GROUPED, "rfpp": rfpp}.items():
        out = numbers(estimator(turns))
        assert numbers(estimator([turns[i] for i in order])) == [out[i] for i in order], name
        swap = {"m": "s", "s": "m", "a": "b", "b": "a"}
        other = scored(*((swap[t.task], t.episode, swap[t.role], t.value) for t in turns))
        assert numbers(estimator(other)) == pytest.approx(out, abs=1e-12), name
    for name, estimator in GROUPED.items():
        shifted = scored(*((t.task, t.episode, t.role, t.value + 5) for t in turns))
        assert numbers(estimator(shifted)) == pytest.approx(numbers(estimator(turns)), abs=1e-6), name
    for name, estimator in MEAN_BASED.items():
        sums: dict[tuple[str, str], float] = {}
        for t, a in zip(turns, estimator(turns)):
            sums[t.task, t.role] = sums.get((t.task, t.role), 0.0) + a
        assert all(abs(s) < 1e-9 for s in sums.values()), name


@settings(max_examples=20, deadline=None, derandomize=True)
@given(batches)
def test_doubled_episodes_at_half_weight_change_nothing(rows):
    """credit §9 row 5."""
    turns = scored(*((t, f"e{i}", r, v) for i, (t, r, v) in enumerate(rows)))
    twice = turns + scored(*((t.task, f"{t.episode}x", t.role, t.value) for t in turns))
    assert dr_grpo(twice)[: len(turns)] == pytest.approx(dr_grpo(turns), abs=1e-12)


def test_keyword_parameters_are_the_options():
    for name in ("grpo", "dr_grpo", "rloo", "opo", "rfpp", "rfpp_baseline", "gdpo", "rae"):
        function = getattr(estimators, name)
        assert function.__kwdefaults__ is not None and function.__doc__
