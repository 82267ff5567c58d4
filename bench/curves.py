"""Does the engine matter to what is learned? The same recipe and seeds through several engines, compared by pairs.

`python bench/curves.py RUNS [--engine "vllm=.venv-vllm/bin/python {name: vllm, max_rows: 128}"]` makes the runs that
RUNS does not have yet and prints the table; `local` is always there. An engine is NAME=PYTHON MAPPING, because vLLM
lives in an environment of its own. Fixed before the runs: 20 steps of single-turn ReMA on the built-in model with two
adapters, three seeds. For each engine and seed, the mean accuracy of the 20 steps' plays and the accuracy of 300 test
questions after the last. The curves count as alike when Student's 95 % interval of the seeds' differences from
`local` holds 0 for the first figure, and the exact McNemar test over all pairs of question and seed has p of .05 or
more for the second. The widths say how large a difference would have been missed.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from statistics import mean

from common import table

from cothink.stats import mcnemar, mean_interval

RECIPE = Path(__file__).parents[1] / "recipes" / "rema-demo.yaml"
ADAPTER = {"lora_r": 16, "learning_rate": 1e-3, "weight_decay": 0.0, "model": "builtin:tiny"}
CHANGES = (
    "stages.1.steps=20", "stages.1.tasks_per_step=16", "~stages.1.token_budget", "~stages.1.oversample_max",
    "stages.1.filter=none", "tasks.test.count=300", f"policies.meta={json.dumps(ADAPTER)}",
    f"policies.reasoning={json.dumps(ADAPTER)}",
)  # fmt: skip


def run(python: str, engine: str, seed: int, folder: Path) -> None:
    """One run, or the rest of it."""
    words = [python, "-m", "cothink", "run", str(RECIPE), *CHANGES, f"seed={seed}", f"engine={engine}"]
    with open(folder.with_suffix(".log"), "a") as log:
        if subprocess.run([*words, "--out", str(folder)], stdout=log, stderr=log).returncode:
            raise SystemExit(f"the run {folder} failed: see {log.name}")


def curve(folder: Path) -> list[float]:
    """Accuracy of the plays of each step."""
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [row["accuracy"] for row in rows if row["stage"] == 1 and "seconds_learn" in row]


def answers(folder: Path, stage: str) -> dict[str, bool]:
    """Whether each question of an evaluation was answered rightly."""
    (place,) = (folder / "episodes").glob(f"*-{stage}")
    rows = [json.loads(line) for file in sorted(place.glob("*.jsonl")) for line in file.read_text().splitlines()]
    return {row["task"]: row["accuracy"] == 1.0 for row in rows}


def report(found: dict[str, list[Path]]) -> None:
    """Prints each engine's figures and the comparison with `local`."""
    rows = []
    level = [mean(curve(f)) for f in found["local"]]
    ends = [answers(f, "after") for f in found["local"]]
    for name, folders in found.items():
        mine, end = [mean(curve(f)) for f in folders], [answers(f, "after") for f in folders]
        before = mean(mean(answers(f, "before").values()) for f in folders)
        after = mean(mean(e.values()) for e in end)
        line = [name, f"{before:.3f} -> {after:.3f}", " ".join(f"{v:.3f}" for v in mine)]
        if name == "local":
            rows.append([*line, "", ""])
            continue
        gaps = [a - b for a, b in zip(mine, level, strict=True)]
        span = mean_interval(gaps)
        pairs = [(a[t], b[t]) for a, b in zip(end, ends, strict=True) for t in a]
        p = mcnemar(sum(a and not b for a, b in pairs), sum(b and not a for a, b in pairs))
        held = "equal" if span is None else f"{mean(gaps):+.4f} [{span[0]:+.4f}, {span[1]:+.4f}]"
        rows.append([*line, held, f"p = {p:.2f} of {len(pairs)}"])
    columns = ["engine", "test before -> after", "mean accuracy of the steps, by seed", "to local", "after, McNemar"]
    table(columns, rows)


def main(argv: Sequence[str] | None = None) -> None:
    """Makes what is missing, then prints."""
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("runs", type=Path)
    made.add_argument("--engine", action="append", default=[], metavar="NAME=PYTHON MAPPING")
    made.add_argument("--seeds", type=int, default=3)
    options = made.parse_args(argv)
    engines = {"local": (sys.executable, "{name: local}")}
    for text in options.engine:
        name, _, rest = text.partition("=")
        python, _, mapping = rest.partition(" ")
        if not mapping.startswith("{"):
            made.error(f"--engine {text!r}: write NAME=PYTHON MAPPING, such as 'ray=python {{name: ray, workers: 2}}'")
        engines[name] = (python, mapping)
    options.runs.mkdir(parents=True, exist_ok=True)
    found: dict[str, list[Path]] = {name: [] for name in engines}
    for seed in range(options.seeds):
        for name, (python, mapping) in engines.items():
            folder = options.runs / f"{name}-{seed}"
            if not (folder / "results.json").exists() or "after" not in json.loads(
                (folder / "results.json").read_text()
            ):
                run(python, mapping, seed, folder)
            found[name].append(folder)
    report(found)


if __name__ == "__main__":
    main()
