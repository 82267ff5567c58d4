from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace as NS

import pytest

from cothink import api, cli, models, preview
from cothink.recipe import Recipe

ROOT = Path(__file__).parents[2]
RECIPES = sorted((ROOT / "recipes").glob("*.yaml"))
HEAVY = ("torch", "transformers", "peft", "sympy", "pandas")

SMALL = """
name: small
team:
  workflow: {name: rema, max_turns: 1}
  roles:
    meta: {policy: meta, system: "Plan.", max_tokens: 32}
    reasoning: {policy: reasoning, system: "Follow the plan.", max_tokens: 64}
policies: {meta: {model: builtin:tiny, learning_rate: 3e-4}, reasoning: {model: builtin:tiny, learning_rate: 3e-4}}
tasks: {train: {name: wordsums, count: 300}, test: {name: wordsums, split: test, count: 50}}
stages:
  - {kind: evaluate, on: test, limit: 20}
  - kind: rl
    steps: 10
    tasks_per_step: 4
    episodes_per_task: 8
    schedule: {name: alternate, every: 5}
"""


@pytest.fixture
def small(tmp_path):
    path = tmp_path / "small.yaml"
    path.write_text(SMALL)
    return path


def call(*arguments) -> int:
    with pytest.raises(SystemExit) as left:
        cli.main([str(a) for a in arguments])
    return int(left.value.code or 0)


def fresh(*arguments: object) -> subprocess.CompletedProcess:
    """Runs the command line in a new process, which reports the heavy modules it has imported."""
    code = (
        "import sys, atexit; from cothink.cli import main\n"
        f"atexit.register(lambda: print([m for m in {HEAVY!r} if m in sys.modules], file=sys.stderr))\n"
        "main()"
    )
    return subprocess.run([sys.executable, "-c", code, *map(str, arguments)], capture_output=True, text=True)


def test_help_lists_every_command_and_imports_nothing_heavy():
    done = fresh("--help")
    assert done.returncode == 0 and done.stderr.strip() == "[]"
    for command in ("run", "check", "evaluate", "solve", "chat", "serve", "export", "models", "new", "env", "verify"):
        assert f"  {command} " in done.stdout


def test_check_says_the_sizes_in_words_without_torch(small):
    done = fresh("check", small)
    assert done.returncode == 0, done.stderr
    assert done.stderr.strip() == "[]"
    for words in (
        "20 rows x 1 play = 20 episodes, at most 40 calls (1 of meta, 1 of reasoning an episode) and 1,920 new tokens",
        "4 rows x 8 plays = 32 episodes, at most 64 calls",
        "64 samples (32 of meta + 32 of reasoning), 1 update per policy",
        "up to 3 times as many",
        "one policy learns at a time, 5 steps each, meta first",
        "in all 40 rows, 0.13 passes over train, 320 episodes, at most 640 calls and 30,720 new tokens",
        "300 rows",
        "(I01)",
        "1 (answers 0) reasoning:",
        "finished; graded: turn 1",
    ):
        assert words in done.stdout, (words, done.stdout)


def test_check_counts_the_calls_of_an_episode_nobody_ends(small, capsys):
    assert call("check", small, "team.workflow.max_turns=5") == 0
    out = capsys.readouterr().out
    assert "20 episodes, at most 200 calls (5 of meta, 5 of reasoning an episode) and 9,600 new tokens" in out
    assert "finished; graded: turn 1" in out


