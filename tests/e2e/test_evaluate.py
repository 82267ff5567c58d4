"""`cothink evaluate` as a user meets it: targets, folders that go on after a kill, equal cost, stages with suites."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from test_openai_engine import url  # noqa: F401 (a fixture)

import cothink
from cothink import cli
from cothink.record import RunError
from cothink.stages import systems

SOLO = """
name: alone
team: {workflow: solo, roles: {solver: {policy: p, system: "Solve.", max_tokens: 48}}}
policies: {p: {model: "builtin:tiny"}}
tasks: {test: {name: wordsums, split: test, levels: [1, 3], count: 40}}
stages: [{kind: evaluate}]
"""
ROOT = Path(__file__).parents[2]
JUDGE_ROLE = "team.roles.judge={policy: main, trainable: false, max_tokens: 16}"
DEBATE = SOLO.replace("alone", "debate").replace(
    '{workflow: solo, roles: {solver: {policy: p, system: "Solve.", max_tokens: 48}}}',
    '{workflow: {name: debate, agents: 2, rounds: 1}, roles: {solver: {policy: p, system: "Solve.", max_tokens: 48}}}',
)


@pytest.fixture
def recipes(tmp_path):
    (tmp_path / "alone.yaml").write_text(SOLO)
    (tmp_path / "debate.yaml").write_text(DEBATE)
    return tmp_path


def call(*arguments) -> int:
    with pytest.raises(SystemExit) as left:
        cli.main(["evaluate", *map(str, arguments)])
    return int(left.value.code or 0)


def test_systems_are_compared_on_the_same_questions_and_at_equal_cost(recipes, capsys):
    out = recipes / "out"
    arguments = [recipes / "debate.yaml", "--equal-cost", f"one={recipes / 'alone.yaml'}", "--limit", 12, "--k", 2]
    assert call(*arguments, "--out", out) == 0
    told = capsys.readouterr().out
    for words in ("## At equal cost", "| single answer | debate - one |", "| vote of 2 |", "results.csv"):
        assert words in told
    results = json.loads((out / "results.json").read_text())
    assert results["sets"] == {"test": 12} and list(results["systems"]) == ["debate", "one"]
    (priced,) = results["equal_cost"]
    assert priced["votes"] == 2  # two answers cost what two answers cost
    assert priced["team_tokens_per_question"] == pytest.approx(priced["single_tokens_per_question"], rel=0.2)
    # the same questions in both files, two plays each
    asked = [[json.loads(line)["task"] for line in (out / f"{name}.jsonl").open()] for name in ("debate", "one")]
    assert asked[0] == asked[1] and len(asked[0]) == 24
    before = {p.name: p.read_bytes() for p in out.iterdir()}
    assert call(*arguments, "--out", out) == 0  # everything is there: nothing is played, nothing changes
    assert {p.name: p.read_bytes() for p in out.iterdir()} == before
    assert call(recipes / "alone.yaml", "one=builtin:tiny", "--out", out) == 1
    assert "answers of another system called 'one'" in capsys.readouterr().err
    assert call(recipes / "alone.yaml", "--seed", 5, "--out", out) == 1
    assert "holds answers at seed None, not 5" in capsys.readouterr().err


def test_a_killed_evaluation_goes_on_and_ends_byte_equal(recipes):
    """Issue 6: resumed once after a kill, byte-equal to an uninterrupted one."""
    slow = SOLO.replace("roles:", "concurrency: 8, roles:")
    (recipes / "alone.yaml").write_text(slow)
    arguments = [str(recipes / "alone.yaml"), "--k", "2", "--out"]
    assert call(*arguments, recipes / "whole") == 0
    command = [sys.executable, "-m", "cothink.cli", "evaluate", *arguments, str(recipes / "parts")]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL) as process:
        path, deadline = recipes / "parts" / "alone.jsonl", time.monotonic() + 60
        while time.monotonic() < deadline and not (path.exists() and path.read_bytes().count(b"\n") >= 8):
            time.sleep(0.001)
        process.send_signal(signal.SIGKILL)
    kept = path.read_bytes().count(b"\n")
    assert 8 <= kept < 80 and not (recipes / "parts" / "results.json").exists()
    assert call(*arguments, recipes / "parts") == 0
    for name in ("alone.jsonl", "results.json", "results.md", "results.csv"):
        assert (recipes / "parts" / name).read_bytes() == (recipes / "whole" / name).read_bytes(), name


def test_any_team_can_be_pointed_at(recipes, tiny_folder, monkeypatch):
    monkeypatch.chdir(recipes)
    assert systems.system("alone.yaml").name == "alone"
    assert systems.system("mine=alone.yaml", overrides=["seed=4"]).recipe.seed == 4
    plain = systems.system("builtin:tiny", max_tokens=7)
    assert plain.name == "builtin-tiny" and plain.recipe.roles()["solver"].system == "Solve."
    assert plain.recipe.roles()["solver"].sampling.max_tokens == 7
    folder = systems.system(str(tiny_folder))
    assert folder.recipe.policies["solver"].model == str(tiny_folder)
    hub = systems.system("some-org/some-model")
    assert (hub.name, hub.recipe.policies["solver"].model) == ("some-model", "some-org/some-model")
    server = systems.system("openai:big/model-8b@http://localhost:1/v1")
    assert (server.name, server.recipe.policies["solver"].model) == (
        "model-8b",
        "openai:big/model-8b@http://localhost:1/v1",
    )
    done = cothink.run(recipes / "alone.yaml", ["stages=[{kind: evaluate, limit: 2}]"], out=recipes / "runs" / "first")
    assert systems.system("runs/first").name == "first"
    for wrong, hint in (("runs/frist", "did you mean 'runs/first'"), ("smolm2", "did you mean 'smollm2'"),
                        (".", "neither a run folder"), ("runs", "neither a run folder")):  # fmt: skip
        with pytest.raises(RunError, match=re.escape(hint)):
            systems.system(wrong)
    assert cothink.evaluate(done.folder, limit=2)["per_task"] == done.results["evaluate-0"]["per_task"]


def test_options_that_would_do_nothing_are_refused(recipes, capsys):
    recipe = recipes / "alone.yaml"
    for arguments, hint in (
        (["builtin:tiny"], "a model brings no questions: name a suite"),
        ([recipe, "--suite", "wordsums", "--on", "test"], "give one of the two"),
        ([recipe, "--max-tokens", 5], "for plain models"),
        ([recipe, "--cost", "all"], "name its single model"),
        ([recipe, recipe], "two systems are called 'alone'"),
        ([recipe, "--on", "val"], "no task set 'val'; it has test"),
        (["builtin:tiny", "--suite", "wordsums:1", "--set", "seed=4"], "no recipe to change with seed=4"),
        (
            [recipe, "--equal-cost", "openai:m@http://x/v1", "--cost", "all"],
            "does not tell its prompt tokens",
        ),
    ):
        assert call(*arguments) == 1, arguments
        assert hint in capsys.readouterr().err
    assert call(recipe, "--suite", "wordsum") == 2
    assert "did you mean 'wordsums'" in capsys.readouterr().err
    assert call(recipe, "--cost", "some") == 2


def test_a_plain_model_on_a_suite_of_several_sets(recipes, capsys):
    assert call("builtin:tiny", "--suite", "wordsums:1", "--suite", "wordsums:5", "--limit", 5, "--max-tokens", 48) == 0
    told = capsys.readouterr().out
    assert "## By sets" in told and "| wordsums:1 (5) |" in told and "| macro |" in told


def test_pairs_are_judged_by_the_workflow_that_shows_them(recipes, data_root, monkeypatch):
    monkeypatch.setenv("COTHINK_DATA", str(data_root))
    plain, team = systems.system("builtin:tiny"), systems.system(recipes / "alone.yaml")
    sets, _ = systems.questions([plain], "test", "judgebench", 3)
    (judge,) = systems.fitted([plain], sets)
    assert judge.recipe.team.workflow.name == "judge" and list(judge.recipe.team.roles) == ["judge"]
    with pytest.raises(RunError, match="shows nobody the two answers"):
        systems.fitted([team], sets)
    mixed, _ = systems.questions([plain], "test", ["judgebench", "wordsums:1"], 3)
    with pytest.raises(RunError, match="evaluate it on its own"):
        systems.fitted([plain], mixed)
    assert systems.fitted([team], {"wordsums:1": mixed["wordsums:1"]}) == [team]


def test_a_stage_plays_a_suite_several_times_and_goes_on_after_a_kill(recipes, monkeypatch):
    stage = "stages=[{kind: evaluate, label: levels, suite: ['wordsums:1', 'wordsums:2'], limit: 6}]"
    twice = [stage, "stages.0.episodes_per_task=2"]
    whole = cothink.run(recipes / "alone.yaml", twice, out=recipes / "whole")
    found = whole.results["levels"]
    assert (found["n"], found["k"], found["episodes"], list(found["sets"])) == (12, 2, 24, ["wordsums:1", "wordsums:2"])
    assert "| maj@2 |" in (whole.folder / "levels.md").read_text()
    path = "episodes/00-levels/000000.jsonl"
    rows = (whole.folder / path).read_bytes()
    # As a kill after five of the twelve questions leaves it.
    part = recipes / "part"
    (part / "episodes" / "00-levels").mkdir(parents=True)
    for name in ("recipe.yaml", "manifest.json"):
        (part / name).write_bytes((whole.folder / name).read_bytes())
    (part / path).write_bytes(b"".join(rows.splitlines(keepends=True)[:10]) + b'{"torn')
    from cothink.stages import answers

    played, play = [], answers.play

    async def counted(jobs, *rest, **more):
        played.extend(jobs)
        return await play(jobs, *rest, **more)

    monkeypatch.setattr(answers, "play", counted)
    again = cothink.run(recipes / "alone.yaml", twice, out=part)
    assert len(played) == 14 and (part / path).read_bytes() == rows
    assert again.results["levels"]["per_task"] == found["per_task"]


BASELINES = {
    "self-refine": [],
    "debate": [
        "team.workflow={name: debate, agents: 2, rounds: 2, max_context: 512}",
        "team.roles.debater={policy: main, trainable: false, system: Solve., temperature: 0.0, max_tokens: 96}",
    ],
    "vote": ["team.workflow=solo", "stages.0.episodes_per_task=4"],
}


@pytest.mark.parametrize("arm", BASELINES)
def test_the_arms_of_the_tiny_baselines_run(arm, tmp_path):
    """rema §7 rows 39 and 43, R9: each with its token cost."""
    done = cothink.run(
        ROOT / "recipes" / "rema-baselines-tiny.yaml", [*BASELINES[arm], "stages.0.limit=6"], out=tmp_path / "r"
    )
    found = done.results["baseline"]
    each = {"self-refine": 2, "debate": 4, "vote": 1}[arm]
    assert found["calls"] == found["episodes"] * each and found["tokens"] > found["calls"]
    assert ("4" in found["maj_at"]) == (arm == "vote")


@pytest.mark.parametrize("arm", [[], ["team.workflow.selection=flat"], ["team.workflow.decide=judge", JUDGE_ROLE]])
def test_plans_times_solutions_run_from_the_recipe(arm, tmp_path):
    """rema §7 rows 39 and 43, R10."""
    small = ["stages.0.limit=3", "team.workflow.plans=2", "team.workflow.solutions=2"]
    done = cothink.run(ROOT / "recipes" / "rema-rerank-tiny.yaml", [*arm, *small], out=tmp_path / "r")
    found = done.results["rerank"]
    assert found["roles"]["meta"]["turns"] == 6 and found["roles"]["reasoning"]["turns"] == 12
    # the built-in model never learned to judge: what it says is no choice, and the vote decides
    assert (found["roles"].get("judge", {}).get("turns", 0) > 0) == ("judge" in str(arm))


@pytest.mark.parametrize("name", ["baselines-paper", "baselines-tiny", "rerank-paper", "rerank-tiny"])
def test_the_other_arms_load_as_the_recipes_comments_write_them(name):
    path = ROOT / "recipes" / f"rema-{name}.yaml"
    comment = re.sub(r"\n#", " ", path.read_text().partition("\nname:")[0])
    arms = re.split(r"\s{3,}(?=debate|one answer|vote of|all 16|a judge|one plan)|Other arms:|, or a judge:", comment)
    arms = [re.findall(r"(?:team|stages|policies)\.[\w.]+=(?:'[^']*'|[\w.]+)", arm) for arm in arms]
    arms = [[change.replace("'", "").replace("...", "trainable: false") for change in arm] for arm in arms if arm]
    assert len(arms) >= 2
    for arm in arms:
        cothink.Recipe.load(path, arm)


def test_a_server_is_evaluated_like_any_other_model(url, tmp_path, capsys):  # noqa: F811
    assert call(f"openai:big@{url}", "--suite", "wordsums:1", "--limit", 3, "--k", 2, "--out", tmp_path / "o") == 0
    found = json.loads((tmp_path / "o" / "results.json").read_text())["systems"]["big"]
    assert found["verdicts"] == {"unparsable": 1.0} and found["accuracy"] == 0.0  # it says "plan 0" to everything
    assert found["tokens"] == 3 * 2 * 7
    assert "100.0 %" in capsys.readouterr().out
