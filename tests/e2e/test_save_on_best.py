"""`save_on: best`: what an rl stage leaves behind is the state of its best evaluation, across a failure too."""

from __future__ import annotations

import json
import sys
import types
from typing import Any

import pytest
import torch

import cothink
from cothink.resolve import RecipeError

ACCURACIES = (0.2, 0.5, 0.5, 0.3)


@pytest.fixture(autouse=True)
def reward(monkeypatch):
    """Something to learn; `fail_at` makes the n-th call fail."""
    module: Any = types.ModuleType("best_rewards")
    module.calls, module.fail_at = 0, None

    def sums(task, turn, episode):
        module.calls += 1
        if module.calls == module.fail_at:
            raise RuntimeError("the grader went away")
        return (sum(turn.completion.output_ids) % 7) / 7

    sums.__module__ = "best_rewards"
    module.sums = sums
    monkeypatch.setitem(sys.modules, "best_rewards", module)
    return module


@pytest.fixture(autouse=True)
def tests(monkeypatch):
    """Evaluations with the accuracies above, whoever asks and however often."""

    async def measure(session, on, *, title, **_):
        value = ACCURACIES[int(title.split()[-1]) - 1]
        return {"accuracy": value, "low": value, "high": value, "n": 4, "rounds": 1.0}, []

    monkeypatch.setattr("cothink.stages.rl.measure", measure)
    monkeypatch.setattr("cothink.stages.rl.sentence", lambda values: f"accuracy {values['accuracy']}")


@pytest.fixture
def recipe(tiny_folder, tmp_path):
    data = tmp_path / "sums.jsonl"
    data.write_text("".join(json.dumps({"question": f"{a} + 1?", "answer": str(a + 1)}) + "\n" for a in range(12)))
    return {
        "name": "best",
        "team": {"workflow": "solo", "roles": {"solver": {"policy": "p", "system": "go", "max_tokens": 8}}},
        "policies": {"p": {"model": str(tiny_folder), "learning_rate": 0.01, "scheduler": "constant"}},
        "tasks": {"train": {"name": "files", "path": str(data)}, "test": {"name": "files", "path": str(data)}},
        "stages": [
            {
                "kind": "rl", "steps": 4, "tasks_per_step": 2, "episodes_per_task": 2, "filter": "none",
                "rewards": [{"name": "best_rewards:sums"}], "unfinished": "keep", "checkpoint_every": 1,
                "evaluate": {"every": 1}, "save_on": "best",
            }
        ],
    }  # fmt: skip


def weights(folder):
    from safetensors.torch import load_file

    state = json.loads((folder / "state.json").read_text())
    return load_file(folder / "checkpoints" / state["checkpoint"] / "p" / "model.safetensors")


def same(one, other):
    return one.keys() == other.keys() and all(torch.equal(one[k], other[k]) for k in one)


def test_the_earliest_of_the_best_evaluations_is_left_behind(recipe, tmp_path):
    best = weights(cothink.run(recipe, out=tmp_path / "best").folder)
    two = weights(cothink.run(recipe, ["stages.0.steps=2", "stages.0.save_on=last"], out=tmp_path / "two").folder)
    last = weights(cothink.run(recipe, ["stages.0.save_on=last"], out=tmp_path / "last").folder)
    assert same(best, two) and not same(best, last)
    assert len([*(tmp_path / "best" / "checkpoints").iterdir()]) == 2, "the kept state goes with the others at the end"


def test_it_outlives_retention_and_a_failure(recipe, reward, tmp_path):
    whole = weights(cothink.run(recipe, out=tmp_path / "whole").folder)
    reward.calls, reward.fail_at = 0, 14  # in the fourth step; two checkpoints are newer than the best by then
    with pytest.raises(RuntimeError, match="the grader went away"):
        cothink.run(recipe, out=tmp_path / "cut")
    assert json.loads((tmp_path / "cut" / "state.json").read_text())["progress"]["best"]["step"] == 2
    reward.fail_at = None
    assert same(weights(cothink.run(recipe, out=tmp_path / "cut").folder), whole)


@pytest.mark.parametrize(("change", "what"), [("~stages.0.evaluate", "evaluate: {every: 10}"),
                                              ("stages.0.evaluate.every=5", "every: 4 or less")])  # fmt: skip
def test_without_an_evaluation_there_is_no_best(recipe, change, what, tmp_path):
    with pytest.raises(RecipeError, match="save_on") as caught:
        cothink.run(recipe, [change], out=tmp_path / "run")
    assert what in str(caught.value)
