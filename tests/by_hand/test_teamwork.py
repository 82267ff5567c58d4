"""Analysis of a team's turns on the scripted engine (malt §10, oracles O12 and O14)."""

from __future__ import annotations

import asyncio
import json

import pytest

from cothink import Recipe, stats
from cothink.engines import scripted
from cothink.record import Run, RunError
from cothink.resolve import RecipeError, bind, resolve
from cothink.session import Session
from cothink.stages import teamwork, versus
from cothink.stages.evaluate import evaluate
from cothink.stages.reports import markdown
from cothink.stages.summary import Questions
from cothink.types import Task
from cothink.votes import answer_of, classes

TASKS = [Task(f"q/{k}", f"question {k}", str(k), {"kind": "number"}) for k in range(10)]
SEATS = {name: {"policy": "p", "max_tokens": 16, "temperature": 0.3} for name in ("generator", "verifier", "refiner")}


def recipe(*stages, workflow=None, seats=None):
    return Recipe.load({
        "name": "columns",
        "team": {"workflow": workflow or {"name": "malt", "prompts": "words"}, "roles": seats or SEATS},
        "policies": {"p": {"model": "builtin:tiny"}},
        "tasks": {"test": {"name": "wordsums", "split": "test", "count": 10}},
        "stages": [{"kind": "evaluate", **stage} for stage in stages],
    })  # fmt: skip


def played(folder, plan, script, tasks=TASKS):
    """Results of all stages by label, and the engine's calls."""
    record = Run(folder, plan.to_yaml(), plan.seed)
    engine = scripted.engine(script)
    block = plan.team.workflow
    workflow = bind(resolve("workflow", block.name), block.options, "workflow")
    session = Session(plan, plan.roles(), workflow, {}, {"p": engine}, {"test": tasks}, record)
    for k, stage in enumerate(plan.stages):
        asyncio.run(evaluate(session, stage, k))
    record.close()
    return record.results, engine.calls


def number(text):
    return int(text.partition("question ")[2].partition("\n")[0])


def test_o14_transitions():
    before, after = ([c == "1" for c in text] for text in ("0101011001", "1100111011"))
    found = teamwork.transitions(before, after)
    assert found == {"wrong_to_right": 3, "right_to_right": 4, "wrong_to_wrong": 2, "right_to_wrong": 1}
    for row, malt in (
        ((9.5, 81, 5.75, 3.75), 90.5),
        ((11.25, 70.25, 14.25, 4.25), 81.5),
        ((14.25, 43, 36.25, 6.5), 57.25),
    ):
        assert sum(row) == 100 and row[0] + row[1] == malt
    with pytest.raises(ValueError, match="zip"):
        teamwork.transitions([True], [])


@pytest.mark.parametrize(
    ("texts", "winner"),
    [
        ("ABC", "A"), ("ABB", "B"), ("xBC", "B"), ("xxC", "C"), ("xxx", None),
    ],
)  # fmt: skip
def test_o12_votes(texts, winner):
    choices = {"A": "a", "B": "b", "C": "c"}
    task = Task("t", "q", "A", {"kind": "letter", "choices": choices})
    answers = [answer_of(task, "nothing" if t == "x" else f"Final Answer: {t}") for t in texts]
    place = stats.majority(asyncio.run(classes(task, answers)))
    assert (None if place is None else answers[place]) == winner


def test_o12_equivalent_answers_are_one_class():
    task = Task("t", "q", "3", {"kind": "number"})
    answers = [answer_of(task, f"Final Answer: {text}") for text in ("3", "1/2", "0.5")]
    assert stats.majority(asyncio.run(classes(task, answers))) == 1


