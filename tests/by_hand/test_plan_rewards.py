"""Rewards of planners: the decisions of spec/rema.md section 3, each with its alternative; n answers to one plan."""

from __future__ import annotations

import asyncio
import json
from functools import partial

import pytest

from cothink import wiring
from cothink.credit import scored, turn_returns
from cothink.engines.scripted import engine as scripted
from cothink.estimators import rloo
from cothink.recipe import Recipe
from cothink.resolve import RecipeError, bind
from cothink.rewards import Reward, actions, answer, consistency, judge, score
from cothink.samples import samples
from cothink.session import Session
from cothink.stages.answers import ask
from cothink.stages.playing import grade
from cothink.team import Job, play
from cothink.types import Completion, Episode, Finish, Role, Sampling, Task, Turn
from cothink.workflows import rema

TASK = Task("t", "2 + 3?", "5")
RIGHT, WRONG, BARE = "so \\boxed{5}", "so \\boxed{4}", "it is 4"


def turn(id, role, text, parents=(), tokens=3, finish="stop"):
    return Turn(id, parents, role, "p", Completion(text, (1,), tuple(range(tokens)), (0.0,) * tokens, finish), text)


def fan(plan, *texts, task=TASK, finish="stop"):
    """A plan and several answers to it; the first answer is graded."""
    answers = [turn(str(k + 1), "reasoning", t, ("0",)) for k, t in enumerate(texts)]
    turns = (turn("0", "meta", plan, finish=finish), *answers)
    return Episode("e", task, turns, Finish("finished", texts[0], "1"))


def value(function, episode, place=0, **options):
    found = function(episode.task, episode.turns[place], episode, **options)
    return asyncio.run(found) if asyncio.iscoroutine(found) else found


def boxes(*answers):
    return [f"\\boxed{{{a}}}" if a is not None else "none" for a in answers]


@pytest.mark.parametrize(
    ("answers", "share", "among_answered"),
    [
        ((4, 4, 5, None), 0.5, 2 / 3),
        ((4, None, None, None), 0.0, 0.0),  # more than half have no answer
        ((4, 4, None, None), 0.5, 1.0),  # half have none: still a majority of answers
        ((7, 7, 7, 7), 1.0, 1.0),  # gold is 5: agreement alone counts
        (("\\frac{1}{2}", "0.5", "1/2", "3"), 0.75, 0.75),  # equal for the verifier is equal
    ],
)
def test_row13_consistency(answers, share, among_answered):
    """rema §7 row 13."""
    e = fan("plan", *boxes(*answers))
    assert value(consistency.plan, e) == pytest.approx(share)
    assert value(consistency.plan, e, among="answered") == pytest.approx(among_answered)


def test_row13_consistency_pays_for_a_leak_and_needs_four_answers():
    """rema §7 row 13."""
    leak = fan("\\boxed{7}", *boxes(7, 7, 7, 5))
    assert value(consistency.plan, leak) == -1.0
    assert value(consistency.plan, leak, leak="add") == pytest.approx(-0.25)
    assert value(consistency.plan, leak, leak="ignore") == 0.75
    assert value(consistency.plan, fan("plan", *boxes(7, 7, 7))) is None
    assert value(consistency.plan, leak, place=1) is None  # nobody answers the reasoner
    placeholder = Turn("1", ("0",), "reasoning", "p", Completion("", finish_reason="void"), "")
    cut = Episode("e", TASK, (turn("0", "meta", "pl", finish="length"), placeholder), Finish("truncated", "", "1"))
    assert value(consistency.plan, cut) == 0.0


def test_row12_the_plan_may_be_paid_by_scores():
    """rema §7 row 12: correctness inside the mean as indicator (default) or as the +1 / -.5 / -1 score."""
    e = fan("add", RIGHT, WRONG, BARE)
    assert value(answer.plan, e) == pytest.approx(1 / 3)
    assert value(answer.plan, e, correctness="score") == pytest.approx(-0.5 / 3)
    assert value(answer.plan, fan("\\boxed", RIGHT, WRONG, BARE), correctness="score", leak="add") == pytest.approx(
        -0.5 / 3 - 1
    )
    loose = fan("add", "the answer is 5")
    assert [value(answer.plan, loose, strict=s) for s in (True, False)] == [0.0, 1.0]


