"""The figures of a step, worked by hand on two episodes (rema §4.5, §4.7, issue item 8)."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from cothink import credit, estimators
from cothink.parts import Loss
from cothink.stages import metrics
from cothink.types import Completion, Episode, Finish, Score, Task, Turn


def turn(k, role, text, ids, p=0.5, reason="stop", round=0):
    done = Completion(text, (1,), tuple(ids), (math.log(p),) * len(ids), reason if ids else "void")
    return Turn(str(k), (str(k - 1),) if k else (), role, role, done, text.replace("[FINISH]", "").rstrip(), round)


TASK = Task("t", "q", "7")
LONG = Episode(
    "a",
    TASK,
    (
        turn(0, "meta", "plan", [1, 2]),
        turn(1, "reasoning", "try", [1, 2, 3, 4], p=0.25),
        turn(2, "meta", "stop [FINISH]", [5, 6, 7, 8, 5, 6, 7, 8], round=1),
        turn(3, "reasoning", "\\boxed{7} [FINISH]", [3, 4], round=1),
    ),
    Finish("finished", "\\boxed{7}", "3"),
    (Score("3", "right", 1.0), Score("0", "own", -0.5, "meta"), Score("1", "here", 0.25, "turn")),
    1.0,
    "right",
)
SHORT = Episode(
    "b",
    TASK,
    (turn(0, "meta", " ", [9], reason="length"), turn(1, "reasoning", "", [])),
    Finish("truncated", "", "1"),
    (Score("1", "right", 0.0),),
    0.0,
    "unparsable",
)


def test_the_team_and_its_rounds():
    found = metrics.of_episodes([LONG, SHORT], "[FINISH]")
    want = {"accuracy": 0.5, "rounds": 1.5, "one_round": 0.5, "turns": 2.5, "tokens": 17, "unfinished": 0.5}
    assert {k: found[k] for k in want} == want and found["unparsable"] == 0.5
    assert found["finish/truncated"] == 0.5 == found["finish/finished"] and found["finish/max_turns"] == 0
    assert "required_rounds" not in found


def test_roles_and_turns():
    found = metrics.of_episodes([LONG, SHORT], "[FINISH]")
    meta = {k.removeprefix("meta/"): v for k, v in found.items() if k.startswith("meta/")}
    assert meta["turns"] == 3 and meta["tokens_per_turn"] == pytest.approx(11 / 3)
    assert (meta["void"], meta["cut"], meta["boxed"], meta["tagged"]) == tuple(
        map(pytest.approx, (1 / 3, 1 / 3, 0, 1 / 3))
    )
    # 5 4-grams of which one came before; the other turns are too short to have any
    assert meta["repeated"] == pytest.approx(0.2 / 3) and meta["sampled_entropy"] == pytest.approx(math.log(2))
    assert {k: v for k, v in meta.items() if k.startswith("turn")} == pytest.approx({
        "turns": 3, "turn1/share": 1, "turn1/tokens": 1.5, "turn1/sampled_entropy": math.log(2),
        "turn2/share": 0.5, "turn2/tokens": 8, "turn2/sampled_entropy": math.log(2),
    })  # fmt: skip
    # the empty placeholder is no turn, and means are over tokens, not over turns
    assert found["reasoning/turns"] == 2 and found["reasoning/tagged"] == 0.5 == found["reasoning/boxed"]
    assert found["reasoning/sampled_entropy"] == pytest.approx((4 * math.log(4) + 2 * math.log(2)) / 6)
    assert found["reasoning/turn1/share"] == 0.5


def test_one_round_has_no_figures_by_turn_and_no_tag():
    found = metrics.of_episodes([SHORT])
    assert not [k for k in found if "turn1" in k or k.endswith("tagged")]


def test_tasks_that_say_how_many_rounds_they_need():
    needy = [replace(e, task=replace(TASK, meta={"rounds": 2})) for e in (LONG, SHORT)]
    found = metrics.of_episodes(needy)
    assert (found["required_rounds"], found["early_finish"]) == (2, 0.5)


def test_rewards_by_name_and_by_role():
    found = metrics.of_rewards([LONG, SHORT])
    assert found == pytest.approx({
        "reward/right": 0.5, "reward/own": -0.25, "reward/here": 0.125, "reward": 0.375, "reward_std": 0.375,
        # meta gets the team's 1 and its own -.5, reasoning the team's 1 and .25 of one turn
        "meta/reward": 0.25, "meta/reward_std": 0.25, "reasoning/reward": 0.625, "reasoning/reward_std": 0.625,
    })  # fmt: skip
    assert metrics.of_rewards([]) == {}


def test_intervals_are_over_rows_not_over_plays():
    """Rows of means (0 + .75) / 2 = .375 and .75: mean .5625, +- 12.7062 x .1875 (one degree of freedom)."""
    other = replace(LONG, task=replace(TASK, id="other"))
    found = metrics.of_rewards([LONG, SHORT, other])
    assert found["reward_low"] == pytest.approx(0.5625 - 12.7062 * 0.1875, abs=1e-4)
    assert found["reward_high"] == pytest.approx(0.5625 + 12.7062 * 0.1875, abs=1e-4)
    assert found["meta/reward_low"] == pytest.approx(0.375 - 12.7062 * 0.125, abs=1e-4)  # rows of .25 and .5
    grades = metrics.of_episodes([LONG, SHORT, other])
    assert grades["accuracy_high"] == pytest.approx(0.75 + 12.7062 * 0.25, abs=1e-4)  # rows of .5 and 1
    assert not [k for k in metrics.of_rewards([LONG, SHORT]) if k.endswith("_low")]


def test_net_push_and_what_the_advantages_do_to_the_entropy():
    scored = credit.scored([LONG, SHORT])
    values = {("a", "0"): 1.0, ("a", "2"): 1.0, ("b", "0"): -2.0, ("a", "1"): [0.5] * 4, ("a", "3"): [-1.0, -1.0]}
    spoken = {(e.id, t.id): t.completion.logprobs for e in (LONG, SHORT) for t in e.turns}
    equal = metrics.of_advantages(scored, values, spoken, Loss(aggregate="turn_mean"))
    assert equal["meta/net_push"] == 0 and equal["reasoning/net_push"] == pytest.approx(0.5 / 1.5)
    by_token = metrics.of_advantages(scored, values, spoken, Loss(aggregate="token_mean"))
    assert by_token["meta/net_push"] == pytest.approx((2 + 8 - 2) / 12)
    assert by_token["meta/entropy_covariance"] == 0  # every meta token was equally likely
    # reasoning: 4 tokens of log 1/4 with .5, 2 of log 1/2 with -1; means over the 6 tokens
    p, a = (4 * math.log(0.25) + 2 * math.log(0.5)) / 6, 0.0
    each = [(math.log(0.25) - p) * (0.5 - a)] * 4 + [(math.log(0.5) - p) * (-1 - a)] * 2
    assert by_token["reasoning/entropy_covariance"] == pytest.approx(sum(each) / 6) and sum(each) < 0


def test_whitening_scope_of_reinforce_plus_plus():
    """rema §7 row 23, §4.4: `role` whitens each role's tokens alone, `batch` mixes their reward scales."""
    far = replace(LONG, rewards=(Score("3", "r", 1.0, "reasoning"), Score("0", "m", 9.0, "meta")))
    near = replace(SHORT, rewards=(Score("0", "m", 7.0, "meta"),))
    scored = credit.scored([far, near])
    alone = dict(zip([(t.episode, t.turn) for t in scored], estimators.rfpp(scored)))
    mixed = dict(zip([(t.episode, t.turn) for t in scored], estimators.rfpp(scored, whiten_scope="batch")))
    # meta: 10 tokens of 9, 1 of 7; mean 97/11, unbiased variance 40/110
    assert alone["a", "0"] == pytest.approx([(9 - 97 / 11) / math.sqrt(40 / 110)] * 2, abs=1e-6)
    assert alone["a", "1"] == [0.0] * 4  # reasoning's six tokens are all alike: nothing to learn
    mean = (10 * 9 + 7 + 6) / 17
    spread = math.sqrt((10 * (9 - mean) ** 2 + (7 - mean) ** 2 + 6 * (1 - mean) ** 2) / 16)
    assert mixed["a", "1"] == pytest.approx([(1 - mean) / spread] * 4, abs=1e-6) and mixed["a", "1"][0] < -1
    assert mixed["b", "0"] == pytest.approx([(7 - mean) / spread], abs=1e-6)
