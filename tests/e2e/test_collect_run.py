"""Trees on the built-in model through a kill (malt §10): a real engine and a real SIGKILL."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time

import yaml

import cothink
from cothink import store

RECIPE = {
    "name": "trees",
    "team": {"workflow": {"name": "malt", "prompts": "words", "max_context": 512}, "roles": {
        name: {"policy": name, "max_tokens": 64} for name in ("generator", "verifier", "refiner")}},
    "policies": {name: {"model": "builtin:tiny", "lora_r": 4} for name in ("generator", "verifier", "refiner")},
    "tasks": {"train": {"name": "wordsums", "levels": 2, "count": 5}},
    "engine": {"name": "local", "max_rows": 4},
    "stages": [{"kind": "collect", "branching": [2, 2, 2]}],
}  # fmt: skip


def calls_in(path):
    return path.read_bytes().count(b'"turns"') if path.exists() else 0


def metrics(folder):
    return json.loads((folder / "metrics.jsonl").read_text().splitlines()[-1])


def test_row7_killed_and_resumed_no_call_is_repeated(tmp_path, monkeypatch):
    """malt §10 rows 7 and 12."""
    (tmp_path / "trees.yaml").write_text(yaml.safe_dump(RECIPE, sort_keys=False))
    folder = tmp_path / "killed"
    trees = folder / "trees" / "00-collect" / "trees.jsonl"
    command = [sys.executable, "-m", "cothink.cli", "run", "trees.yaml", "--out", str(folder)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(command, cwd=tmp_path, env=environment, stdout=subprocess.DEVNULL)
    patience = time.monotonic() + 120
    while calls_in(trees) < 8 and process.poll() is None and time.monotonic() < patience:
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL, "the run ended before it could be killed"
    kept = calls_in(trees) - (not trees.read_bytes().endswith(b"\n"))
    assert 0 < kept < 35
    asked, keep = [], store.Book.keep
    monkeypatch.setattr(store.Book, "keep", lambda *given: (asked.append(1), keep(*given)))
    cothink.run(RECIPE, out=folder)
    assert len(asked) == 35 - kept
    cothink.run(RECIPE, out=tmp_path / "whole")
    assert metrics(folder)["collect/calls"] == metrics(tmp_path / "whole")["collect/calls"] == 35
    assert trees.read_bytes() == (tmp_path / "whole/trees/00-collect/trees.jsonl").read_bytes()

    def texts(run):
        found = store.load(run / "trees" / "00-collect")
        return [[(t.id, t.parents, t.role, t.text) for t in tree.episode.turns] for tree in found]

    assert texts(folder) == texts(tmp_path / "whole") and len(texts(folder)) == 5
    turns = [t for tree in store.load(trees.parent) for t in tree.episode.turns]
    assert {t.completion.version for t in turns} == {0}, "row 12: the base weights speak"
