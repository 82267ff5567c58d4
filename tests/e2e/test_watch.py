"""The watch acting on real, if tiny, weights: an absurd learning rate is noticed, taken back, in the end stopped."""

from __future__ import annotations

import json
import re
import sys
import types

import pytest
import torch

import cothink
from cothink.record import RunError
from cothink.signals import NAMES
from cothink.stages.guard import Collapse


@pytest.fixture(autouse=True)
def reward(monkeypatch):
    """Nothing that can be learned well; `fail_at` makes the n-th call fail."""
    module = types.ModuleType("watch_rewards")
    module.calls, module.fail_at = 0, None

    def sums(task, turn, episode):
        module.calls += 1
        if module.calls == module.fail_at:
            raise RuntimeError("the grader went away")
        return (sum(turn.completion.output_ids) % 7) / 7

    sums.__module__ = "watch_rewards"
    module.sums = sums
    monkeypatch.setitem(sys.modules, "watch_rewards", module)
    return module


@pytest.fixture
def recipe(tiny_folder, tmp_path):
    rows = [{"question": f"{a} + {b}?", "answer": str(a + b)} for a in range(6) for b in range(4)]
    data = tmp_path / "sums.jsonl"
    data.write_text("".join(json.dumps(r) + "\n" for r in rows))
    return {
        "name": "absurd",
        "seed": 1,
        "output": str(tmp_path / "runs"),
        "team": {"workflow": "solo", "roles": {"solver": {"policy": "p", "system": "go", "max_tokens": 12}}},
        "policies": {"p": {"model": str(tiny_folder), "learning_rate": 0.5}},
        "tasks": {"train": {"name": "files", "path": str(data)}},
        "stages": [
            {
                "kind": "rl", "steps": 40, "tasks_per_step": 3, "episodes_per_task": 4, "filter": "none",
                "rewards": [{"name": "watch_rewards:sums"}], "unfinished": "keep",
                "watch": {"mode": "act", "warmup": 11, "every": 5},
            }
        ],
    }  # fmt: skip


def metrics(folder):
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in r.items() if not k.startswith(("time", "seconds"))} for r in rows]


def weights(folder):
    from safetensors.torch import load_file

    state = json.loads((folder / "state.json").read_text())
    return load_file(folder / "checkpoints" / state["checkpoint"] / "p" / "model.safetensors")


def test_an_absurd_learning_rate_stops_the_run(recipe, tmp_path):
    """rema §7 row 40: the run is saved, marked, ends with an error, and is not resumed silently."""
    out = tmp_path / "run"
    with pytest.raises(Collapse, match=r"the watch stopped the run at step \d+: .*newest good state is checkpoints/"):
        cothink.run(recipe, out=out)
    mark = json.loads((out / "stopped.json").read_text())
    rows = metrics(out)
    assert rows[-1]["step"] == mark["step"] == 12 and any(mark["signal"] in line for line in rows[-1]["watch"])
    assert (out / "checkpoints" / mark["good"] / "p" / "model.safetensors").exists()
    with pytest.raises(RunError, match="the watch stopped this run at step 12"):
        cothink.run(recipe, out=out)
    (out / "stopped.json").unlink()  # somebody has looked: the signals that stopped it are heard again 20 steps later
    with pytest.raises(Collapse):
        cothink.run(recipe, out=out)
    assert json.loads((out / "stopped.json").read_text())["step"] > 12


def test_observing_never_interferes(recipe, tmp_path):
    watched = cothink.run(recipe, ["stages.0.watch={mode: observe, warmup: 11}"], out=tmp_path / "observed")
    alone = cothink.run(recipe, ["stages.0.watch=off"], out=tmp_path / "off")
    a, b = metrics(watched.folder), metrics(alone.folder)
    assert any("watch" in r for r in a) and not any(k.startswith("watch") for r in b for k in r)
    assert [{k: v for k, v in r.items() if not k.startswith("watch")} for r in a] == b


QUIET = ", ".join(f"{name}: null" for name in NAMES if name != "repeated")
GENTLE = [
    "policies.p.learning_rate=0.02",  # after about twenty steps it repeats itself
    f"stages.0.watch={{mode: act, warmup: 11, every: 5, limits: {{repeated: [0.02, null], {QUIET}}}}}",
    "stages.0.steps=38",
]


def test_a_warning_takes_the_run_back_at_half_the_rate_and_a_resumed_run_does_the_same(recipe, reward, tmp_path):
    """rema §7 rows 40 and 42: roll-back to the last good checkpoint; interrupted = uninterrupted, bit for bit."""
    whole = cothink.run(recipe, GENTLE, out=tmp_path / "whole")
    rows = metrics(whole.folder)
    ((at, action),) = [(r["step"], r["watch/action"]) for r in rows if "watch/action" in r]
    assert 12 <= at < 36 and [r["p/learning_rate"] for r in rows] == [0.02] * at + [0.01] * (38 - at)
    assert re.fullmatch(r"back to step \d+", action) and int(action.split()[-1]) < at
    assert [r["watch/rollbacks"] for r in rows] == [0] * at + [1] * (38 - at)
    assert [w for r in rows for w in r.get("watch", ())] == rows[at - 1]["watch"]  # then quiet for 20 steps
    assert len(list((whole.folder / "checkpoints").iterdir())) == 2  # good states go when the stage has come through

    reward.calls, reward.fail_at = 0, 12 * (at + 3) + 5  # three steps after going back
    with pytest.raises(RuntimeError, match="the grader went away"):
        cothink.run(recipe, GENTLE, out=tmp_path / "parts")
    reward.fail_at = None
    parts = cothink.run(recipe, GENTLE, out=tmp_path / "parts")
    assert metrics(parts.folder) == rows
    a, b = weights(whole.folder), weights(parts.folder)
    assert all(torch.equal(a[k], b[k]) for k in a)


def test_without_a_way_back_a_warning_stops_and_the_first_signal_is_named(recipe, tmp_path):
    with pytest.raises(Collapse, match=r"no way back: all roll-backs allowed \(0\) are used up"):
        cothink.run(recipe, [*GENTLE, "stages.0.watch.rollbacks=0"], out=tmp_path / "run")
    mark = json.loads((tmp_path / "run/stopped.json").read_text())
    assert mark["first"]["signal"] == mark["signal"] == "repeated/solver" and mark["collapsed"] is False
