"""Recipes whose engine is a pool of Ray workers: the run of the local engine, whole or with a worker killed."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import yaml

import cothink

pytestmark = pytest.mark.pool
pytest.importorskip("ray", reason="pip install 'cothink[ray]'")

from cothink.engines import ray as pools  # noqa: E402

POOL = {"name": "ray", "workers": 2, "inner": "local"}
SEEDS, STEPS = (1, 2, 3), 6


def recipe(steps=2, engine=POOL, **stage):
    roles = {"meta": ("meta", "Plan."), "reasoning": ("reasoning", "Follow the plan.")}
    return {
        "name": "pool",
        "team": {
            "workflow": {"name": "rema", "max_turns": 1},
            "roles": {n: {"policy": p, "system": text, "max_tokens": 40} for n, (p, text) in roles.items()},
        },
        "policies": {n: {"model": "builtin:tiny", "learning_rate": 2e-4} for n in roles},
        "engine": engine,
        "tasks": {"train": {"name": "wordsums", "levels": [2, 4]},
                  "test": {"name": "wordsums", "split": "test", "levels": [2, 4], "count": 32}},
        "stages": [{"kind": "rl", "steps": steps, "tasks_per_step": 8, "episodes_per_task": 8, "filter": "none",
                    "checkpoint_every": 1, "preset": "stable_v0", **stage},
                   {"kind": "evaluate", "on": "test", "label": "after"}],
    }  # fmt: skip


def metrics(folder):
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in x.items() if not k.startswith(("time", "seconds", "engine/"))} for x in lines]


def counted(folder, key):
    return sum(json.loads(line).get(f"engine/{key}", 0) for line in (folder / "metrics.jsonl").read_text().splitlines())


def episodes(folder, step):
    rows = [json.loads(x) for x in (folder / "episodes" / "00-rl" / f"{step:06d}.jsonl").read_text().splitlines()]
    return {e["id"]: [t["text"] for t in e["turns"]] for e in rows}


def alike(one, two):
    """Metrics of two runs whose engines round differently: equal but for the size of rounding itself."""
    assert one.keys() == two.keys()
    gaps = {k for k in one if k.endswith(("/engine_gap", "/engine_gap_max", "/mismatch"))}
    assert all(max(one[k], two[k]) < 1e-4 for k in gaps)
    rest = [{k: v for k, v in x.items() if k not in gaps} for x in (one, two)]
    assert rest[0] == pytest.approx(rest[1], rel=1e-3, abs=1e-5)


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """The same recipe with the local engine and with a pool."""
    folder = tmp_path_factory.mktemp("runs")
    return {
        name: cothink.run(recipe(engine=engine), out=folder / name).folder
        for name, engine in (("local", "local"), ("ray", POOL))
    }


def test_a_run_with_a_pool_is_the_run_of_the_local_engine(runs):
    local, pool = runs["local"], runs["ray"]
    assert len(episodes(pool, 1)) == 64 and episodes(local, 1) == episodes(pool, 1)
    alike(metrics(local)[0], metrics(pool)[0])
    assert counted(pool, "workers_lost") == counted(pool, "staleness") == 0
    kept = [json.loads((folder / "results.json").read_text())["after"] for folder in (local, pool)]
    assert kept[0]["accuracy"] == pytest.approx(kept[1]["accuracy"], abs=2 / 32)


class Heard(list):
    """What a run prints, line by line."""

    is_terminal = False

    def print(self, text, **how):
        self.append(text)


def test_a_worker_killed_in_the_middle_of_a_step_loses_nothing_and_is_told(runs, tmp_path, monkeypatch):
    held, said, victims = [], Heard(), []

    class Caught(pools.RayEngine):
        def __init__(self, *given):
            super().__init__(*given)
            held.append(self)

    def murder():
        while not held:
            time.sleep(0.01)
        (engine,) = held
        victims.append(engine._ray.get(engine.pool.seats[1].worker.actor.process.remote()))
        while engine.pool.seats[1].requests < 20:
            time.sleep(0.0005)
        os.kill(victims[0], signal.SIGKILL)

    monkeypatch.setattr(pools, "RayEngine", Caught)
    thread = threading.Thread(target=murder)
    thread.start()
    folder = cothink.run(recipe(), out=tmp_path / "killed", console=said).folder
    thread.join()
    whole, killed = runs["ray"], folder
    assert counted(killed, "workers_lost") == 1 and counted(killed, "asked_again") >= 10
    assert counted(killed, "staleness") == 0
    (line,) = [line for line in said if "has ended" in line]
    assert line.startswith(f"engine ray: worker 2 of 2 has ended (pid {victims[0]}") and "asked again" in line
    assert "failed/error" not in metrics(killed)[0]
    assert episodes(whole, 1) == episodes(killed, 1) and len(episodes(killed, 2)) == 64
    alike(metrics(whole)[0], metrics(killed)[0])


def command(folder, out, *words):
    (folder / "recipe.yaml").write_text(yaml.safe_dump(recipe(steps=6)).replace("'on':", "on:"))
    return [sys.executable, "-m", "cothink.cli", "run", str(folder / "recipe.yaml"), *words, "--out", str(out)]


def family(number):
    """The processes that a process started, and theirs."""
    parents = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            parents[int(folder.name)] = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
        except OSError:  # it has ended
            continue
    found = {number}
    while more := {child for child, parent in parents.items() if parent in found} - found:
        found |= more
    return found - {number}


@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGINT])
def test_a_stopped_run_leaves_its_checkpoint_and_no_worker_and_goes_on(tmp_path, how):
    out = tmp_path / "stopped"
    words = command(tmp_path, out)
    run = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True)
    log, ends = out / "metrics.jsonl", time.monotonic() + 120
    while time.monotonic() < ends and not (log.exists() and log.read_text().count("\n") >= 2):
        time.sleep(0.05)
    children = family(run.pid)
    assert len(children) >= 4  # Ray's own, and two workers
    (os.killpg if how is signal.SIGINT else os.kill)(run.pid, how)  # Ctrl-C reaches everybody, a scheduler only us
    said, _ = run.communicate(timeout=60)
    assert run.returncode == 130, said[-3000:]
    done = json.loads((out / "state.json").read_text())["step"]
    assert 2 <= done < 6
    ends = time.monotonic() + 30
    while time.monotonic() < ends and any(Path(f"/proc/{child}").exists() for child in children):
        time.sleep(0.2)
    assert not [child for child in children if Path(f"/proc/{child}").exists()]
    done = subprocess.run(words, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:]
    assert [row["step"] for row in metrics(out)] == [1, 2, 3, 4, 5, 6]
    assert re.search(r"resuming .* at stage 0, step \d", done.stdout)


@pytest.fixture(scope="module")
def curves(tmp_path_factory):
    """Accuracy of each step, by engine and seed."""
    folder = tmp_path_factory.mktemp("curves")
    return {
        name: [
            [
                x["accuracy"]
                for x in metrics(cothink.run(recipe(STEPS, engine), out=folder / f"{name}{s}", seed=s).folder)
            ]
            for s in SEEDS
        ]
        for name, engine in (("local", "local"), ("ray", POOL))
    }


def test_curves_of_three_seeds_cannot_be_told_apart(curves):
    """Paired by seed and step: the exact sign-flip test of the 18 differences does not reject at 5 %, and the mean
    difference is below two points of accuracy. The curves themselves must have gone somewhere to say anything."""
    from itertools import product

    import numpy as np

    one, two = (np.array(curves[name]) for name in ("local", "ray"))
    assert one.shape == (len(SEEDS), STEPS) and one.std() > 0.02
    apart = two - one
    dice = np.random.default_rng(0)
    flips = dice.choice([-1.0, 1.0], (20_000, apart.size))
    p = float(np.mean(np.abs(flips @ apart.ravel()) >= abs(apart.sum()) - 1e-12))
    by_seed = apart.mean(1)
    exact = np.mean([abs(sum(s * d for s, d in zip(signs, by_seed))) >= abs(by_seed.sum()) - 1e-12
                     for signs in product((-1, 1), repeat=len(SEEDS))])  # fmt: skip
    print(f"mean difference {apart.mean():+.4f}, by seed {by_seed.round(4)}, p {p:.3f} (steps), {exact:.2f} (seeds)")
    assert p > 0.05 and abs(apart.mean()) < 0.02
