"""Multi-turn ReMA driven to collapse, with the paper's settings and beside others: arms and criterion fixed beforehand.

`python bench/collapse.py RUNS` makes the runs that RUNS does not have yet and prints the table; `--table` only prints.
What follows was written down before any of its runs; the regime (learning rate, updates per step) was chosen with the
paper's settings on seeds 100 to 102 so that the reward rises first and then falls.

- Question: how often does a run collapse within 80 steps, and does another setting lower that?
- Seeds: eight an arm, none used by two arms.
- Collapsed: the watch, which only observes, gave a stop of `reward_drop`, `test_drop` or `flat_groups`, or an update
  was not finite. `one_round` does not count: word sums ask for one round, and a team may rightly end after it.
- First comparison: `stable` against `paper`, Fisher's exact test, two-sided; all comparisons with `paper` by Holm.
- Also printed: accuracy after the last step on 300 questions, tokens, the first signal and how many steps it came
  before the first stop of `reward_drop`.

Added when the runs were there: the step at which the accuracy of the last ten steps had lost a quarter of its best,
which needs no watch, and the first signal's lead on it, for the arms whose questions do not get harder; `--plot FILE`.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, median

from cothink.plots import Curve, draw
from cothink.stats import fisher_exact, holm, mean_interval, wilson

RECIPE = Path(__file__).parents[1] / "recipes" / "rema-collapse-tiny.yaml"
STABLE = (
    "stages.0.preset=stable_v0",
    "stages.0.curriculum={key: level, start: 2}",
)
ARMS: dict[str, tuple[range, Sequence[str]]] = {
    "paper": (range(200, 208), ()),
    "stable": (range(210, 218), STABLE),
    "paper + kl_stop": (range(220, 228), ("stages.0.kl_stop=1.0e-3",)),
    "paper without 1/T": (range(230, 238), ("stages.0.loss.aggregate=const_turn",)),
    "stable, watch acts": (range(240, 248), (*STABLE, "stages.0.watch=act")),
}
"""Seeds and overrides. The arms are run in this order, as far as time allows; an arm is reported only whole."""
STOPS = ("reward_drop", "test_drop", "flat_groups")


@dataclass(frozen=True)
class Told:
    """What one run's metrics say."""

    steps: int
    collapsed: int | None
    first: tuple[str, int] | None
    fall: int | None
    lost: int | None
    peak: float
    last: float
    tokens: float
    after: float | None
    tests: dict[int, float]


def folder(shelf: Path, arm: str, seed: int) -> Path:
    return shelf / f"{''.join(c if c.isalnum() else '_' for c in arm)}-{seed}"


def is_over(out: Path) -> bool:
    return (out / "results.json").exists() or out.with_suffix(".over").exists()


def play(shelf: Path, arm: str, seed: int) -> None:
    out = folder(shelf, arm, seed)
    if is_over(out):
        return
    command = [sys.executable, "-m", "cothink", "run", str(RECIPE), "--out", str(out), f"seed={seed}", *ARMS[arm][1]]
    with out.with_suffix(".log").open("ab") as log:
        code = subprocess.run(command, stdout=log, stderr=log, env={**os.environ, "OMP_NUM_THREADS": "1"}).returncode
    if code:  # a watch that acts may stop a run: that is a result
        out.with_suffix(".over").write_text(f"exit code {code}\n")


def read(out: Path) -> Told:
    rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    rows = [row for row in rows if "reward" in row]
    first = collapsed = fall = None
    for row in rows:
        for said in row.get("watch", []):
            level, name = said.split(": ")[0].split(" ", 1)
            first = first or (name, row["step"])
            stop = level == "stop" and (name in STOPS or "not finite" in said)
            collapsed = row["step"] if stop and collapsed is None else collapsed
            fall = row["step"] if stop and name == "reward_drop" and fall is None else fall
    rewards = [row["accuracy"] for row in rows]
    ten = [mean(rewards[k : k + 10]) for k in range(max(1, len(rewards) - 9))]
    tests = {row["step"]: row["test/accuracy"] for row in rows if "test/accuracy" in row}
    lost = next((k + 10 for k, m in enumerate(ten) if m < 0.75 * max(ten[: k + 1])), None)
    results = out / "results.json"
    found = json.loads(results.read_text()) if results.exists() else {}
    after = found["after"]["accuracy"] if found else None
    tokens = sum(row["tokens"] for row in rows)
    return Told(len(rows), collapsed, first, fall, lost, max(ten), ten[-1], tokens, after, tests)