def test_rows28to30_ten_columns_and_debate_from_one_recipe(tmp_path):
    alone = {"name": "malt", "order": ["generator"]}
    k = {"episodes_per_task": 3}
    trained = [{"label": f"{who}-{team}", **k, **({"workflow": alone} if team == "SA" else {})}
               for who in ("base", "star", "malt") for team in ("SA", "MA")]  # fmt: skip
    debate = {"label": "debate", "workflow": {"name": "debate", "agents": 3, "rounds": 3},
              "roles": {"solver": "generator", "debater": "generator"}}  # fmt: skip
    plan = recipe(*trained, debate)

    def script(call):
        k = number("\n".join(m.content for m in call.messages) + "\n")
        return [f"Final Answer: {k if (call.seed >> j) % 3 else 99}" for j in range(call.n)]

    results, calls = played(tmp_path / "r", plan, script, TASKS[:4])
    per_question = {label: values["calls"] / 4 for label, values in results.items()}
    assert per_question == {
        "base-SA": 3,
        "base-MA": 9,
        "star-SA": 3,
        "star-MA": 9,
        "malt-SA": 3,
        "malt-MA": 9,
        "debate": 9,
    }
    for label, values in results.items():
        if label != "debate":
            rows = [json.loads(line) for line in _file(tmp_path / "r", label).read_text().splitlines()]
            first = [row["accuracy"] for row in rows if row["play"] == 0]
            assert values["first"][0] == sum(first) / 4, "the figure without a vote is that of the first pass"
            assert "maj_at" in values and values["maj_at"]["3"] and "unparsable" not in values["verdicts"]
            assert len({turn["prompt_tokens"] for row in rows for turn in row["turns"]}) == 1
    debaters = [row for row in _rows(tmp_path / "r", "debate") for row in row["turns"] if row["round"] == 2]
    assert all(len(turn["parents"]) == 3 for turn in debaters) and len(debaters) == 12
    assert {c.messages[0].content for c in calls} == {"Answer.", "Check.", "Refine."}
    assert results["base-SA"]["prompts"]["generator"] == results["malt-MA"]["prompts"]["generator"]
    mixed = markdown({"systems": results, "sets": ["test"]})
    assert "| accuracy | no vote | vote of all plays |" in mixed, "the debate is one play, and a vote already"
    debate = next(line for line in mixed.splitlines() if line.startswith("| debate |"))
    assert len({cell.strip() for cell in debate.split("|")[2:5]}) == 1
    plays = {label: Questions(_rows(tmp_path / "r", label)) for label in results}
    pairs = {entry["what"] for entry in versus.compare(plays)}
    assert pairs == {"single answer", "vote of all plays"}
    del results["debate"], plays["debate"]
    assert "| accuracy | no vote | pass@3 | maj@3 |" in markdown({"systems": results, "sets": ["test"]})
    assert {entry["what"] for entry in versus.compare(plays)} == {"single answer", "vote of 3"}


def _file(folder, label):
    (found,) = (folder / "episodes").glob(f"*-{label}/000000.jsonl")
    return found


def _rows(folder, label):
    return [json.loads(line) for line in _file(folder, label).read_text().splitlines()]


CHAIN = [("ok", "ok", "ok"), ("bad", "ok", "ok"), ("ok", "bad", "bad"), ("bad", "bad", "bad"), ("bad", "none", "ok"),
         ("ok", "ok", "none")]  # fmt: skip
"""What G, V and R state about the first six questions."""


def chain(call):
    k = number(call.messages[-1].content + "\n")
    what = CHAIN[k][("Answer.", "Check.", "Refine.").index(call.messages[0].content)]
    return {"ok": f"Final Answer: {k}", "bad": "Final Answer: 99", "none": "I do not know"}[what]


def test_row33_turn_wise_accuracy_verifier_and_refiner(tmp_path):
    results, _ = played(tmp_path / "r", recipe({"label": "team"}), chain, TASKS[:6])
    found = results["team"]["turns"]
    assert [(one["place"], one["role"], one["no_vote"][0]) for one in found["levels"]] == [
        (0, "generator", 3 / 6), (1, "verifier", 3 / 6), (2, "refiner", 3 / 6)]  # fmt: skip
    assert [one["unparsable"] for one in found["levels"]] == [0, 1 / 6, 1 / 6]
    assert found["verifier"] == {
        "checks": 6, "unparsable": 1, "right": 3 / 6, "confirmed_right": 2, "rejected_right": 1, "confirmed_wrong": 1,
        "rejected_wrong": 1, "agreement": 3 / 5,
    }  # fmt: skip
    assert found["refiner"] == {"wrong_to_right": 2, "right_to_right": 1, "wrong_to_wrong": 1, "right_to_wrong": 2}
    assert found["carried"] == 0
    page = markdown({"systems": results, "sets": ["test"]})
    assert "| team | 2 verifier | 50.0" in page and "| team | 6 | 2 | 1 | 1 | 1 | 1 | 60.0 % | 50.0 % |" in page
    assert "| team | refiner, on the answer before it | 2 | 1 | 1 | 2 |" in page


def test_row33_votes_after_each_turn(tmp_path):
    def script(call):
        k = number(call.messages[-1].content + "\n")
        script.asked[call.messages[0].content, k] = nth = script.asked.get((call.messages[0].content, k), -1) + 1
        right = (nth > 0) if call.messages[0].content == "Answer." else (nth == 0)
        return f"Final Answer: {k if right else 99}"

    script.asked = {}
    results, _ = played(tmp_path / "r", recipe({"label": "team", "episodes_per_task": 3}), script, TASKS[:2])
    levels = results["team"]["turns"]["levels"]
    assert [(one["no_vote"][0], one["vote"][0]) for one in levels] == [(0.0, 1.0), (1.0, 0.0), (1.0, 0.0)]


