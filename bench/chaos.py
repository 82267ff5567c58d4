"""Kills a run at random moments of every kind of stage, resumes it, and compares it with a run nobody touched.

`make chaos` does 20 kills. Each begins with the folder as it stood at the start of a stage, lets the process live for a
random part of that stage's time, kills it with SIGKILL, once or twice, and runs the recipe again. Equal means: the same
bytes of all weights, the same metrics, results, trees and episodes, times left out.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

ROLES = ("generator", "verifier", "refiner")
SHORT = {"learning_rate": 3e-4, "warmup_steps": 0, "checkpoint_every": 2}
RECIPE: dict[str, Any] = {
    "name": "chaos",
    "team": {
        "workflow": {"name": "malt", "prompts": "words", "max_context": 512},
        "roles": {name: {"policy": name, "max_tokens": 48} for name in ROLES},
        "concurrency": 8,
    },
    "policies": {name: {"model": "builtin:tiny", "lora_r": 4, "learning_rate": 1e-4} for name in ROLES},
    "tasks": {
        "train": {"name": "wordsums", "levels": [1, 2], "count": 24},
        "test": {"name": "wordsums", "split": "test", "levels": [1, 2], "count": 60},
    },
    "stages": [
        {"kind": "collect", "on": "train", "branching": [3, 3, 2]},
        {"kind": "sft", "data": "tree", "max_steps": 6, "rows_per_step": 8, **SHORT},
        {"kind": "dpo", "max_steps": 6, "pairs_per_step": 8, **SHORT},
        {
            "kind": "rl", "steps": 4, "tasks_per_step": 6, "episodes_per_task": 4, "filter": "none",
            "checkpoint_every": 1, "rewards": [{"name": "answer.correct"}],
        },
        {"kind": "evaluate", "on": "test", "label": "after"},
    ],
}  # fmt: skip
TIMES = ("time", "seconds")


def command(recipe: Path, out: Path) -> list[str]:
    return [sys.executable, "-m", "cothink.cli", "run", str(recipe), "--out", str(out)]


def start(recipe: Path, out: Path, log: Path) -> subprocess.Popen[bytes]:
    env = {**os.environ, "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
    with log.open("ab") as file:
        return subprocess.Popen(command(recipe, out), stdout=file, stderr=file, env=env, start_new_session=True)


def stage_of(out: Path) -> int:
    state = out / "state.json"
    return json.loads(state.read_text()).get("stage", 0) if state.exists() else 0


def untouched(recipe: Path, out: Path, shelf: Path) -> list[tuple[float, float]]:
    """Runs the recipe to its end; keeps a copy of the folder at the start of each stage, and returns their times."""
    began, spans, at = time.monotonic(), [], 0
    process = start(recipe, out, shelf / "untouched.log")
    opened = began
    while process.poll() is None:
        time.sleep(0.05)
        now = stage_of(out)
        if now > at:
            process.send_signal(signal.SIGSTOP)  # the copy is of one moment
            spans += [(opened - began, time.monotonic() - began)] * (now - at)
            at, opened = now, time.monotonic()
            if at < len(RECIPE["stages"]):
                shutil.copytree(out, shelf / f"stage{at}")
            process.send_signal(signal.SIGCONT)
    if process.returncode:
        raise SystemExit(f"the untouched run failed:\n{(shelf / 'untouched.log').read_text()[-3000:]}")
    return spans


def finished(recipe: Path, out: Path, log: Path) -> int:
    return start(recipe, out, log).wait()


def murder(recipe: Path, out: Path, after: float, log: Path) -> bool:
    """Lets a run live for some seconds; False where it had come to its end by then."""
    process = start(recipe, out, log)
    try:
        process.wait(after)
        return False
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        return True


def plain(value: Any) -> Any:
    """Without what depends on the clock."""
    if isinstance(value, Mapping):
        return {k: plain(v) for k, v in value.items() if not str(k).startswith(TIMES)}
    return [plain(v) for v in value] if isinstance(value, list) else value


def contents(folder: Path) -> Iterator[tuple[str, Any]]:
    """What two equal runs have in common: name and content of every part."""
    state = json.loads((folder / "state.json").read_text())
    place = folder / "checkpoints" / state["checkpoint"]
    for file in sorted(place.rglob("*.safetensors")):
        yield f"weights {file.relative_to(place)}", file.read_bytes()
    for name in ("results.json",) if (folder / "results.json").exists() else ():
        yield name, plain(json.loads((folder / name).read_text()))
    for pattern in ("metrics.jsonl", "episodes/**/*.jsonl", "trees/**/*.jsonl", "examples/*.jsonl", "pairs/*.jsonl"):
        for file in sorted(folder.glob(pattern)):
            lines = file.read_text().splitlines()
            yield str(file.relative_to(folder)), [plain(json.loads(line)) for line in lines]


def differences(one: Path, two: Path) -> list[str]:
    a, b = dict(contents(one)), dict(contents(two))
    return sorted(name for name in a.keys() | b.keys() if a.get(name) != b.get(name))


def main() -> None:
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--kills", type=int, default=20)
    made.add_argument("--seed", type=int, default=0)
    made.add_argument("--minutes", type=float, default=20, help="no new kill after so long (default 20)")
    made.add_argument("--keep", type=Path, help="a folder for everything, instead of one that is removed")
    args = made.parse_args()
    dice, began = random.Random(args.seed), time.monotonic()
    with tempfile.TemporaryDirectory() as scratch:
        shelf = args.keep or Path(scratch)
        shelf.mkdir(parents=True, exist_ok=True)
        recipe, whole = shelf / "recipe.yaml", shelf / "whole"
        recipe.write_text(yaml.safe_dump({**RECIPE, "seed": args.seed}))
        spans = untouched(recipe, whole, shelf)
        kinds = [stage["kind"] for stage in RECIPE["stages"]]
        first = spans[0][0] + 4.0  # imports and loading, before there is anything to lose
        print("kill  stage     after s  second  resumed  different")
        bad = 0
        for kill in range(args.kills):
            if time.monotonic() - began > 60 * args.minutes:
                print(f"stopped after {kill} kills: {args.minutes:g} minutes are over")
                break
            at = kill % len(kinds)
            out, log = shelf / f"cut{kill:02d}", shelf / f"kill{kill:02d}.log"
            shutil.rmtree(out, ignore_errors=True)
            if at:
                shutil.copytree(shelf / f"stage{at}", out)
            length = spans[at][1] - spans[at][0]
            after = first + dice.uniform(0, length)
            cut = murder(recipe, out, after, log)
            twice = cut and dice.random() < 0.5
            if twice:
                murder(recipe, out, first + dice.uniform(0, length), log)
            code = finished(recipe, out, log)
            wrong = [f"exit code {code}, see {log}"] if code else differences(whole, out)
            bad += bool(wrong)
            if not wrong:
                shutil.rmtree(out)
            print(f"{kill:4d}  {kinds[at]:8s} {after:8.1f}  {'yes' if twice else 'no':6s}  "
                  f"{'yes' if cut else 'ended':7s}  {', '.join(wrong) or 'nothing'}", flush=True)  # fmt: skip
        print(f"{bad} of the resumed runs differ from the untouched one")
        raise SystemExit(bool(bad))


if __name__ == "__main__":
    main()
