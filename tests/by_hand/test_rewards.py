"""Rewards: the worked values of spec/rema.md section 3, who is credited, and what is refused."""

from __future__ import annotations

import asyncio

import pytest

from cothink.resolve import bind, resolve
from cothink.rewards import Reward, RewardError, answer, length, score
from cothink.rewards import format as form
from cothink.types import Completion, Episode, Finish, Task, Turn

TASK = Task("t", "2 + 3?", "5")
RIGHT, WRONG, BARE = "so \\boxed{5}", "so \\boxed{4}", "it is 4"


def turn(id, role, text, parents=(), tokens=3, finish="stop"):
    return Turn(id, parents, role, "p", Completion(text, (1,), tuple(range(tokens)), (0.0,) * tokens, finish), text)


def episode(*turns, reason="finished", accuracy=None):
    return Episode("e", TASK, turns, Finish(reason, turns[-1].text, turns[-1].id), accuracy=accuracy)


def value(function, turn_, episode_, **options):
    found = function(TASK, turn_, episode_, **options)
    return asyncio.run(found) if asyncio.iscoroutine(found) else found


def fan(plan, *texts):
    """A plan and several solutions of it."""
    return episode(turn("0", "meta", plan), *(turn(str(k + 1), "reasoning", t, ("0",)) for k, t in enumerate(texts)))


def test_row12_base_reward_of_the_reasoner():
    e = fan("add", RIGHT, WRONG, BARE)
    assert [value(answer.base, t, e) for t in e.turns[1:]] == [1.0, -0.5, -1.0]
    # a right value outside a box has no answer format when strict
    loose = fan("add", "the answer is 5")
    assert value(answer.base, loose.turns[1], loose) == -1.0
    assert value(answer.base, loose.turns[1], loose, strict=False) == 1.0


def test_row12_plan_reward_is_the_share_of_right_answers():
    assert value(answer.plan, fan("add", RIGHT, WRONG, BARE).turns[0], fan("add", RIGHT, WRONG, BARE)) == pytest.approx(
        1 / 3
    )
    leak = fan("\\boxed{5}", RIGHT, WRONG, BARE)
    assert value(answer.plan, leak.turns[0], leak) == -1.0
    assert value(answer.plan, leak.turns[0], leak, leak="add") == pytest.approx(1 / 3 - 1)
    assert value(answer.plan, leak.turns[0], leak, leak="ignore") == pytest.approx(1 / 3)
    assert value(answer.plan, leak.turns[1], leak) is None  # nobody answered the reasoner


def test_row14_sparse_needs_a_right_answer_and_a_finish():
    m, y = turn("0", "meta", "m [FINISH]"), turn("1", "reasoning", RIGHT, ("0",))
    for reason, accuracy, want in [
        ("finished", 1.0, 1.0),
        ("finished", 0.0, 0.0),
        ("truncated", 1.0, 0.0),
        ("max_turns", 1.0, 0.0),
    ]:
        e = episode(m, y, reason=reason, accuracy=accuracy)
        assert value(answer.sparse, y, e) == want
        assert value(answer.sparse, m, e) is None  # on the last turn only, so that it reaches both roles once


def test_correct_is_the_grade_of_the_graded_turn():
    m, y = turn("0", "meta", RIGHT), turn("1", "reasoning", WRONG, ("0",))
    e = episode(m, y, accuracy=0.0)
    assert (value(answer.correct, y, e), value(answer.correct, m, e)) == (0.0, None)


def test_form():
    e = episode(turn("0", "meta", "plan"), turn("1", "meta", "\\boxed{"), turn("2", "r", RIGHT, finish="length"))
    assert [value(form.no_leak, t, e) for t in e.turns] == [0.0, -1.0, -1.0]
    assert [value(form.boxed, t, e) for t in e.turns] == [0.0, 0.0, 1.0]
    assert [value(form.finished, t, e) for t in e.turns] == [1.0, 1.0, 0.0]


def test_overlong_is_linear_in_the_last_tokens():
    turns = [turn(str(k), "r", "", tokens=n) for k, n in enumerate((10, 81, 90, 100, 150))]
    found = [length.overlong(TASK, t, episode(t), max_length=100, cache=20, factor=0.5) for t in turns]
    assert found == pytest.approx([0.0, -0.025, -0.25, -0.5, -0.5])
    with pytest.raises(ValueError, match="cache=0"):
        length.overlong(TASK, turns[0], episode(turns[0]), max_length=10, cache=0)


def test_score_places_weights_and_audiences():
    e = episode(turn("0", "meta", "\\boxed{5}"), turn("1", "reasoning", RIGHT, ("0",)), accuracy=1.0)
    rewards = [
        Reward("correct", answer.correct),
        Reward("leak", form.no_leak, role="meta", weight=0.5, to="role"),
        Reward("end", form.finished, role="reasoning", to="turn"),
        Reward("never", lambda task, turn, episode: None),
    ]
    (done,) = asyncio.run(score([e], rewards))
    assert [(s.turn, s.name, s.value, s.to) for s in done.rewards] == [
        ("1", "correct", 1.0, "team"), ("0", "leak", -0.5, "meta"), ("1", "end", 1.0, "turn"),
    ]  # fmt: skip


def test_ones_own_reward_speaks_per_role_and_round(tmp_path, monkeypatch):
    """rema §7 row 16: a user's function by import path gives one value for every role in every round."""
    (tmp_path / "mine_16.py").write_text(
        "def words(task, turn, episode, *, per: float = 1.0):\n"
        "    return per * len(turn.completion.text.split()) + 10 * (len(turn.parents) > 0)\n"
    )
    monkeypatch.chdir(tmp_path)
    words = bind(resolve("reward", "mine_16:words"), {"per": 2.0}, "stages.0.rewards.0")
    said = [("0", "meta", "a"), ("1", "reasoning", "a b"), ("2", "meta", "a b c"), ("3", "reasoning", "a b c d")]
    e = episode(*(turn(k, role, text, (str(int(k) - 1),) if k != "0" else ()) for k, role, text in said))
    mine = [Reward("words", words, role=role, to="turn") for role in ("meta", "reasoning")]
    (done,) = asyncio.run(score([e], mine))
    assert sorted((s.turn, s.value) for s in done.rewards) == [("0", 2.0), ("1", 14.0), ("2", 16.0), ("3", 18.0)]


@pytest.mark.parametrize("bad", [float("nan"), "yes", float("inf")])
def test_a_reward_that_is_no_number_is_an_error(bad):
    e = episode(turn("0", "r", "x"))
    with pytest.raises(
        RewardError, match=r"reward odd returned .* for turn 0 \(r\) of task .*return a finite number, or None"
    ):
        asyncio.run(score([e], [Reward("odd", lambda task, turn, episode: bad)]))
