"""The cold-start gate, by hand and in the rl loop (spec/credit.md 3.13)."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from test_credit import play, rounds
from test_solo_arm import session, train

from cothink.parts import Gate
from cothink.record import Run
from cothink.stages.gate import NotReady, figures, shortcomings
from cothink.types import Completion, Task

GOOD = {"episodes": 8.0, "accuracy": 0.5, "meta/valid": 0.96, "reasoning/valid": 1.0, "rounds": 3.5,
        "required_rounds": 3.0, "solo/accuracy": 0.4, "solo/gain": 0.1}  # fmt: skip


def test_a_team_that_may_begin():
    """credit §3.13: both ends of the accuracy belong to it, rounds may be a quarter off."""
    gate = Gate(guide="meta")
    assert shortcomings(gate, GOOD) == []
    for change in ({"accuracy": 0.2}, {"accuracy": 0.8}, {"rounds": 3.75}, {"rounds": 2.25}, {"meta/valid": 0.95}):
        assert shortcomings(gate, GOOD | change) == []
    assert shortcomings(Gate(), {"episodes": 4.0, "accuracy": 0.5}) == []


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"accuracy": 0.19}, "accuracy 0.190 lies outside 0.2 to 0.8"),
        ({"accuracy": 0.81}, "accuracy 0.810 lies outside 0.2 to 0.8"),
        ({"meta/valid": 0.94}, "94.0 % of meta's turns are whole and readable, not 95 %"),
        ({"rounds": 2.2}, "2.20 rounds a play are not the 3.00 that its tasks need, by more than 25 %"),
        ({"solo/gain": 0.0}, "meta adds +0.000 to the accuracy without it, not more than 0"),
        ({"episodes": 0.0}, "no play came through"),
    ],
)
def test_what_a_team_lacks(change, words):
    """credit §3.13."""
    assert shortcomings(Gate(guide="meta"), GOOD | change) == [words]


def test_figures_of_plays():
    cut = replace(rounds(1)[0], completion=Completion("x", (9,), (1,), (0.0,), "length"))
    blank, answer = rounds(1)
    two = [replace(t, round=k // 2) for k, t in enumerate(rounds(2))]
    episodes = [
        replace(play(two, accuracy=1.0), verdict="right"),
        replace(play([cut], accuracy=0.0), verdict="wrong"),
        replace(play([replace(blank, text=" "), answer], accuracy=0.0), verdict="unparsable"),
    ]
    last = episodes[2]
    episodes[2] = replace(last, finish=replace(last.finish, turn="r0"))  # its graded text has no answer
    found = figures(episodes)
    assert found == {
        "episodes": 3.0, "accuracy": pytest.approx(1 / 3), "meta/valid": 0.5, "reasoning/valid": pytest.approx(2 / 3),
    }  # fmt: skip
    needs = [replace(e, task=Task("t", "q", "a", {"rounds": 3})) for e in episodes]
    assert figures(needs)["required_rounds"] == 3 and figures(needs)["rounds"] == pytest.approx(4 / 3)


def half(call):
    if call.policy == "guide":
        return "a plan"
    task = call.messages[-1].content[len("Question:\nq")]
    return f"\\boxed{{{task}}}" if call.seed % 2 else "\\boxed{9}"


def test_a_stage_begins_behind_its_gate(tmp_path):
    """credit §3.13: what the gate samples is counted, and its figures are kept."""
    s, books, engine = session(half, tasks=4, episodes_per_task=2, gate={"rows": 3, "plays": 8})
    s.run = Run(tmp_path / "run", s.recipe.to_yaml(), 0)
    found = train(s)
    kept = json.loads((tmp_path / "run" / "gate-00.json").read_text())
    assert kept["passed"] and kept["episodes"] == 24 and 0.2 <= kept["accuracy"] <= 0.8 and kept["failed"] == []
    assert len(engine.calls) == 2 * 24 + 2 * 8 and found["tokens_total"] == 64
    assert len(books["solver"].seen) == 1


def test_a_team_that_is_not_ready_takes_no_step():
    """credit §3.13: nobody learns, and the message says what to do."""
    s, books, _ = session(lambda call: "\\boxed{9}", episodes_per_task=2, gate={"plays": 2, "guide": "meta"})
    with pytest.raises(NotReady, match=r"accuracy 0\.000 lies outside 0\.2 to 0\.8; meta adds \+0\.000 .*kind: sft"):
        train(s)
    assert books["solver"].seen == books["guide"].seen == []
