"""Credit by counterfactuals: the solo arm, siblings of a tree (spec/credit.md 3.1, 6.6 to 6.8)."""

from __future__ import annotations

import pytest
from test_credit import play, rounds, tree, turn

from cothink import counterfactual as cf
from cothink.counterfactual import advantages, guide_bonus, sibling_credit, with_bonus
from cothink.credit import turn_returns
from cothink.estimators import dr_grpo, rloo
from cothink.types import TRUNCATED


@pytest.mark.parametrize(
    ("joint", "solo", "event", "continuous"),
    [(1, -0.5, 1, 0.75), (-1, 0.5, -1, -0.75), (1, 0.5, 0, 0.25), (-1, -0.5, 0, -0.25), (1, 0, 0, 0.5)],
)
def test_a_guides_bonus(joint, solo, event, continuous):
    """credit §6.6: a solo mean of exactly 0 gives no bonus."""
    assert (guide_bonus(joint, solo), guide_bonus(joint, solo, "continuous")) == (event, continuous)


def test_the_bonus_reaches_the_guide_alone():
    """credit §3.1 ccpo_solo: .1 on rewards of 0 and 1 is the paper's .2 on outcomes of -1 and 1."""
    right = play(rounds(2), [("r1", "answer", 1.0)], "e0", "a", accuracy=1.0)
    wrong = play(rounds(1), [("r0", "answer", 0.0)], "e1", "b", accuracy=0.0)
    got = with_bonus([right, wrong], {"a": 0.25, "b": 0.75}, "meta", 0.1)
    assert turn_returns(got[0]) == {"m0": 1.1, "m1": 1.1, "r0": 1.0, "r1": 1.0}
    assert turn_returns(got[1]) == {"m0": -0.1, "r0": 0.0}
    assert with_bonus([right], {"b": 0.0}, "meta", 0.1) == [right]
    (half,) = with_bonus([right], {"a": 0.25}, "meta", 0.1, "continuous")  # .1 * (1 - -.5) / 2
    assert turn_returns(half)["m0"] == pytest.approx(1.075) and half.rewards[-1].name == cf.SOLO


# values: generators 1/2 and 1/4; verifiers 1, 0 under the first, 1/2, 0 under the second
SHAPE = [[[1, 1], [0, 0]], [[1, 0], [0, 0]]]
LOCAL = {
    "0": 1 / 4, "1": -1 / 4, "00": 1, "01": -1, "10": 1 / 2, "11": -1 / 2, "000": 0, "001": 0,
    "010": 0, "011": 0, "100": 1, "101": -1, "110": 0, "111": 0,
}  # fmt: skip


def grown(shape, name="e"):
    turns, own = tree(shape)
    return play(turns, [(k, "answer", float(v)) for k, v in own.items()], name)


def test_where_every_turn_has_siblings_suffix_and_local_are_the_prefix_tree():
    """credit §6.7: also what rloo with scope prefix gives."""
    episode = grown(SHAPE)
    assert sibling_credit(episode, "c3_local") == pytest.approx(LOCAL)
    assert sibling_credit(episode, "c3_suffix") == pytest.approx(LOCAL)
    turns, values = advantages([episode], "c3_local", 1.0, dr_grpo)
    again = rloo(turns, scope="prefix")
    assert values == pytest.approx(again)


def test_what_follows_a_branch_takes_its_advantage_over():
    """credit §3.1: one prefix, three continuations of a reasoner, each followed by a meta and a reasoner turn."""
    turns = [turn("m0")]
    for k in range(3):
        turns += [turn(f"r{k}", ["m0"], "reasoning"), turn(f"m{k}x", [f"r{k}"]), turn(f"z{k}", [f"m{k}x"], "reasoning")]
    rewards = [("z0", "answer", 1.0), ("z1", "answer", 1.0), ("z2", "answer", 0.0), ("m0", "leak", -5.0, "meta")]
    episode = play(turns, rewards)
    branch = {"r0": 0.5, "r1": 0.5, "r2": -1.0}
    assert sibling_credit(episode, "c3_local") == branch
    after = {f"{t}{k}{x}": branch[f"r{k}"] for k in range(3) for t, x in (("m", "x"), ("z", ""))}
    assert sibling_credit(episode, "c3_suffix") == {**branch, **after}
    assert sibling_credit(episode, "vine") == pytest.approx({"r0": 1 / 3, "r1": 1 / 3, "r2": -2 / 3})