def test_row33_transitions_from_a_baseline(tmp_path):
    alone = {"label": "SA", "workflow": {"name": "malt", "order": ["generator"]}}
    results, _ = played(tmp_path / "r", recipe(alone, {"label": "MA", "baseline": "SA"}), chain, TASKS[:6])
    assert results["MA"]["transitions"] == {
        "from": "SA", "questions": 6,
        "no_vote": {"wrong_to_right": 2, "right_to_right": 1, "wrong_to_wrong": 1, "right_to_wrong": 2},
    }  # fmt: skip
    assert "| MA | no vote, from SA | 2 | 1 | 1 | 2 |" in markdown({"systems": results, "sets": ["test"]})


def test_row29_a_verifier_that_states_nothing_and_what_is_carried_forward(tmp_path):
    pair = {"name": "malt", "order": ["generator", "verifier"]}
    stages = ({"label": "GV", "workflow": pair}, {"label": "GV+", "workflow": {**pair, "carry_forward": True}})
    results, _ = played(tmp_path / "r", recipe(*stages), chain, TASKS[:6])
    assert results["GV"]["verdicts"]["unparsable"] == 1 / 6 and results["GV"]["turns"]["carried"] == 0
    assert "unparsable" not in results["GV+"]["verdicts"] and results["GV+"]["turns"]["carried"] == 1


def test_row32_the_protocol_of_the_paper(tmp_path):
    tasks = [Task(f"q/{k}", f"question {k}", str(k), {"kind": "number"}) for k in range(30)]
    paper = {"protocol": "paper", "limit": 20, "episodes_per_task": 3}
    plan = recipe(
        {"label": "a", **paper}, {"label": "b", **paper, "workflow": {"name": "malt", "order": ["generator"]}}
    )
    results, _ = played(
        tmp_path / "r", plan, lambda c: f"Final Answer: {number(c.messages[-1].content + chr(10)) % 7}", tasks
    )
    asked = [{name: [row["task"] for row in _rows(tmp_path / "r", label) if row["set"] == name and row["play"] == 0]
              for name in results[label]["sets"]} for label in "ab"]  # fmt: skip
    assert asked[0] == asked[1] and [len(set(part)) for part in asked[0].values()] == [20] * 4
    scores = [sum(int(t[2:]) < 7 for t in part) / 20 for part in asked[0].values()]
    found = results["a"]["paper"]
    assert found["no_vote"]["scores"] == found["vote"]["scores"] == scores and len(set(scores)) > 1
    mean = sum(scores) / 4
    assert found["vote"]["mean"] == pytest.approx(mean)
    assert found["vote"]["std"] == pytest.approx((sum((s - mean) ** 2 for s in scores) / 4) ** 0.5)
    with pytest.raises(RunError, match="draws 20 questions at a time, and test has 10"):
        played(tmp_path / "s", plan, lambda c: "", TASKS)


def test_the_papers_own_standard_deviation():
    # 57.25 +- 1.48 follows from 55, 57, 58 and 59 (population)
    rows = [{"set": f"t-{j}", "task": str(i), "play": 0, "accuracy": float(i < right), "vote": 0, "level": None}
            for j, right in enumerate((55, 57, 58, 59)) for i in range(100)]  # fmt: skip
    found = teamwork.paper(rows)["no_vote"]
    assert (round(100 * found["mean"], 2), round(100 * found["std"], 2)) == (57.25, 1.48)


@pytest.mark.parametrize(
    ("stage", "where", "word"),
    [
        ({"workflow": {"name": "malt", "ordr": ["generator"]}}, "stages.1.workflow.ordr", "order"),
        ({"workflow": {"name": "malt", "order": ["verifier"]}}, "stages.1.workflow", "a generator comes first"),
        ({"workflow": "debate"}, "stages.1.roles", "needs the role 'solver'"),
        ({"roles": {"generator": "gen"}}, "stages.1.roles.generator", "generator"),
        ({"roles": {"solver": "generator"}}, "stages.1.roles.solver", "has no role 'solver'"),
        ({"roles": {"generator": {"policy": "q"}}}, "stages.1.roles.generator.policy", "policy"),
        ({"untrained": ["verifyer"]}, "stages.1.untrained", "verifier"),
        ({"baseline": "SA"}, "stages.1.baseline", "one"),
        ({"baseline": "one", "limit": 3}, "stages.1.baseline", "asked other questions"),
        ({"protocol": "paper", "suite": "wordsums:2"}, "stages.1.protocol", "not from a suite"),
        (
            {"roles": {"generator": {"policy": "p", "system": "Solve."}}},
            "stages.1",
            "has another prompt than in stages.0",
        ),
    ],
)
def test_stages_that_cannot_be_measured_are_refused(stage, where, word):
    with pytest.raises(RecipeError) as error:
        recipe({"label": "one"}, {"label": "two", **stage})
    assert any(p.where == where and word in str(p) for p in error.value.problems), str(error.value)
