"""Samples are built from the sampled ids, never from text (spec/rema.md 4.1, rows 10 and 11)."""

from __future__ import annotations

import pytest

from cothink.samples import samples
from cothink.types import Completion, Episode, Finish, Role, Task, Turn

ROLES = {"a": Role("a", "p"), "b": Role("b", "q", trainable=False)}


def turn(id, parents, role, prompt, output, **more):
    logprobs = tuple(-0.1 * (k + 1) for k in range(len(output)))
    return Turn(id, parents, role, "p", Completion("?", tuple(prompt), tuple(output), logprobs, **more), "?")


def episode(*turns):
    return Episode("e", Task("t", "q", "1"), turns, Finish("finished", "?", turns[-1].id))


def build(*turns, advantages):
    return samples([episode(*turns)], {("e", k): v for k, v in advantages.items()}, ROLES)


def test_turns_whose_prompts_extend_merge_into_one_sample():
    """rema §7 row 10; credit §4 E21."""
    # glue token 9 was never sampled, and 7 7 is a split no tokenizer would choose: both stay as they are
    (row,), counts = build(
        turn("0", (), "a", [1, 2], [7, 7]),
        turn("1", ("0",), "b", [5], [6]),
        turn("2", ("1",), "a", [1, 2, 7, 7, 9, 3], [8]),
        advantages={"0": 0.5, "1": 1.0, "2": -1.0},
    )
    assert row.ids == (1, 2, 7, 7, 9, 3, 8)
    assert row.turns == (-1, -1, 0, 0, -1, -1, 1)
    assert row.logprobs == pytest.approx((0, 0, -0.1, -0.2, 0, 0, -0.1))
    assert row.advantages == (0, 0, 0.5, 0.5, 0, 0, -1.0)
    assert (row.unit, row.policy, row.turn_ids, row.trained) == ("e/a", "p", ("0", "2"), 3)
    assert counts.breaks == 0


def test_a_rewritten_history_starts_a_new_sample_and_is_counted():
    rows, counts = build(
        turn("0", (), "a", [1, 2], [7]), turn("1", ("0",), "a", [1, 9, 9], [8]), advantages={"0": 1.0, "1": 1.0}
    )
    assert [r.ids for r in rows] == [(1, 2, 7), (1, 9, 9, 8)]
    assert [r.turns for r in rows] == [(-1, -1, 0), (-1, -1, -1, 1)]  # turns are numbered within the unit
    assert counts.breaks == 1


def test_a_turn_shared_by_branches_is_trained_once():
    """credit §1."""
    root = turn("0", (), "a", [1], [2])
    rows, counts = build(
        root,
        turn("1", ("0",), "a", [1, 2, 5], [3]),
        turn("2", ("0",), "a", [1, 2, 5], [4]),
        advantages={"0": 1.0, "1": 1.0, "2": -1.0},
    )
    assert [(r.ids, r.turns) for r in rows] == [
        ((1, 2, 5, 3), (-1, 0, -1, 1)),
        ((1, 2, 5, 4), (-1, -1, -1, 2)),
    ]
    assert counts.breaks == 0


def test_placeholders_and_unscored_turns_are_not_trained():
    rows, counts = build(
        turn("0", (), "a", [1], [2]),
        turn("1", ("0",), "a", [1, 2, 9], [3]),
        turn("2", ("1",), "a", [], []),
        advantages={"0": None, "1": 1.0},
    )
    assert [(r.ids, r.turns) for r in rows] == [((1, 2, 9, 3), (-1, -1, -1, 0))]
    assert counts.placeholders == 1
    assert build(turn("0", (), "a", [1], [2]), advantages={})[0] == []


def test_advantages_per_token():
    (row,), _ = build(turn("0", (), "a", [1], [2, 3]), advantages={"0": [0.5, -0.5]})
    assert row.advantages == (0, 0.5, -0.5)
    with pytest.raises(ValueError, match="2 tokens came with 2 log-probs and 3 advantages"):
        build(turn("0", (), "a", [1], [2, 3]), advantages={"0": [1, 2, 3]})


def test_missing_logprobs_are_an_error():
    """credit §4 E14."""
    bare = Turn("0", (), "a", "p", Completion("?", (1,), (2,)), "?")
    with pytest.raises(ValueError, match="came with 0 log-probs"):
        build(bare, advantages={"0": 1.0})
