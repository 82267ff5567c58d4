"""`make demo`: a two-agent team and a single agent learn on the built-in model at equal generated tokens.

Run as `python -m cothink.demo [--seed N] [--out FOLDER]` from a clone; needs no network and no GPU.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from cothink.record import write_atomic
from cothink.stages.evaluate import difference, points

RUNS = {"team": "rema-demo.yaml", "solo": "solo-demo.yaml"}
RECIPES = Path(__file__).parents[2] / "recipes"


def main() -> None:
    """Runs both recipes and prints the table."""
    parser = argparse.ArgumentParser(prog="cothink.demo", description=__doc__)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("runs/demo"))
    options = parser.parse_args()
    from rich.console import Console

    console = Console()
    if not (RECIPES / "rema-demo.yaml").exists():
        raise SystemExit(f"the demo needs a clone of the repository: {RECIPES}/rema-demo.yaml is not there")
    for name in ("rema", "solo"):  # an earlier demo's own folders, and nothing else
        if (options.out / name / "recipe.yaml").exists():
            console.print(f"replacing the demo run in {options.out / name}")
            shutil.rmtree(options.out / name)
    summary = demo(options.out, options.seed, console)
    console.print()
    console.print(table(summary))
    gain, versus = summary["gain"], summary["team_minus_solo"]
    console.print(f"gain of the team by RL: {points(gain)}  (paired, 95 %)")
    console.print(f"team after RL - solo after RL: {points(versus)}  (paired, 95 %)")
    console.print(f"{summary['seconds']:.0f} s; run folders and summary.json in {options.out}/")


def demo(out: Path, seed: int, console: Any) -> dict[str, Any]:
    """Trains the team and the single agent on the same budget of sampled tokens and writes `summary.json`.

    Both run at once, one thread each: on small matrices two processes of one thread beat one of two.
    """
    started = time.monotonic()
    folders = {"team": out / "rema", "solo": out / "solo"}
    with ThreadPoolExecutor() as pool:
        list(pool.map(lambda name: train(name, folders[name], seed, console), RUNS))
    results = {name: json.loads((folder / "results.json").read_text()) for name, folder in folders.items()}
    systems = {
        f"{name}_{when}": {
            **{k: results[name][when][k] for k in ("accuracy", "low", "high", "n", "tokens")},
            "train_tokens": tokens_trained(folders[name]) if when == "after" else 0,
        }
        for name in RUNS
        for when in ("before", "after")
    }
    summary = {
        "seed": seed,
        "seconds": round(time.monotonic() - started, 1),
        "gain": difference(results["team"]["after"], results["team"]["before"]),
        "solo_gain": difference(results["solo"]["after"], results["solo"]["before"]),
        "team_minus_solo": difference(results["team"]["after"], results["solo"]["after"]),
        "systems": systems,
    }
    write_atomic(out / "summary.json", json.dumps(summary, indent=2))
    return summary


def train(name: str, folder: Path, seed: int, console: Any, recipe: str | None = None) -> None:
    """Runs one recipe (None: that of `name`) in a process of its own and shows its lines; SystemExit if it fails."""
    command = [
        sys.executable,
        "-m",
        "cothink.cli",
        "run",
        str(RECIPES / (recipe or RUNS[name])),
        f"seed={seed}",
        "--out",
        str(folder),
    ]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
    with subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as process:
        assert process.stdout is not None
        for line in process.stdout:
            console.print(f"{name} | {line.rstrip()}", highlight=False, markup=False, soft_wrap=True)
    if process.returncode:
        raise SystemExit(f"the {name} run failed with exit code {process.returncode}; its lines are above")


def tokens_trained(folder: Path) -> int:
    """Tokens sampled for training by a run."""
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return int(json.loads(lines[-1])["tokens_total"])


def table(summary: Mapping[str, Any]) -> Any:
    """The four systems side by side."""
    from rich.table import Table

    shown = Table("system", "accuracy", "95 % interval", "tasks", "tokens trained on", "tokens per answer")
    for name, s in summary["systems"].items():
        interval = f"{100 * s['low']:.1f} - {100 * s['high']:.1f}"
        shown.add_row(
            name.replace("_", " "), f"{100 * s['accuracy']:.1f} %", interval, str(s["n"]), f"{s['train_tokens']:,}",
            f"{s['tokens'] / s['n']:.1f}",
        )  # fmt: skip
    return shown


if __name__ == "__main__":
    main()