def test_values_follow_the_rewards_a_role_may_see():
    turns = [turn("a"), turn("b"), turn("x", ["a"], "reasoning"), turn("y", ["b"], "reasoning")]
    rewards = [("x", "answer", 1.0), ("y", "answer", 1.0), ("y", "style", 4.0, "reasoning"), ("a", "own", 0.5, "turn")]
    assert sibling_credit(play(turns, rewards), "c3_suffix") == {"a": 0.5, "b": -0.5, "x": -4.0, "y": 4.0}
    cut = [turn("a"), turn("b"), turn("x", ["a"], "reasoning", tokens=0, text=""), turn("y", ["b"], "reasoning")]
    got = sibling_credit(play(cut, [("x", "answer", 0.0), ("y", "answer", 1.0)], reason=TRUNCATED), "c3_suffix")
    assert got == {"a": -1.0, "b": 1.0, "y": 1.0}  # the placeholder is graded, never trained


def test_the_advantages_of_a_line_add_up_to_its_reward_minus_the_value_of_the_start():
    """credit §6.8: with gamma 1 sum of A = R - V(s_0), here V = 3/8."""
    got = sibling_credit(grown(SHAPE), "vine")
    leaves = {"000": 1, "010": 0, "100": 1, "101": 0, "111": 0}
    for leaf, reward in leaves.items():
        assert sum(got[leaf[: k + 1]] for k in range(3)) == pytest.approx(reward - 3 / 8)
    # gamma acts between turns: a branch after a chain of one
    turns = [turn("m"), turn("a", ["m"], "r"), turn("b", ["m"], "r"), turn("x", ["a"]), turn("y", ["b"])]
    episode = play(turns, [("x", "answer", 1.0), ("y", "answer", 0.0), ("a", "step", 0.25)])
    half = sibling_credit(episode, "vine", 0.5)  # V(a) = .25 + .5, V(b) = 0, before: 3/8
    assert half == pytest.approx({"a": 3 / 8, "b": -3 / 8})


def test_without_siblings_nothing_is_trained_and_joins_are_refused():
    """credit §9 row 12: a lone child, and a whole chain."""
    chain = play(rounds(2), [("r1", "answer", 1.0)])
    for name in cf.BY_SIBLINGS:
        assert sibling_credit(chain, name) == {}
        assert advantages([chain], name, 1.0, dr_grpo) == ([], [])
    debate = [turn("a"), turn("b"), turn("c", ["a", "b"])]
    with pytest.raises(ValueError, match="credit vine follows trees, and turn 'c' of 'e' answers several turns"):
        sibling_credit(play(debate, [("c", "answer", 1.0)]), "vine")


def test_other_credits_go_to_the_estimator():
    episodes = [play(rounds(1), [("r0", "answer", float(k == 0))], f"e{k}") for k in range(2)]
    turns, values = advantages(episodes, "broadcast", 1.0, rloo)
    assert [(t.turn, v) for t, v in zip(turns, values)] == [("m0", 1.0), ("r0", 1.0), ("m0", -1.0), ("r0", -1.0)]
    late = play(rounds(2), [("r1", "answer", 1.0)])
    turns, _ = advantages([late], "turn_return", 0.5, rloo)
    assert [t.value for t in turns] == [0.5, 0.5, 1.0, 1.0]
    turns, _ = advantages([late], "ccpo_solo", 1.0, rloo)
    assert [t.value for t in turns] == [1.0] * 4
