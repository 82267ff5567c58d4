"""Returns over chains, trees and joins; unfinished episodes and filters (spec/credit.md 3.1, 3.9, 3.10)."""

from fractions import Fraction as F

import pytest

from cothink import credit
from cothink.credit import labels, returns, scored, settle_unfinished, sibling_pairs, turn_returns
from cothink.types import FINISHED, TRUNCATED, Completion, Episode, Finish, Score, Task, Turn


def turn(name, parents=(), role="meta", tokens=1, text="x"):
    ids = tuple(range(tokens))
    return Turn(name, tuple(parents), role, role, Completion(text, (9,), ids, (0.0,) * tokens), text)


def play(turns, rewards=(), name="e", task="t", reason=FINISHED, accuracy=None):
    return Episode(
        name, Task(task, "q", "a"), tuple(turns), Finish(reason, ""), tuple(Score(*r) for r in rewards), accuracy
    )


def rounds(count, **last):
    """m0 y0 m1 y1 ...: a ReMA chain."""
    turns, before = [], ()
    for k in range(count):
        for role in ("meta", "reasoning"):
            turns.append(turn(f"{role[0]}{k}", before, role, **(last if (k, role[0]) == (count - 1, "r") else {})))
            before = (turns[-1].id,)
    return turns


def tree(shape):
    """A tree whose ids are index paths; `shape` nests lists, leaves are rewards or None."""
    turns, own = [], {}

    def grow(part, path, depth):
        for k, child in enumerate(part):
            turns.append(turn(f"{path}{k}", [path] if path else [], ("generator", "verifier", "refiner")[depth]))
            if isinstance(child, list):
                grow(child, f"{path}{k}", depth + 1)
            elif child is not None:
                own[f"{path}{k}"] = child

    grow(shape, "", 0)
    return turns, own


def chain(rewards):
    own = {str(k): r for k, r in enumerate(rewards)}
    return [turn(str(k), [str(k - 1)] if k else []) for k in range(len(rewards))], own


@pytest.mark.parametrize(
    ("rewards", "gamma", "want"),
    [([0, 0, 1, 0], 0.9, [0.81, 0.9, 1.0, 0.0]), ([0, 0.5, 0, 1], 0.5, [0.375, 0.75, 0.5, 1.0])],
)
def test_reward_to_go_on_a_chain(rewards, gamma, want):
    assert list(returns(*chain(rewards), gamma).values()) == pytest.approx(want)


def test_value_iteration_on_the_papers_tree_is_exact():
    leaves = [[[1, 1, 0], [1, 0, 0], [0, 1, 1]], [[0, 0, 1], [0, 0, 0], [0, 1, 0]], [[1, 0, 1], [0, 0, 0], [1, 1, 1]]]
    value = returns(*tree(leaves))
    assert [value[k] for k in "012"] == [F(5, 9), F(2, 9), F(5, 9)]
    # 1/2 in exact arithmetic, 0.5000000000000001 as a float mean of means: bad, since the threshold is strict
    leaves = [[[1] * k + [0] * (6 - k) for k in (0, 0, 3, 5, 5, 5)]]
    assert returns(*tree(leaves))["0"] == F(1, 2)
    assert labels(returns(*tree(leaves)))["0"] is False


def test_a_hole_in_the_tree_is_not_a_zero():
    value = returns(*tree([[[1, 1, 1], [0, None, None]], [[None], [None]], [[1, 1, 0], [1, 0], [None]]]))
    assert (value["0"], value["1"], value["10"]) == (F(1, 2), None, None)
    assert value["2"] == F(7, 12) and value["01"] == 0
    assert labels(value)["1"] is None and labels(value)["2"] is True
    assert returns(*tree([[[1, 1, 1], [0, None, None]]]), pooling="leaves")["0"] == F(3, 4)


def test_own_reward_on_the_way_and_a_join():
    turns = [turn("g"), turn("v", ["g"]), turn("r", ["v"])]
    assert returns(turns, {"r": 1}) == {"g": 1, "v": 1, "r": 1}
    assert returns(turns, {"r": 1, "v": 0.25}) == {"g": 1.25, "v": 1.25, "r": 1}
    judge = [turn("a"), turn("b"), turn("j", ["a", "b"]), turn("c", ["a"])]
    assert returns(judge, {"j": 1, "c": 0}) == {"a": F(1, 2), "b": 1, "j": 1, "c": 0}


@pytest.mark.parametrize(
    ("turns", "own", "match"),
    [
        ([turn("b", ["a"]), turn("a")], {}, "not listed before"),
        ([turn("a"), turn("a")], {}, "twice"),
        ([turn("a")], {"z": 1}, "'z'"),
    ],
)
def test_bad_turns_are_named(turns, own, match):
    with pytest.raises(ValueError, match=match):
        returns(turns, own)


def test_pairs_are_good_times_bad_among_siblings():
    turns, own = tree([[[1, 0, 0], [1, 1]], [[0]]])
    pairs = sibling_pairs(turns, labels(returns(turns, own)))
    assert pairs == [("0", "1"), ("01", "00"), ("000", "001"), ("000", "002")]


def test_broadcast_gives_each_role_the_team_and_its_own():
    rewards = [("r1", "answer", 1.0), ("m0", "leak", -0.5, "meta"), ("m1", "style", 0.25, "turn")]
    assert turn_returns(play(rounds(2), rewards)) == {"m0": 0.5, "r0": 1.0, "m1": 0.75, "r1": 1.0}