def action(name, output):
    return json.dumps({"action": name, "output": output})


@pytest.mark.parametrize(
    ("plan", "finish", "want"),
    [
        (action("DECOMPOSE", "first add"), "stop", 0.5),
        (action("EMPTY", ""), "stop", 0.5),
        (action("EMPTY", ""), "length", -1.0),  # cut
        ("DECOMPOSE", "stop", -1.0),  # not JSON
        ('{"output": "x", "action": "REWRITE"}', "stop", -1.0),  # the action comes first
        (action("REWRITE", "it is \\boxed{5}"), "stop", -1.0),
        ('{"action": "REWRITE", "output": "\\u005cboxed{5}"}', "stop", -1.0),  # a leak that JSON hides
    ],
)
def test_row15_json_actions(plan, finish, want):
    """rema §7 row 15."""
    assert value(actions.plan, fan(plan, RIGHT, WRONG, finish=finish)) == want


def test_row15_json_alternatives():
    """rema §7 row 15."""
    leak = fan(action("REWRITE", "\\boxed{5}"), RIGHT, WRONG)
    assert value(actions.plan, leak, leak="add") == -0.5
    assert value(actions.plan, fan("x", RIGHT, WRONG), invalid=-0.25) == -0.25
    assert value(actions.plan, fan(action("EMPTY", ""), RIGHT, WRONG), correctness="score") == 0.25
    assert value(actions.plan, leak, place=1) is None


PAIR = Task("p", "Which?", "A", {"kind": "verdict"})


def test_row15_judge():
    """rema §7 row 15: +1 right, -.5 wrong, -1 without a verdict; meta the share, -1 if it gives a verdict itself."""
    e = fan("plan", "so [[A]]", "so [[B]]", "none", "[[A]] or [[B]]", task=PAIR)
    assert [value(judge.verdict, e, k) for k in range(1, 5)] == [1.0, -0.5, -1.0, -1.0]
    assert value(judge.verdict, e, 2, wrong=0.0) == 0.0
    assert value(judge.plan, e) == 0.25
    leak = fan("surely [[B]]", "[[A]]", task=PAIR)
    assert (value(judge.plan, leak), value(judge.plan, leak, leak="add")) == (-1.0, 0.0)
    assert value(judge.plan, fan("mind [A]", "[[A]]", task=PAIR)) == 1.0


def perform(texts, temperature=1.0, **options):
    """One single-turn play: the first text is the plan, the rest are the siblings."""
    engine = scripted(lambda call: list(texts[1:]) if call.policy == "r" else texts[0])
    seats = {"meta": Role("meta", "m", "M"), "reasoning": Role("reasoning", "r", "R", True, Sampling(temperature))}
    run = partial(rema.run, max_turns=1, **options)
    played = asyncio.run(play([Job(TASK, "e", 1)], run, seats, dict.fromkeys("mr", engine)))
    return asyncio.run(grade(played.episodes))[0], engine, seats


def test_n_solutions_are_siblings_and_the_first_is_graded():
    episode, engine, _ = perform(["plan", WRONG, RIGHT, BARE], n_solutions=3)
    assert [(t.role, t.parents) for t in episode.turns] == [("meta", ()), *[("reasoning", ("0",))] * 3]
    assert [call.n for call in engine.calls] == [1, 3]
    assert (episode.finish.turn, episode.finish.text, episode.accuracy) == ("1", WRONG, 0.0)
    greedy, engine, _ = perform(["plan", RIGHT], temperature=0.0, n_solutions=3)
    assert [call.n for call in engine.calls] == [1, 1] and greedy.accuracy == 1.0


REWARDS = {
    "base": [
        Reward("answer.base", answer.base, "reasoning", to="role"),
        Reward("plan", answer.plan, "meta", to="role"),
    ],
    "correct": [Reward("answer.correct", answer.correct)],
    "sparse": [Reward("answer.sparse", answer.sparse)],
}
RETURNS = {
    "base": {"0": 1 / 3, "1": -0.5, "2": 1.0, "3": -1.0},
    "correct": {"0": 1 / 3, "1": 0.0, "2": 1.0, "3": 0.0},
    "sparse": {"0": 1 / 3, "1": 0.0, "2": 1.0, "3": 0.0},
}


