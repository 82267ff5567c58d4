"""The whole: a recipe from check to results on a tiny random model; resumed equals uninterrupted; the front door."""

from __future__ import annotations

import asyncio
import itertools
import json
import sys
import types

import pytest
import torch

import cothink
from cothink.record import Run, RunError, last_checkpoint


@pytest.fixture
def recipe(tiny_folder, tmp_path):
    """A small two-policy run: evaluate, four alternating steps, evaluate."""
    rows = [{"question": f"{a} + {b}?", "answer": str(a + b)} for a in range(6) for b in range(4)]
    data = tmp_path / "sums.jsonl"
    data.write_text("".join(json.dumps(r) + "\n" for r in rows))
    return {
        "name": "small",
        "seed": 5,
        "output": str(tmp_path / "runs"),
        "team": {
            "workflow": {"name": "rema", "max_turns": 1, "max_context": 200, "stop_on_truncation": False},
            "roles": {
                "meta": {"policy": "meta", "system": "plan", "max_tokens": 8},
                "reasoning": {"policy": "reasoning", "system": "solve", "max_tokens": 8},
            },
        },
        "policies": {
            "meta": {"model": str(tiny_folder), "learning_rate": 1e-2},
            "reasoning": {"model": str(tiny_folder), "learning_rate": 1e-2},
        },
        "tasks": {name: {"name": "files", "path": str(data)} for name in ("train", "test")},
        "stages": [
            {"kind": "evaluate", "on": "test", "label": "before", "limit": 6},
            {
                "kind": "rl",
                "steps": 4,
                "tasks_per_step": 3,
                "episodes_per_task": 4,
                "updates_per_step": 2,
                "kl_stop": None,
                "schedule": {"name": "alternate", "every": 1, "first": "reasoning"},
                "rewards": [{"name": "house_rewards:length"}],
                "unfinished": "keep",
                "filter": "none",
            },
            {"kind": "evaluate", "on": "test", "label": "after", "limit": 6},
        ],
    }


@pytest.fixture(autouse=True)
def rewards(monkeypatch):
    """A user's own reward module; `fail_at` makes the n-th call fail."""
    module = types.ModuleType("house_rewards")
    module.calls, module.fail_at = 0, None

    def length(task, turn, episode):
        module.calls += 1
        if module.calls == module.fail_at:
            raise RuntimeError("the grader went away")
        return -float(len(turn.completion.output_ids)) + 0.1 * (sum(turn.completion.output_ids) % 7)

    length.__module__ = "house_rewards"
    module.length = length
    monkeypatch.setitem(sys.modules, "house_rewards", module)
    return module


def weights(folder):
    from safetensors.torch import load_file

    place = last_checkpoint(folder)
    return {n: load_file(place / n / "model.safetensors") for n in ("meta", "reasoning")}


def metrics(folder):
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in r.items() if not k.startswith(("time", "seconds"))} for r in rows]


def test_a_run_leaves_everything_behind(recipe, tiny_folder):
    """rema §7 row 41."""
    done = cothink.run(recipe)
    assert set(done.results) == {"before", "after"}
    assert done.results["after"]["n"] == 6 and 0 <= done.results["after"]["low"] <= done.results["after"]["high"] <= 1
    rows = metrics(done.folder)
    assert [r["step"] for r in rows] == [1, 2, 3, 4]
    trained = [[p for p in ("meta", "reasoning") if f"{p}/updates" in r] for r in rows]
    assert trained == [["reasoning"], ["meta"], ["reasoning"], ["meta"]]  # row 19: the sequence, and who starts
    assert all(r[f"{p}/engine_gap_max"] < 1e-3 for r, (p,) in zip(rows, trained))
    assert {"reward", "rounds", "finish/finished", "finish/truncated", "meta/tokens_per_turn", "trained_share"} <= set(
        rows[0]
    )
    manifest = json.loads((done.folder / "manifest.json").read_text())
    assert manifest["seed"] == 5 and manifest["versions"]["torch"] != "not installed"
    (first, *_) = [json.loads(x) for x in (done.folder / "episodes/01-rl/000001.jsonl").read_text().splitlines()]
    assert [t["role"] for t in first["turns"]] == ["meta", "reasoning"]
    assert first["turns"][1]["return"] == pytest.approx(sum(s["value"] for s in first["rewards"]))
    assert first["turns"][1]["advantage"] is not None
    _grouped_by_task(done.folder)
    assert cothink.Recipe.load(done.folder / "recipe.yaml") == cothink.Recipe.load(recipe)
    assert cothink.run(recipe).results == done.results  # a finished run is not run again
    assert metrics(done.folder) == rows


def _grouped_by_task(folder):
    """Episodes of training and of tests: one task after the other, each with its grade, rewards and end."""
    for name in ("01-rl/000001", "00-before/000000"):
        rows = [json.loads(x) for x in (folder / f"episodes/{name}.jsonl").read_text().splitlines()]
        tasks = [row["task"] for row in rows]
        assert sum(a != b for a, b in itertools.pairwise(tasks)) == len(set(tasks)) - 1 > 0
        for row in rows:
            assert row["verdict"] in ("right", "wrong", "unparsable") and row["accuracy"] in (0.0, 1.0)
            assert row["finish"] and all(t["finish_reason"] for t in row["turns"]) and "rewards" in row


def test_a_frozen_policy_stays_bit_identical(recipe, tiny_folder):
    from safetensors.torch import load_file

    recipe["stages"][1]["schedule"]["every"] = 10
    done = cothink.run(recipe)
    start, now = load_file(tiny_folder / "model.safetensors"), weights(done.folder)
    assert all(torch.equal(start[k], now["meta"][k]) for k in start)
    assert not all(torch.equal(start[k], now["reasoning"][k]) for k in start)


