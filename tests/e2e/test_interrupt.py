"""Ctrl-C or SIGTERM in the middle of a run: exit code 130, a checkpoint, and the same end after resuming."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from functools import partial

import pytest
import yaml

import cothink


# A script's background jobs start with SIGINT ignored; a run among them must stop all the same.
@pytest.mark.parametrize("start", [signal.SIG_DFL, signal.SIG_IGN])
@pytest.mark.parametrize("stop", [signal.SIGINT, signal.SIGTERM])
def test_interrupted_by_a_signal_and_resumed(stop, start, tiny_folder, tmp_path):
    rows = [{"question": f"{a} + {b}?", "answer": str(a + b)} for a in range(5) for b in range(4)]
    (tmp_path / "sums.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
    recipe = {
        "name": "small",
        "team": {"workflow": "solo", "roles": {"solver": {"policy": "p", "system": "go", "max_tokens": 48}}},
        "policies": {"p": {"model": str(tiny_folder), "learning_rate": 1e-3}},
        "tasks": {name: {"name": "files", "path": str(tmp_path / "sums.jsonl")} for name in ("train", "test")},
        "stages": [
            {"kind": "evaluate", "on": "test", "limit": 1},
            {
                "kind": "rl", "steps": 40, "tasks_per_step": 4, "episodes_per_task": 4, "filter": "none",
                "rewards": [{"name": "format.finished", "role": "solver"}], "unfinished": "keep",
            },
        ],
    }  # fmt: skip
    path, parts, whole = tmp_path / "recipe.yaml", tmp_path / "parts", tmp_path / "whole"
    path.write_text(yaml.safe_dump(recipe).replace("'on':", "on:"))
    command = [sys.executable, "-m", "cothink.cli", "run", str(path), "--out", str(parts)]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env={**os.environ},
        preexec_fn=partial(signal.signal, signal.SIGINT, start),
    )  # fmt: skip
    log = parts / "metrics.jsonl"
    ends = time.monotonic() + 120
    while time.monotonic() < ends and not (log.exists() and log.read_text().count("\n") >= 3):
        time.sleep(0.05)
    process.send_signal(stop)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 130, output[-2000:]
    state = json.loads((parts / "state.json").read_text())
    assert 3 <= state["progress"]["step"] < 40

    resumed = cothink.run(path, out=parts)
    straight = cothink.run(path, out=whole)
    keys = ("step", "reward", "tokens_total", "p/gradient_norm")
    rows = [[{k: json.loads(x)[k] for k in keys} for x in (f / "metrics.jsonl").read_text().splitlines()]
            for f in (resumed.folder, straight.folder)]  # fmt: skip
    assert len(rows[0]) == 40 and rows[0] == rows[1]