def test_the_size_of_a_model_is_read_from_its_files(tmp_path, small, capsys):
    import numpy
    from safetensors.numpy import save_file

    weights = {"a": numpy.zeros((1000, 300), "float32"), "b": numpy.zeros(7, "float32")}
    save_file(weights, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text("{}")
    assert preview.parameters(tmp_path) == 300_007
    model = f"policies.meta.model={tmp_path}"
    assert call("check", small, model) == 0
    assert "full weights, 300,007 parameters, 1.2 MB, 4.8 MB with gradients and AdamW" in capsys.readouterr().out
    assert call("check", small, model, "policies.meta.lora_r=4") == 0
    assert "LoRA r 4, 300,007 parameters, 1.2 MB plus the adapter" in capsys.readouterr().out


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_every_recipe_checks(path, capsys):
    assert call("check", path) == 0, capsys.readouterr().err
    again = Recipe.load(path)
    assert capsys.readouterr().out.endswith("ok\n") and again.name == path.stem


def test_the_papers_recipes_are_there():
    assert {"rema-single-paper", "rema-multi-paper", "rema-multi-ablation-paper"} <= {path.stem for path in RECIPES}


def test_the_other_arms_of_the_ablation_load():
    path = ROOT / "recipes" / "rema-multi-ablation-paper.yaml"
    Recipe.load(path, ["stages.1.loss.ratio=token"])
    Recipe.load(path, ["team.roles.meta.max_tokens=1024", "team.workflow.max_context=3072"])
    apart = ["team.roles.meta.policy=meta", "team.roles.reasoning.policy=reasoning", "~policies.main"]
    apart += [f"policies.{name}.model=./m" for name in ("meta", "reasoning")]
    recipe = Recipe.load(path, [*apart, "stages.1.schedule={name: alternate, every: 10, first: meta}"])
    assert list(recipe.policies) == ["meta", "reasoning"]


def test_a_recipe_error_is_exit_code_2_with_the_place_and_the_nearest_name(small, capsys):
    for command in ("check", "run"):
        assert call(command, small, "stages.1.stepz=5") == 2
        err = capsys.readouterr().err
        assert "stages.1.stepz: unknown key" in err and "did you mean 'steps'?" in err and "Traceback" not in err
    assert call("check", small.with_name("smal.yaml")) == 2
    assert call("check", small, "tasks.test.levels=[0, 99]") == 2
    assert "tasks.test" in capsys.readouterr().err
    assert call("nothing") == 2
    assert call("check") == 2


def test_a_failed_run_is_exit_code_1_and_an_interrupted_one_130(small, capsys, monkeypatch):
    def fails(error):
        def run(*args, **kwargs):
            raise error

        monkeypatch.setattr(api, "run", run)
        return call("run", small)

    assert fails(ZeroDivisionError("lost")) == 1
    assert "Traceback" in capsys.readouterr().err
    assert fails(models.ModelError("no such model; write builtin:tiny")) == 1
    assert capsys.readouterr().err == "error: no such model; write builtin:tiny\n"
    assert fails(KeyboardInterrupt()) == 130
    assert capsys.readouterr().err.strip() == "interrupted"


def test_run_passes_overrides_and_folder(small, tmp_path, capsys, monkeypatch):
    seen = []

    def run(recipe, *, out, console):
        seen.append((recipe, out))
        return NS(folder=out, results={})

    monkeypatch.setattr(api, "run", run)
    assert call("run", small, "stages.1.steps=3", "seed=4", "--out", tmp_path / "r") == 0
    recipe, out = seen[0]
    assert (recipe.stages[1].steps, recipe.seed, out) == (3, 4, tmp_path / "r")
    assert f"done: {tmp_path / 'r'}" in capsys.readouterr().out
    assert call("run", small, "stages.1.unfinished=zero", "--out", tmp_path / "r") == 0
    assert "[W08]" in capsys.readouterr().err


def test_verify_grades_one_answer_and_a_file_in_order(tmp_path, capsys):
    for gold, text, verdict in (("18", "so \\boxed{18.0}", "right"), ("18", "\\boxed{17}", "wrong")):
        assert call("verify", "--kind", "number", "--gold", gold, "--text", text) == 0
        assert json.loads(capsys.readouterr().out)["verdict"] == verdict
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    rows = [("number", "3", "\\boxed{3}"), ("letter", "B", "\\boxed{A}"), ("text", "Paris", "\\boxed{Paris}")]
    lines = [json.dumps({"kind": k, "gold": g, "text": t}) for k, g, t in rows]
    source.write_text("\n".join([*lines, "not json", json.dumps({"kind": "verse", "gold": "1", "text": "1"})]))
    assert call("verify", "--file", source, "--out", target) == 0
    found = [json.loads(line)["verdict"] for line in target.read_text().splitlines()]
    assert found == ["right", "wrong", "right", "error", "error"]
    assert call("verify", "--gold", "1") == 2
    assert call("verify", "--file", tmp_path / "none", "--out", target) == 2


def test_new_writes_a_part_that_a_recipe_can_name(small, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert call("new", "reward", "curt") == 0
    assert "rewards: [{name: 'curt:reward'}]" in capsys.readouterr().out
    assert call("check", small, "stages.1.rewards=[{name: 'curt:reward', limit: 5}]") == 0
    assert call("new", "reward", "curt") == 2
    assert call("new", "rewrd", "other") == 2
    assert "did you mean 'reward'?" in capsys.readouterr().err


def test_models_and_env_print_what_a_person_needs(capsys):
    assert call("models") == 0
    assert "builtin:tiny" in capsys.readouterr().out
    assert call("models", "fetch") == 2
    assert call("env") == 0
    out = capsys.readouterr().out
    assert all(word in out for word in ("cothink ", "python ", "torch ", "cpus ", "gpus "))
