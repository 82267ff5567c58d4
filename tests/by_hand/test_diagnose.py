"""Who in a team helps, counted by hand: answers after each turn, flips, copies, checkers, and a role made silent."""

from __future__ import annotations

import asyncio

import pytest

from cothink.engines.scripted import ScriptedEngine
from cothink.recipe import Recipe
from cothink.session import Session
from cothink.stages import influence
from cothink.stages.answers import Answers
from cothink.stages.diagnose import accepts, diagnose, silenced, states
from cothink.stages.diagnosed import diagnosed
from cothink.stages.evaluate import measure_sets
from cothink.types import Role, Task
from cothink.workflows import malt

TASKS = {("test", f"t{k}"): Task(f"t{k}", "one two three four five six?", "4") for k in range(4)}


def row(task: str, *said: tuple[str, str], parents: dict[int, list[str]] | None = None, graded: int = -1) -> dict:
    turns = [
        {"id": str(k), "parents": (parents or {}).get(k, [str(k - 1)] if k else []), "role": role, "text": text,
         "tokens": len(text), "round": 0}
        for k, (role, text) in enumerate(said)
    ]  # fmt: skip
    return {"set": "test", "task": task, "question": TASKS["test", task].question, "turns": turns,
            "graded": turns[graded]["id"]}  # fmt: skip


def box(answer: object) -> str:
    return rf"\boxed{{{answer}}}"


PLAYS = [
    row("t0", ("generator", box(5)), ("verifier", "This is wrong."), ("refiner", box(4))),  # fixed
    row("t1", ("generator", box(4)), ("verifier", "It is not correct."), ("refiner", box(5))),  # spoilt
    row("t2", ("generator", box(4)), ("verifier", "Hm."), ("refiner", "I agree.")),  # stays right, nothing stated
    row("t3", ("generator", "no idea"), ("verifier", "Incorrect."), ("refiner", box(7))),  # first wrong
]


def test_answers_after_each_turn_and_flips():
    found = asyncio.run(diagnose(PLAYS, TASKS))
    assert [(t["role"], t["turns"], t["states"], t["accuracy"][0]) for t in found["turns"]] == [
        ("generator", 4, 0.75, 0.5), ("verifier", 4, 0.0, 0.5), ("refiner", 4, 0.75, 0.5),
    ]  # fmt: skip
    changes = {role: {k: v for k, v in r["changes"].items() if v} for role, r in found["roles"].items()}
    assert changes == {
        "generator": {"first_right": 2, "first_wrong": 1}, "verifier": {},
        "refiner": {"first_wrong": 1, "fixed": 1, "spoilt": 1},
    }  # fmt: skip
    assert found["roles"]["refiner"]["net"][0] == 0.0 and found["roles"]["generator"]["net"] == [0.0, 0.0, 0.0]
    fewer = asyncio.run(diagnose([PLAYS[0], *PLAYS[2:]], TASKS))["roles"]["refiner"]["net"]  # one fixed of three
    assert fewer[0] == pytest.approx(1 / 3) and fewer[1] == 0.0 < fewer[2]
    tokens = {role: r["tokens"] for role, r in found["roles"].items()}
    assert sum(tokens.values()) == pytest.approx(1.0)
    said = {role: sum(len(t["text"]) for p in PLAYS for t in p["turns"] if t["role"] == role) for role in tokens}
    assert tokens["verifier"] == pytest.approx(said["verifier"] / sum(said.values()))


def test_checkers_are_set_against_the_gold():
    """Of three answers it read: one wrong rejected, one right rejected, one right passed over: agreement 1 of 2."""
    found = asyncio.run(diagnose(PLAYS, TASKS))["roles"]
    assert {k: v for k, v in found["verifier"]["checks"].items() if v} == {
        "rejects_wrong": 1, "rejects_right": 1, "silent_right": 1, "agreement": 0.5,
    }  # fmt: skip
    assert found["generator"]["checks"] is None and found["refiner"]["checks"] is None  # it answers, it does not check


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("The answer is correct.", True), ("That is right, I think.", True), ("This isn't correct", False),
        ("This is incorrect", False), ("It is not wrong.", True), ("The first step is right. The sum is wrong.", False),
        ("Let me see", None), ("rightly brightly", None),
    ],
)  # fmt: skip
def test_what_a_checker_says(text, said):
    (before,) = asyncio.run(states(row("t0", ("a", box(4))), TASKS["test", "t0"])).values()
    assert accepts(text, before, None) is said


def test_a_checker_that_states_an_answer_accepts_the_same_one():
    plays = [
        row("t0", ("generator", box(4)), ("verifier", box("4.0")), ("refiner", box(4))),
        row("t1", ("generator", box(5)), ("verifier", box(5) + " which is wrong"), ("refiner", box(5))),
        row("t2", ("generator", box(5)), ("verifier", box(6)), ("refiner", box(6))),
    ]
    checks = asyncio.run(diagnose(plays, TASKS))["roles"]["verifier"]["checks"]
    assert {k: v for k, v in checks.items() if v} == {
        "accepts_right": 1, "accepts_wrong": 1, "rejects_wrong": 1, "agreement": 2 / 3,
    }  # fmt: skip


