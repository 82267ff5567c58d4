"""Counterfactual credit in the rl loop, on scripted teams (spec/credit.md 6.6, 6.7)."""

from __future__ import annotations

import asyncio
from functools import partial

import pytest
from test_rl_stage import Notebook

from cothink.engines.scripted import engine as scripted
from cothink.recipe import Recipe
from cothink.session import Session
from cothink.stages.rl import rl
from cothink.types import Task
from cothink.workflows.rema import run

ONE_EACH = {"meta": {"policy": "guide", "system": "Plan."}, "reasoning": {"policy": "solver", "system": "Follow."}}


def session(script, workflow=None, tasks=2, roles=None, **stage):
    roles = roles or ONE_EACH
    tree = {
        "name": "t",
        "team": {"workflow": {"name": "rema", "max_turns": 1, **(workflow or {})}, "roles": roles},
        "policies": {r["policy"]: {"model": "x"} for r in roles.values()},
        "tasks": {"train": {"name": "wordsums", "count": 5}},
        "stages": [{"kind": "rl", "steps": 1, "tasks_per_step": tasks, "filter": "none", **stage}],
    }
    recipe = Recipe.load(tree)
    books = {name: Notebook() for name in recipe.policies}
    engine = scripted(script)
    rows = [Task(f"t{k}", f"q{k}", str(k)) for k in range(tasks)]
    play = partial(run, **recipe.team.workflow.options)
    return Session(recipe, recipe.roles(), play, books, dict.fromkeys(books, engine), {"train": rows}), books, engine


def train(s):
    return asyncio.run(rl(s, s.recipe.stages[0], 0))


def advantages(book):
    found = {}
    for sample in book.seen[0]:
        found.setdefault(sample.task, []).append(next(a for a, t in zip(sample.advantages, sample.turns) if t >= 0))
    return {task: sorted(values) for task, values in found.items()}


def test_the_guide_earns_what_the_team_would_not_have_got_alone():
    """credit §6.6: q0 is solved with the plan alone, q1 with and without it.

    credit §4 W16: the arm is played anew in every step.
    """
    asked = []

    def script(call):
        text = call.messages[-1].content
        if call.policy == "guide":
            return "a plan"
        guided, task = "Instruction:\na plan" in text, "0" if "q0" in text else "1"
        asked.append((task, guided))
        mine = asked.count((task, guided))
        if task == "0":
            return "\\boxed{0}" if guided and mine <= 2 else "\\boxed{9}"  # with the plan 2 of 4, alone 0 of 4
        return "\\boxed{1}" if mine <= (2 if guided else 3) else "\\boxed{9}"  # with it 2 of 4, alone 3 of 4

    s, books, engine = session(script, episodes_per_task=4, credit={"name": "ccpo_solo", "guide": "meta"})
    found = train(s)
    assert sum(g for _, g in asked) == 8 and len(asked) == 16  # as many plays without the guide
    assert sum(call.policy == "guide" for call in engine.calls) == 8
    assert (found["accuracy"], found["solo/accuracy"], found["solo/gain"]) == (0.5, 0.375, 0.125)
    # q0: rewards 1, 1, 0, 0, wins pay .1 more to the guide; q1: losses cost it .1, because alone 3 of 4 are right
    assert advantages(books["solver"]) == {t: pytest.approx([-2 / 3, -2 / 3, 2 / 3, 2 / 3]) for t in ("t0", "t1")}
    want = [-2.2 / 3, -2.2 / 3, 2.2 / 3, 2.2 / 3]
    assert advantages(books["guide"]) == {t: pytest.approx(want) for t in ("t0", "t1")}
    assert found["tokens_total"] == 8 + 8 + 8  # one token a turn; the solo arm is paid for


def test_fewer_solo_plays_and_a_continuous_bonus():
    def script(call):
        if call.policy == "guide":
            return "a plan"
        return "\\boxed{0}" if "a plan" in call.messages[-1].content and call.seed % 2 else "\\boxed{9}"

    credit = {"name": "ccpo_solo", "guide": "meta", "solo_plays": 1, "bonus": "continuous", "strength": 0.5}
    s, books, engine = session(script, tasks=1, episodes_per_task=6, credit=credit)
    found = train(s)
    assert len(engine.calls) == 6 + 6 + 1 and found["solo/accuracy"] == 0
    right = round(6 * found["accuracy"])
    assert 0 < right < 6
    spread = {k: max(v["t0"]) - min(v["t0"]) for k, v in ((n, advantages(b)) for n, b in books.items())}
    assert spread["guide"] == pytest.approx(1.5 * spread["solver"])  # .5 * (R - b) / 2 on -1 and 1 is .5 apart


def test_a_guide_that_gives_the_graded_answer_is_named():
    s, _, _ = session(lambda call: "\\boxed{0}", episodes_per_task=2, credit={"name": "ccpo_solo", "guide": "meta"})
    swapped = partial(run, max_turns=1, order=("reasoning", "meta"))
    s = Session(s.recipe, s.roles, swapped, s.policies, s.engines, s.tasks)
    with pytest.raises(ValueError, match=r"credit\.guide 'meta' gave the graded answer of t"):
        train(s)


@pytest.mark.parametrize("credit", ["c3_local", "c3_suffix", "vine"])
def test_siblings_of_one_plan_are_compared_and_the_plan_is_context(credit):
    """credit §6.7: one tree a row, 3 answers to a plan, of which 1 is right."""

    def script(call):
        return "a plan" if call.policy == "guide" else ["\\boxed{0}", "no", "no"]

    s, books, _ = session(script, {"n_solutions": 3}, tasks=1, episodes_per_task=1, credit=credit)
    train(s)
    assert books["guide"].seen == [[]]
    scale = 2 / 3 if credit == "vine" else 1.0
    assert advantages(books["solver"]) == {"t0": pytest.approx([-scale / 2, -scale / 2, scale])}