def test_turn_return_counts_the_rounds_of_the_own_role():
    rewards = [("r2", "answer", 1.0), ("m1", "leak", -0.5, "meta"), ("m1", "style", 0.25, "turn")]
    got = turn_returns(play(rounds(3), rewards), "turn_return", 0.5)
    assert got == {"m0": 0.0, "m1": 0.25, "m2": 1.0, "r0": 0.25, "r1": 0.5, "r2": 1.0}
    with pytest.raises(ValueError, match="no effect"):
        turn_returns(play(rounds(1)), "broadcast", 0.5)
    with pytest.raises(ValueError, match="turn_return"):
        turn_returns(play(rounds(1)), "turns")  # type: ignore[arg-type]


def test_a_reward_on_a_placeholder_reaches_the_others_but_not_itself():
    cut = play(rounds(1, tokens=0, text=""), [("r0", "answer", 1.0)])
    for kind in ("broadcast", "turn_return"):
        assert turn_returns(cut, kind) == {"m0": 1.0, "r0": None}
    assert turn_returns(play(rounds(1))) == {"m0": None, "r0": None}


def test_a_tree_of_alternatives_is_never_broadcast_and_a_debate_is():
    turns, _ = tree([[[1, 0]], [[0, 0]]])
    rewards = [(t.id, "answer", float(t.id == "000")) for t in turns if len(t.id) == 3]
    right = {"0": 0.5, "00": 0.5, "000": 1.0}
    assert turn_returns(play(turns, rewards)) == {t.id: right.get(t.id, 0.0) for t in turns}
    debate = [turn("a"), turn("b"), turn("c", ["a", "b"]), turn("d", ["b", "a"])]
    assert turn_returns(play(debate, [("d", "answer", 1.0)])) == dict.fromkeys("abcd", 1.0)


def test_scored_turns_carry_their_keys():
    episode = play(rounds(2), [("r1", "answer", 1.0), ("m0", "leak", -0.5, "meta")], name="e7", task="t3")
    rows = scored([episode], anchor=lambda t, e: t.id if t.role == "meta" else None)
    assert [(r.role, r.index, r.value) for r in rows] == [
        ("meta", 0, 0.5), ("reasoning", 0, 1.0), ("meta", 1, 0.5), ("reasoning", 1, 1.0),
    ]  # fmt: skip
    assert {(r.task, r.episode) for r in rows} == {("t3", "e7")}
    assert [r.prefix for r in rows] == [">meta", "e7:m0>reasoning", "e7:r0>meta", "e7:m1>reasoning"]
    assert rows[0].components == {"answer": 1.0, "leak": -0.5} and rows[1].components == {"answer": 1.0}
    assert [r.anchor for r in rows] == ["m0", None, "m1", None]
    turns, own = tree([[[1, 0], [0, 0]], [[1, 1], [1, 0]]])
    rows = scored([play(turns, [(k, "answer", float(v)) for k, v in own.items()])])
    assert {r.index for r in rows} == {0} and len({r.prefix for r in rows}) == 7


def batch_of(*kinds):
    """One-round episodes: `1`/`0` finished with that reward, `x` truncated."""
    return [
        play(rounds(1), [("r0", "answer", float(k == "1"))], f"e{i}", t, FINISHED if k != "x" else TRUNCATED)
        for i, (t, k) in enumerate(kinds)
    ]


def used(settled):
    return {e.id: sum(s.value for s in e.rewards) for e in settled.episodes}


def test_unfinished_rules_by_hand():
    """rema §7 row 8; credit §3.10."""
    batch = batch_of("a1", "a0", "ax", "a1", "b1", "bx", "cx", "cx")
    batch[2] = play(rounds(1), [("r0", "answer", 1.0)], "e2", "a", TRUNCATED)  # a right answer that was cut
    zero = {"e0": 1, "e1": 0, "e2": 0, "e3": 1, "e4": 1, "e5": 0, "e6": 0, "e7": 0}
    assert used(settle_unfinished(batch, "zero")) == zero
    assert used(settle_unfinished(batch, "keep")) == {**zero, "e2": 1}
    got = settle_unfinished(batch, "mask")  # floor(.25 * 8) = 2 of the 4 leave
    assert ([e.id for e in got.masked], got.capped) == (["e2", "e5"], True)
    assert used(got) == {k: v for k, v in zero.items() if k not in ("e2", "e5")}
    got = settle_unfinished(batch, "mask", order=[7, 6, 5, 4, 3, 2, 1, 0])
    assert [e.id for e in got.masked] == ["e6", "e7"]
    assert not settle_unfinished(batch, "mask", mask_cap=0.5).capped
    got = settle_unfinished(batch, "bootstrap")  # b's only finished episode earned 1; c has none: as mask
    assert used(got) == pytest.approx({"e0": 1, "e1": 0, "e2": 2 / 3, "e3": 1, "e4": 1, "e5": 1})
    assert [e.id for e in got.masked] == ["e6", "e7"]
    with pytest.raises(ValueError, match="bootstrap"):
        settle_unfinished(batch, "drop")  # type: ignore[arg-type]


def test_a_zeroed_episode_without_any_reward_still_counts():
    (episode,) = settle_unfinished([play(rounds(1), reason=TRUNCATED)], "zero").episodes
    assert turn_returns(episode) == {"m0": 0.0, "r0": 0.0}


def test_filters_by_hand():
    """rema §7 row 30; credit §3.9."""
    groups = {"all": [1, 1, 1, 1], "none": [0, 0, 0, 0], "mixed": [1, 0, 0, 0]}
    assert credit.accuracy_filter(groups) == ["mixed"]
    rates = {k: [1] * k + [0] * (10 - k) for k in (1, 2, 8, 9)}
    assert credit.success_filter(rates) == [2, 8]
    assert credit.spread_filter({"a": [0, 0], "b": [1, 1]}) == []
    assert credit.void_turns(play([turn("a", text=" "), turn("b", ["a"], tokens=0, text="")])) == ["a"]
