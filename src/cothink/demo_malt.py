"""`make demo-malt`: trees, examples and preferences on the built-in model, and the table of MALT's comparison.

Run as `python -m cothink.demo_malt [--seed N] [--out FOLDER]` from a clone; needs no network and no GPU.
"""

from __future__ import annotations

import argparse
import json
import shutil
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from cothink import demo
from cothink.record import write_atomic
from cothink.stages import comparing, versus
from cothink.stages.evaluate import points
from cothink.stages.summary import Questions

RECIPE = "malt-demo.yaml"
SYSTEMS = {"SA": "untrained single", "MA": "untrained team", "STaR-SA": "STaR single", "STaR-MA": "STaR team",
           "MALT": "MALT"}  # fmt: skip
"""Label of an evaluation in the recipe -> the system it measures."""


def main() -> None:
    """Runs the recipe and prints the table."""
    parser = argparse.ArgumentParser(prog="cothink.demo_malt", description=__doc__)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("runs/demo-malt"))
    options = parser.parse_args()
    from rich.console import Console

    console = Console()
    if not (demo.RECIPES / RECIPE).exists():
        raise SystemExit(f"the demo needs a clone of the repository: {demo.RECIPES}/{RECIPE} is not there")
    if (options.out / "malt" / "recipe.yaml").exists():  # an earlier demo's own folder, and nothing else
        console.print(f"replacing the demo run in {options.out / 'malt'}")
        shutil.rmtree(options.out / "malt")
    summary = run(options.out, options.seed, console)
    console.print()
    console.print(table(summary))
    for entry in summary["comparisons"]:
        console.print(sentence(entry), highlight=False)
    console.print(f"MALT - untrained team, both voting: {points(summary['gain'])}  (paired, 95 %)")
    console.print(f"{summary['seconds']:.0f} s; the run folder and summary.json lie in {options.out}/")


def run(out: Path, seed: int, console: Any) -> dict[str, Any]:
    """Runs the recipe in a process of its own and writes `summary.json`: systems with and without a vote, paired."""
    started = time.monotonic()
    folder = out / "malt"
    demo.train("malt", folder, seed, console, RECIPE)
    results = json.loads((folder / "results.json").read_text())
    collected, *_ = (v for v in map(json.loads, _lines(folder / "metrics.jsonl")) if "collect/tokens" in v)
    systems: dict[str, Any] = {}
    for label in SYSTEMS:
        values, k = results[label], str(results[label]["k"])
        sampled = 0 if label in ("SA", "MA") else int(collected["collect/tokens"])
        each = values["tokens"] / values["k"]
        for name, (accuracy, low, high), tokens in (
            (label, values["first"], each), (f"{label}+vote", values["maj_at"][k], values["tokens"])
        ):  # fmt: skip
            systems[name] = {"accuracy": accuracy, "low": low, "high": high, "n": values["n"], "tokens": tokens,
                             "train_tokens": sampled}  # fmt: skip
    questions = {label: Questions(comparing.plays(folder, label, results[label])) for label in SYSTEMS}
    comparisons = [entry for entry in versus.compare(questions) if "MALT" in (entry["a"], entry["b"])]
    voted = next(e for e in comparisons if (e["a"], e["b"]) == ("MA", "MALT") and e["what"].startswith("vote"))
    mean, low, high = voted["difference"]
    summary = {
        "seed": seed,
        "seconds": round(time.monotonic() - started, 1),
        "gain": {"mean": -mean, "low": -high, "high": -low},
        "systems": systems,
        "comparisons": comparisons,
    }
    write_atomic(out / "summary.json", json.dumps(summary, indent=2))
    return summary


def _lines(path: Path) -> list[str]:
    return path.read_text().splitlines()


def table(summary: Mapping[str, Any]) -> Any:
    """All systems, without and with a vote, side by side."""
    from rich.table import Table

    shown = Table("system", "accuracy", "95 % interval", "questions", "tokens trained on", "tokens per question")
    for name, s in summary["systems"].items():
        label, _, vote = name.partition("+")
        interval = f"{100 * s['low']:.1f} - {100 * s['high']:.1f}"
        shown.add_row(
            SYSTEMS[label] + (", vote of 3" if vote else ""), f"{100 * s['accuracy']:.1f} %", interval, str(s["n"]),
            f"{s['train_tokens']:,}", f"{s['tokens'] / s['n']:.1f}",
        )  # fmt: skip
    return shown


def sentence(entry: Mapping[str, Any]) -> str:
    """One paired comparison in words."""
    mean, low, high = (-100 * entry["difference"][k] for k in (0, 2, 1))
    return (
        f"MALT - {SYSTEMS[entry['a']]} ({entry['what']}): {mean:+.1f} points [{low:+.1f}, {high:+.1f}], "
        f"McNemar {entry['only_b']} to {entry['only_a']}, p {entry['mcnemar_p']:.2g}"
    )


if __name__ == "__main__":
    main()