@pytest.mark.parametrize("damaged", [False, True])
def test_a_failed_and_resumed_run_equals_an_uninterrupted_one(recipe, rewards, tmp_path, damaged):
    """rema §7 row 42; a checkpoint that is not what was written is passed over for the one before."""
    recipe["stages"][1]["checkpoint_every"] = 1
    whole = cothink.run(recipe, out=tmp_path / "whole")
    rewards.calls, rewards.fail_at = 0, 12 * 2 + 5  # in the third step
    with pytest.raises(RuntimeError, match="the grader went away"):
        cothink.run(recipe, out=tmp_path / "parts")
    state = json.loads((tmp_path / "parts/state.json").read_text())
    assert (state["stage"], state["step"]) == (1, 2)
    rewards.fail_at = None
    if damaged:
        newest = last_checkpoint(tmp_path / "parts") / "meta" / "model.safetensors"
        newest.write_bytes(newest.read_bytes()[:-100])
    parts = cothink.run(recipe, out=tmp_path / "parts")
    assert metrics(parts.folder) == metrics(whole.folder)
    a, b = weights(whole.folder), weights(parts.folder)
    assert all(torch.equal(a[n][k], b[n][k]) for n in a for k in a[n])
    keep = ("accuracy", "per_task", "tokens")
    assert all(whole.results["after"][k] == parts.results["after"][k] for k in keep)


def test_bad_golds_are_reported_and_left_out(recipe, tmp_path):
    data = tmp_path / "sums.jsonl"
    rows = data.read_text() + json.dumps({"question": "empty?", "answer": ""}) + "\n"
    rows += json.dumps({"question": "odd?", "answer": "about five"}) + "\n"
    data.write_text(rows)
    for block in recipe["tasks"].values():
        block["kind"] = "number"
    done = cothink.run(recipe, ["stages.1.steps=1"])
    found = json.loads((done.folder / "data.json").read_text())["train"]
    assert found["tasks"] == 24
    told = "\n".join(found["loading"] + found["bad_golds"])
    assert "24" in told and "about five" in told


def test_trackers_get_every_step(recipe):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    done = cothink.run({**recipe, "trackers": ["tensorboard"]}, ["stages.1.steps=2"])
    places = {str(f.parent) for f in (done.folder / "trackers").rglob("events.*")}
    (events,) = [e for e in (EventAccumulator(p).Reload() for p in places) if "reward" in e.Tags()["scalars"]]
    assert [e.step for e in events.Scalars("reward")] == [1, 2]
    assert [e.value for e in events.Scalars("reward")] == pytest.approx([r["reward"] for r in metrics(done.folder)])


def test_a_checkpoint_is_never_removed_before_its_successor_is_written(recipe, tmp_path):
    done = cothink.run(recipe, ["stages.1.checkpoint_every=2"], out=tmp_path / "run")
    kept = last_checkpoint(done.folder)
    record = Run(done.folder, (done.folder / "recipe.yaml").read_text(), 5)

    class Broken:
        def save(self, folder):
            raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        record.checkpoint({"meta": Broken()}, {"stage": 1, "step": 4})
    record.close()
    assert last_checkpoint(done.folder) == kept and (kept / "meta" / "model.safetensors").exists()


def test_a_failing_evaluation_inside_the_stage_loses_no_step(recipe, monkeypatch, tmp_path):
    from cothink.stages import rl

    async def fails(*args):
        raise RuntimeError("no evaluation today")

    monkeypatch.setattr(rl, "_evaluate", fails)
    recipe["stages"][1]["evaluate"] = {"every": 2, "on": "test", "limit": 2}
    with pytest.raises(RuntimeError, match="no evaluation today"):
        cothink.run(recipe, out=tmp_path / "run")
    assert json.loads((tmp_path / "run/state.json").read_text())["step"] == 2
    assert [r["step"] for r in metrics(tmp_path / "run")] == [1, 2]


def test_a_folder_of_another_recipe_is_refused(recipe, tmp_path):
    cothink.run(recipe, out=tmp_path / "run")
    with pytest.raises(RunError, match="holds a run of another recipe"):
        cothink.run(recipe, ["stages.1.steps=5"], out=tmp_path / "run")


def test_one_shared_policy_learns_from_both_roles(recipe):
    recipe["policies"] = {"one": recipe["policies"]["meta"]}
    for role in recipe["team"]["roles"].values():
        role["policy"] = "one"
    recipe["stages"][1] |= {"schedule": "joint", "updates_per_step": 1}
    del recipe["stages"][1]["kl_stop"]
    rows = metrics(cothink.run(recipe).folder)
    # row 21: 2 x 3 tasks x 4 plays in one update
    assert [r["samples"] for r in rows] == [24] * 4 and all(r["one/updates"] == 1 for r in rows)


def test_team_solves_from_plain_code_and_inside_a_running_loop(recipe):
    done = cothink.run(recipe, ["stages.1.steps=1"])
    team = cothink.load_team(done.folder)
    plain = team.solve("1 + 1?")
    assert [t.role for t in plain.turns] == ["meta", "reasoning"] and plain.text == plain.turns[-1].text

    async def notebook():
        inside = team.solve("1 + 1?")
        awaited = await team.solve("1 + 1?")
        free = await team.asolve("1 + 1?")
        return inside, awaited, free

    assert all(isinstance(s, cothink.Solution) for s in asyncio.run(notebook()))
    untrained = cothink.load_team(recipe)
    assert untrained.solve("1 + 1?").finish in ("finished", "truncated")
    with pytest.raises(ValueError, match="empty"):
        team.solve("  ")
    assert cothink.evaluate(done.folder, limit=3)["n"] == 3
    with pytest.raises(RunError, match="no task set 'val'"):
        cothink.evaluate(done.folder, on="val")
