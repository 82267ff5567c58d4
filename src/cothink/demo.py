"""`make demo`: a two-agent team and a single agent learn on the built-in model at equal generated tokens.

Run as `python -m cothink.demo [--seed N] [--out FOLDER]` from a clone; needs no network and no GPU.
"""

from __future__ import annotations

import argparse
import json
import shutil
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from cothink import stats
from cothink.record import write_atomic

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
    if options.out.exists():
        console.print(f"replacing the demo that was in {options.out}")
        shutil.rmtree(options.out)
    summary = demo(options.out, options.seed, console)
    console.print()
    console.print(table(summary))
    gain, versus = summary["gain"], summary["team_minus_solo"]
    console.print(f"gain of the team by RL: {points(gain)}  (paired, 95 %)")
    console.print(f"team after RL - solo after RL: {points(versus)}  (paired, 95 %)")
    console.print(f"{summary['seconds']:.0f} s; run folders and summary.json in {options.out}/")


def demo(out: Path, seed: int, console: Any) -> dict[str, Any]:
    """Trains the team, then the single agent on as many sampled tokens, and writes `summary.json`."""
    from cothink.api import run

    started = time.monotonic()
    console.rule("team: a meta-thinker plans, a reasoner executes (two separate policies)")
    team = run(RECIPES / "rema-demo.yaml", [f"seed={seed}"], out=out / "rema", console=console)
    spent = tokens_trained(team.folder)
    console.rule(f"solo: one agent, trained on the same number of sampled tokens ({spent:,})")
    budget = ["stages.1.steps=100000", f"stages.1.token_budget={spent}"]
    solo = run(RECIPES / "solo-demo.yaml", [f"seed={seed}", *budget], out=out / "solo", console=console)
    runs = {"team": (team.results, spent), "solo": (solo.results, tokens_trained(solo.folder))}
    systems = {
        f"{name}_{when}": {
            **{k: results[when][k] for k in ("accuracy", "low", "high", "n")},
            "tokens": results[when]["tokens"],
            "train_tokens": tokens if when == "after" else 0,
        }
        for name, (results, tokens) in runs.items()
        for when in ("before", "after")
    }
    summary = {
        "seed": seed,
        "seconds": round(time.monotonic() - started, 1),
        "gain": difference(team.results["after"], team.results["before"]),
        "solo_gain": difference(solo.results["after"], solo.results["before"]),
        "team_minus_solo": difference(team.results["after"], solo.results["after"]),
        "systems": systems,
    }
    write_atomic(out / "summary.json", json.dumps(summary, indent=2))
    return summary


def tokens_trained(folder: Path) -> int:
    """Tokens sampled for training by a run."""
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return int(json.loads(lines[-1])["tokens_total"])


def difference(after: Mapping[str, Any], before: Mapping[str, Any]) -> dict[str, float]:
    """Mean difference in accuracy over the same tasks, with its paired bootstrap interval."""
    shared = after["per_task"].keys() & before["per_task"].keys()
    mean, low, high = stats.paired_bootstrap([after["per_task"][k] - before["per_task"][k] for k in sorted(shared)])
    return {"mean": mean, "low": low, "high": high}


def points(d: Mapping[str, float]) -> str:
    """A difference in percentage points."""
    return f"{100 * d['mean']:+.1f} points [{100 * d['low']:+.1f}, {100 * d['high']:+.1f}]"


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
