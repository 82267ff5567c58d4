"""Two gloo processes of torchrun do what one does: the same updates, figures, files; run by `make test-dist`."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml

from cothink.record import Run, RunError, last_checkpoint

pytestmark = pytest.mark.dist
STRATEGIES = ["ddp"]
REWARD = """
def spread(task, turn, episode):
    return float(sum(turn.completion.output_ids) % 7)
"""
RATE = 1e-4


@pytest.fixture(scope="module")
def place(tmp_path_factory, tiny_folder):
    """A folder with questions, a reward and a recipe of two policies; 3 tasks a step are no even share for two."""
    folder = tmp_path_factory.mktemp("dist")
    rows = [{"question": f"{a} + {b}?", "answer": str(a + b)} for a in range(6) for b in range(4)]
    (folder / "sums.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
    (folder / "own_reward.py").write_text(REWARD)
    files = {"name": "files", "path": str(folder / "sums.jsonl")}
    recipe = {
        "name": "small",
        "seed": 5,
        "team": {
            "workflow": {"name": "rema", "max_turns": 1, "max_context": 200, "stop_on_truncation": False},
            "roles": {n: {"policy": n, "system": n, "max_tokens": 8} for n in ("meta", "reasoning")},
        },
        "policies": {
            "meta": {"model": str(tiny_folder), "learning_rate": RATE},
            "reasoning": {"model": str(tiny_folder), "learning_rate": RATE},
        },
        "tasks": {"train": files, "test": files},
        "stages": [
            {"kind": "evaluate", "on": "test", "label": "before", "limit": 4},
            {"kind": "rl", "steps": 4, "tasks_per_step": 3, "episodes_per_task": 4, "updates_per_step": 2,
             "kl_stop": None, "filter": "none", "unfinished": "keep", "checkpoint_every": 2,
             "loss": {"kl": "k3", "kl_beta": 0.01}, "rewards": [{"name": "own_reward:spread"}],
             "evaluate": {"every": 2, "on": "test", "limit": 4}},
            {"kind": "evaluate", "on": "test", "label": "after", "limit": 4},
        ],
    }  # fmt: skip
    write(folder / "recipe.yaml", recipe)
    return folder


def write(path, recipe):
    path.write_text(yaml.safe_dump(recipe).replace("'on':", "on:"))


def command(processes, *words):
    launcher = ["torch.distributed.run", "--standalone", "--nproc-per-node", str(processes), "-m"]
    return [sys.executable, "-m", *(launcher if processes > 1 else []), "cothink.cli", "run", *map(str, words)]


def run(place, processes, out, *overrides, recipe="recipe.yaml"):
    """Runs the recipe to its end and returns its folder."""
    words = command(processes, place / recipe, *overrides, "--out", out)
    done = subprocess.run(words, cwd=place, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-6000:]
    assert done.stdout.count("done: ") == 1, "one process speaks"
    return out


@pytest.fixture(scope="module")
def runs(place):
    """The same recipe with one process, and with two in every way they can share it."""
    found = {"one": run(place, 1, place / "one")}
    for strategy in STRATEGIES:
        found[strategy] = run(place, 2, place / strategy)
    return found


def weights(folder):
    from safetensors.torch import load_file

    place = last_checkpoint(folder)
    return {f"{n}/{k}": v for n in ("meta", "reasoning") for k, v in load_file(place / n / "model.safetensors").items()}


def apart(a, b):
    return max((a[k] - b[k]).abs().max().item() for k in a)


def metrics(folder):
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    # tokens_computed counts equal beginnings once in each process; time is time
    return [{k: v for k, v in x.items() if not k.startswith(("time", "seconds")) and "computed" not in k}
            for x in lines]  # fmt: skip


def said(folder):
    lines = [x for p in sorted((folder / "episodes").rglob("*.jsonl")) for x in p.read_text().splitlines()]
    return [(e["id"], e["rewards"], [t["text"] for t in e["turns"]]) for e in map(json.loads, lines)]


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_two_processes_make_the_updates_of_one(runs, tiny_folder, strategy):
    one, two = weights(runs["one"]), weights(runs[strategy])
    from safetensors.torch import load_file

    begun = load_file(tiny_folder / "model.safetensors")
    assert apart({f"meta/{k}": v for k, v in begun.items()}, one) > RATE  # eight steps of Adam went somewhere
    assert apart(one, two) < 1e-6


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_two_processes_find_the_figures_of_one(runs, strategy):
    one, two = metrics(runs["one"]), metrics(runs[strategy])
    assert [r["step"] for r in one] == [r["step"] for r in two] == [1, 2, 3, 4]
    for a, b in zip(one, two, strict=True):
        assert a.keys() == b.keys()
        gaps = {k for k in a if "engine_gap" in k}  # rounding itself: of this size, not of this value
        assert all(max(a[k], b[k]) < 1e-4 for k in gaps)
        assert {k: v for k, v in a.items() if k not in gaps} == pytest.approx(
            {k: v for k, v in b.items() if k not in gaps}, rel=1e-3, abs=1e-6
        )
    assert said(runs["one"]) == said(runs[strategy])
    left = [json.loads((runs[k] / "results.json").read_text()) for k in ("one", strategy)]
    assert left[0]["after"]["per_task"] == left[1]["after"]["per_task"]
    assert json.loads((runs[strategy] / "manifest.json").read_text())["processes"] == 2


def midway(folder, out):
    """A copy of a finished run as it stood at step 2: without what came later it goes on from there."""
    shutil.copytree(folder, out)
    shutil.rmtree(last_checkpoint(out))
    assert [p.name for p in (out / "checkpoints").iterdir()] == ["stage01-step000002"]
    return out


WAYS = [("one", 2, "ddp"), ("ddp", 1, "ddp"), ("ddp", 2, "ddp")]


@pytest.mark.parametrize("begun, processes, strategy", WAYS)
def test_a_checkpoint_of_one_way_goes_on_in_another(runs, place, begun, processes, strategy):
    folder = midway(runs[begun], place / f"{begun}-then-{processes}-{strategy}")
    run(place, processes, folder)
    same = begun == strategy and processes == 2
    assert apart(weights(runs[begun]), weights(folder)) <= (0.0 if same else 1e-6)  # in the same way: bit for bit
    assert [r["step"] for r in metrics(folder)] == [1, 2, 3, 4]
    if same:
        assert metrics(folder) == metrics(runs[begun])


def process_of(rank, launcher):
    """The process that a launcher started as number `rank`."""
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            parent = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
            words = (folder / "environ").read_bytes().split(b"\0")
        except OSError:  # it has ended
            continue
        if parent == launcher and f"RANK={rank}".encode() in words:
            return int(folder.name)
    raise AssertionError(f"no process has RANK={rank}")


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("rank", [0, 1])
def test_a_killed_process_ends_the_other_and_the_run_resumes(place, rank, strategy):
    out = place / f"killed-{rank}-{strategy}"
    words = ("stages.1.steps=16", "stages.1.checkpoint_every=2")
    launcher = subprocess.Popen(
        command(2, place / "recipe.yaml", *words, "--out", out),
        cwd=place, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip
    log, ends = out / "metrics.jsonl", time.monotonic() + 120
    while time.monotonic() < ends and not (log.exists() and log.read_text().count("\n") >= 3):
        time.sleep(0.02)
    with pytest.raises(RunError, match="works in"):  # locked, by one process for all of them
        Run(out, "", 0)
    os.kill(process_of(rank, launcher.pid), signal.SIGKILL)
    output, _ = launcher.communicate(timeout=60)
    assert launcher.returncode != 0
    assert "lost the others" in output or "another process has ended" in output, output[-3000:]
    assert json.loads((out / "state.json").read_text())["step"] >= 2
    run(place, 2, out, *words)
    assert [r["step"] for r in metrics(out)] == list(range(1, 17))


def test_a_stage_for_one_process_is_refused(place):
    recipe = yaml.safe_load((place / "recipe.yaml").read_text().replace(" on:", " 'on':"))
    recipe["stages"].insert(0, {"kind": "collect", "on": "train", "limit": 2, "branching": [2, 2, 2]})
    recipe["team"] = {"workflow": {"name": "malt"}, "roles": dict.fromkeys(("generator", "verifier", "refiner"), None)}
    recipe["team"]["roles"] = {name: {"policy": "meta"} for name in recipe["team"]["roles"]}
    del recipe["policies"]["reasoning"]
    write(place / "collect.yaml", recipe)
    words = command(2, place / "collect.yaml", "--out", place / "refused")
    done = subprocess.run(words, cwd=place, capture_output=True, text=True, timeout=120)
    assert done.returncode != 0
    assert "stage 0 (collect) runs in one process, and there are 2" in done.stderr, done.stderr[:3000]


def test_a_recipe_with_a_mistake_is_named_once(place):
    words = command(2, place / "recipe.yaml", "stages.1.filter=all", "--out", place / "refused")
    done = subprocess.run(words, cwd=place, capture_output=True, text=True, timeout=120)
    assert done.returncode != 0
    assert done.stderr.count("unknown value 'all'") == 1