def whole_arms(shelf: Path) -> dict[str, list[Told]]:
    return {
        arm: [read(folder(shelf, arm, seed)) for seed in seeds]
        for arm, (seeds, _) in ARMS.items()
        if all(is_over(folder(shelf, arm, seed)) for seed in seeds)
    }


def plot(whole: dict[str, list[Told]]) -> str:
    """Mean accuracy of every arm's runs on the same questions, with Student's interval over the runs."""
    curves = []
    for k, (arm, told) in enumerate(whole.items()):
        tests = {
            step: [t.tests[step] for t in told if step in t.tests]
            for step in sorted({s for t in told for s in t.tests})
        }
        points = [(step, mean(values)) for step, values in tests.items()]
        band = [(step, *found) for step, values in tests.items() if (found := mean_interval(values))]
        curves.append(Curve(arm, points, band, colour=k))
    return draw(curves, "test accuracy over the step, mean of eight runs an arm")


def table(whole: dict[str, list[Told]]) -> None:
    hits = {arm: sum(t.collapsed is not None for t in told) for arm, told in whole.items()}
    others = [arm for arm in whole if arm != "paper"]
    raw = [fisher_exact(hits[a], len(whole[a]), hits["paper"], len(whole["paper"])) for a in others]
    tested = dict(zip(others, zip(raw, holm(raw))))
    print("| arm | collapsed [95 %] | p against paper | Holm | accuracy: best ten steps | last ten | after (300) |")
    print("|---|---|---|---|---|---|---|")
    for arm, told in whole.items():
        low, high = wilson(hits[arm], len(told))
        p, adjusted = (f"{x:.2g}" for x in tested[arm]) if arm in tested else ("", "")
        after = [t.after for t in told if t.after is not None]
        best, last = mean(t.peak for t in told), mean(t.last for t in told)
        done = f"{mean(after):.3f}" if after else "-"
        share = f"{hits[arm]}/{len(told)} [{low:.2f}, {high:.2f}]"
        print(f"| {arm} | {share} | {p} | {adjusted} | {best:.3f} | {last:.3f} | {done} |")
    print("\n| arm | seed | steps | collapsed at | first signal | lead on reward_drop | lost a quarter at | lead on it "
          "| best ten | last ten | tokens |")  # fmt: skip
    print("|---|---|---|---|---|---|---|---|---|---|---|")
    leads: list[int] = []
    early: list[int] = []
    for arm, told in whole.items():
        for seed, t in zip(ARMS[arm][0], told):
            lead = None if t.fall is None or t.first is None else t.fall - t.first[1]
            leads += [lead] if lead is not None else []
            gone = t.lost if arm.startswith("paper") else None
            sooner = None if gone is None or t.first is None else gone - t.first[1]
            early += [sooner] if sooner is not None else []
            spoke = "-" if t.first is None else f"{t.first[0]} at {t.first[1]}"
            cells = (arm, seed, t.steps, t.collapsed, spoke, lead, gone, sooner)
            shown = " | ".join("-" if x is None else str(x) for x in cells)
            print(f"| {shown} | {t.peak:.3f} | {t.last:.3f} | {t.tokens:,.0f} |")
    if leads:
        print(f"\nlead of the first signal on the stop of reward_drop: median {median(leads):g} steps, "
              f"{min(leads)} to {max(leads)}, {len(leads)} runs")  # fmt: skip
    if early:
        print(f"lead of the first signal on the loss of a quarter: median {median(early):g} steps, "
              f"{min(early)} to {max(early)}, {len(early)} runs, sooner in {sum(k > 0 for k in early)}")  # fmt: skip


def main() -> None:
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("shelf", type=Path, metavar="RUNS")
    made.add_argument("--arms", nargs="*", choices=ARMS, default=list(ARMS))
    made.add_argument("--jobs", type=int, default=1)
    made.add_argument("--table", action="store_true", help="print what is there, run nothing")
    made.add_argument("--plot", type=Path, metavar="FILE.svg", help="draw the arms that are there")
    args = made.parse_args()
    args.shelf.mkdir(parents=True, exist_ok=True)
    if not args.table:
        with ThreadPoolExecutor(args.jobs) as pool:
            list(pool.map(lambda job: play(args.shelf, *job), [(a, s) for a in args.arms for s in ARMS[a][0]]))
    whole = whole_arms(args.shelf)
    table(whole)
    if args.plot:
        args.plot.write_text(plot(whole), encoding="utf-8")


if __name__ == "__main__":
    main()