@pytest.mark.parametrize("name", REWARDS)
@pytest.mark.parametrize("credit", ["broadcast", "turn_return"])
def test_each_sibling_is_credited_by_its_own_answer(name, credit):
    episode, _, seats = perform(["plan", WRONG, RIGHT, BARE], n_solutions=3)
    (done,) = asyncio.run(score([episode], REWARDS[name]))
    assert turn_returns(done, credit) == pytest.approx(RETURNS[name])
    rows = scored([done], credit=credit)
    assert {t.turn: t.index for t in rows} == {"0": 0, "1": 0, "2": 0, "3": 0}
    advantages = {(t.episode, t.turn): a for t, a in zip(rows, rloo(rows, scope="prefix"))}
    best = max(("1", "2", "3"), key=lambda i: advantages["e", i])
    assert best == "2" and sum(advantages["e", i] for i in "123") == pytest.approx(0)
    made, counts = samples([done], advantages, seats)
    assert [(s.role, s.turn_ids) for s in made] == [("meta", ("0",)), *(("reasoning", (i,)) for i in "123")]
    assert counts.breaks == 0


TREE = {
    "name": "t",
    "team": {
        "workflow": {"name": "rema", "max_turns": 1},
        "roles": {"meta": {"policy": "m"}, "reasoning": {"policy": "m"}},
    },
    "policies": {"m": {"model": "builtin:tiny"}},
    "tasks": {"train": {"name": "wordsums", "count": 5}},
    "stages": [{"kind": "rl", "on": "train", "steps": 1, "tasks_per_step": 1, "episodes_per_task": 2}],
}
ONLY = "stages.0.rewards=[{name: %s, role: meta}]"


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ([ONLY % "consistency.plan"], "needs a workflow with n_solutions: 4 or more, and 'rema' has n_solutions: 1"),
        ([ONLY % "consistency.plan", "team.workflow.n_solutions=3"], "has n_solutions: 3"),
        ([ONLY % "consistency.plan", "team.workflow.n_solutions=4", "team.roles.reasoning.temperature=0",
          "team.roles.reasoning.trainable=false"], "equal at temperature 0"),
        ([ONLY % "actions.plan"], "needs a workflow with actions: true"),
        (["team.workflow.n_solutions=4", "team.workflow.max_turns=2"], "n_solutions belongs to the single-turn form"),
        (["team.workflow.actions=true", "team.workflow.max_turns=2"], "actions belongs to the single-turn form"),
        (["team.workflow.constrain=true"], "write actions: true"),
        (["team.workflow.n_solutions=0"], "one solution"),
    ],
)  # fmt: skip
def test_recipes_that_could_not_mean_anything_are_refused(overrides, message):
    with pytest.raises(RecipeError, match=message):
        Recipe.load(TREE, overrides)


def test_an_evaluation_samples_one_answer_to_a_plan():
    """Siblings are for training: an evaluation grades the first, which is the same one whatever comes beside it."""
    several = Recipe.load(TREE, ["team.workflow.n_solutions=4"])
    plain = Recipe.load(TREE).team.workflow
    assert wiring.alone(several.team.workflow) == {"n_solutions": 1} and wiring.alone(plain) == {}
    run = {n: bind(rema.run, {"max_turns": 1, "n_solutions": n}, "w") for n in (1, 4)}
    engine = scripted(["plan", RIGHT])
    made = Session(several, several.roles(), run[4], {}, {"m": engine}, {"train": [TASK]}, alone=run[1])
    rows, _ = asyncio.run(ask(made, {"train": [TASK]}, 1, 0))
    assert [call.n for call in engine.calls] == [1, 1] and [row["accuracy"] for row in rows] == [1.0]
    assert len(rows[0]["turns"]) == 2


def test_recipes_with_enough_answers_or_actions_load():
    found = Recipe.load(TREE, [ONLY % "consistency.plan", "team.workflow.n_solutions=4"])
    assert found.stages[0].loss.turns_ref == 1.0  # siblings share one place
    assert (
        "DECOMPOSE" in Recipe.load(TREE, [ONLY % "actions.plan", "team.workflow.actions=true"]).roles()["meta"].system
    )