def test_of_several_turns_that_are_read_the_first_with_an_answer_counts():
    """A debate: each debater goes on from its own answer, named first."""
    said = [("solver", box(4)), ("solver", box(5)), ("debater", box(5)), ("debater", box(4))]
    parents = {0: [], 1: [], 2: ["0", "1"], 3: ["1", "0"]}
    changes = asyncio.run(diagnose([row("t0", *said, parents=parents)], TASKS))["roles"]["debater"]["changes"]
    assert (changes["spoilt"], changes["fixed"]) == (1, 1)


def test_copies_are_runs_of_five_words():
    plays = [
        row(
            "t0", ("a", "one two three four five six seven"), ("b", "four five six seven x one two three four five six")
        ),
    ]
    found = asyncio.run(diagnose(plays, TASKS))["roles"]
    # a: 3 runs, of which 1-5 and 2-6 stand in the question; b: 7 runs, 1-5 and 2-6 of the question, none of a's 3-7
    assert found["a"]["copied_question"] == pytest.approx(2 / 3) and found["a"]["copied_turns"] == 0
    assert found["b"]["copied_question"] == pytest.approx(2 / 7) and found["b"]["copied_turns"] == 0
    told = [row("t0", ("a", "alpha beta gamma delta epsilon zeta"), ("b", "so alpha beta gamma delta epsilon"))]
    assert asyncio.run(diagnose(told, TASKS))["roles"]["b"]["copied_turns"] == pytest.approx(1 / 2)


def test_roles_that_give_every_answer_cannot_be_left_out():
    assert silenced(PLAYS) == ["generator", "verifier"]
    assert silenced([row("t0", ("solver", box(4)))]) == []
    assert silenced([row("t0", ("a", "x"), ("b", "y")), row("t1", ("a", "x"), ("b", "y"), graded=0)]) == ["a", "b"]


def team_of(script) -> tuple[Session, ScriptedEngine]:
    roles = {name: {"policy": "p", "system": name} for name in malt.TEAM}
    recipe = Recipe.load({
        "name": "x", "team": {"workflow": {"name": "malt"}, "roles": roles},
        "policies": {"p": {"model": "builtin:tiny"}}, "tasks": {"test": {"name": "wordsums", "split": "test"}},
        "stages": [{"kind": "evaluate"}],
    })  # fmt: skip
    engine = ScriptedEngine(script)
    seats = {name: Role(name, "p", name) for name in malt.TEAM}
    return Session(recipe, seats, malt.run, {}, {"p": engine}), engine


def test_a_silent_role_says_nothing_and_the_others_play_on(tmp_path):
    """The refiner obeys the verifier (4 only if told); without it 0 of 4, without the generator all is as before."""

    def script(call):
        role, told = call.messages[0].content, call.messages[-1].content
        if role == "refiner":
            return box(4) if "say four" in told else box(5)
        return "say four" if role == "verifier" else box(5)

    session, engine = team_of(script)
    sets = {"test": list(TASKS.values())}
    kept = {role: Answers(tmp_path / f"{role}.jsonl") for role in ("generator", "verifier")}

    async def go():
        plan = {"temperature": None, "seed": 0, "title": "x"}
        _, rows = await measure_sets(session, sets, episodes_per_task=1, **plan)
        return await influence.team(session, sets, rows, k=1, kept=kept.__getitem__, **plan)

    roles = asyncio.run(go())["roles"]
    assert roles["verifier"]["silent"]["accuracy"][0] == 0.0 and roles["verifier"]["silent"]["influence"]["mean"] == 1.0
    assert roles["generator"]["silent"]["influence"]["mean"] == 0.0 and "silent" not in roles["refiner"]
    quiet = Answers(tmp_path / "verifier.jsonl").rows["test", "t0"][0]["turns"]
    assert [(t["role"], t["text"], t["tokens"]) for t in quiet][1:2] == [("verifier", "", 0)]
    before = len(engine.calls)
    asyncio.run(go())
    assert len(engine.calls) == before + 12  # the team's own plays; those without a role were kept


def test_the_tables_of_a_diagnosis():
    found = asyncio.run(diagnose(PLAYS, TASKS))
    found["roles"]["verifier"]["silent"] = {
        "accuracy": [0.25, 0.1, 0.5], "influence": {"mean": 0.25, "low": 0.0, "high": 0.5}}  # fmt: skip
    turns, roles, checks = diagnosed(": x", found)
    assert turns[0] == "After each turn: x" and turns[2][2][:3] == ["refiner", "4", "75 %"]
    assert all(len(line) == len(head) for _, head, lines, _ in (turns, roles, checks) for line in lines)
    assert roles[2][1][9:11] == ["25.0 [10.0, 50.0]", "+25.0 [+0.0, +50.0]"]
    assert checks[2] == [["verifier", "0", "0", "1", "1", "1", "0", "50 %"]]
