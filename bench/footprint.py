"""Memory that `cothink check` predicts beside what a run takes: real rl steps, each case in a process of its own.

`python bench/footprint.py [CASE...]` prints predicted and measured MB and their ratio. Measured is how far the resident
memory of a run of two steps rises above that of a process which has loaded every library and run a smallest recipe.
The C library is told to give large blocks back at once, so that resident memory is memory in use: by itself glibc keeps
freed blocks of up to 32 MB, which makes the resident memory of large cases up to a fifth larger
(`--allocator default` shows it).
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from common import table
from memory import forget_peak, peak, resident

from cothink import api, fit, preview, workload
from cothink.recipe import Recipe
from cothink.types import Episode, Task, Turn

MB = 1e6
BLOCK = 1 << 18
"""Bytes from which a block goes back to the system when it is freed."""
CASES: dict[str, dict[str, Any]] = {
    f"{model} {how}{' checkpointing' if checkpointing else ''}": {
        "model": model, "gradient_checkpointing": checkpointing, **settings,
    }
    for model in ("builtin:tiny", "smollm2")
    for how, settings in (
        ("full", {}),
        ("LoRA", {"lora_r": 16}),
        ("full bfloat16", {"dtype": "bfloat16"}),
        ("LoRA bfloat16", {"lora_r": 16, "dtype": "bfloat16"}),
    )
    for checkpointing in (False, True)
}  # fmt: skip
SIZES = {"builtin:tiny": (32, 8192), "smollm2": (8, 1536)}
"""Rows of a step and tokens of a microbatch: a step has several microbatches."""


def spread(task: Task, turn: Turn, episode: Episode) -> float:
    """A reward that differs between plays, so that all of them are learned from."""
    return sum(turn.completion.output_ids) % 97 / 97


def recipe(case: dict[str, Any], rows: int | None = None) -> Recipe:
    """Two steps of one agent; hot enough for its answers to run to their limit, which is what a check counts with."""
    tasks, tokens = SIZES[case["model"]]
    return Recipe.load(
        {
            "name": "footprint",
            "team": {
                "workflow": {"name": "solo"},
                "roles": {"solver": {"policy": "p", "system": "Solve.", "temperature": 3.0, "max_tokens": 48}},
            },
            "policies": {"p": {"learning_rate": 1e-6, **case}},
            "tasks": {"train": {"name": "wordsums", "levels": [2, 5]}},
            "engine": {"name": "local", "cache_gib": 0.125},
            "stages": [
                {
                    "kind": "rl", "steps": 2 if rows is None else 1, "tasks_per_step": rows or tasks,
                    "episodes_per_task": 8 if rows is None else 2, "microbatch_tokens": tokens, "filter": "none",
                    "rewards": [{"name": "footprint:spread"}], "unfinished": "keep", "watch": {"mode": "off"},
                }
            ],
        }
    )  # fmt: skip


def predicted(loaded: Recipe) -> fit.Moment:
    """The fullest moment that a check of this recipe reckons with, on a CPU."""
    data = {name: preview._data(loaded, name) for name in loaded.tasks}
    work = workload.Work(preview._chats(loaded, data), {name: found.rows for name, found in data.items()})
    return max(fit.moments(loaded, work, fit.Device(gpu=False)), key=lambda m: m.total)


def run(loaded: Recipe) -> None:
    """Runs a recipe and keeps nothing."""
    with tempfile.TemporaryDirectory() as place:
        api.run(loaded, out=Path(place) / "run")


def child(case: str) -> None:
    """Measures one case in this process and prints it."""
    chosen = CASES[case]
    run(recipe({**chosen, "model": "builtin:tiny"}, rows=2))  # whatever libraries load late is loaded now
    gc.collect()
    if sys.platform == "linux":
        ctypes.CDLL(None).malloc_trim(0)
    loaded = recipe(chosen)
    anew = forget_peak()
    before = resident() if anew else peak()
    run(loaded)
    moment = predicted(loaded)
    print(json.dumps({"measured": peak() - before, "parts": dict(moment.parts), "what": moment.what}))


def measured(case: str, allocator: str = "returning") -> dict[str, Any]:
    """One case, in a process of its own."""
    settings = {} if allocator == "default" else {"MALLOC_MMAP_THRESHOLD_": str(BLOCK)}
    command = [sys.executable, __file__, "--child", case]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, **settings})
    if done.returncode:
        raise RuntimeError(f"{case} failed:\n{done.stderr[-2000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def main() -> None:
    """Reads the options and measures, or measures one case in this process."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="*", metavar="CASE", help=f"of: {', '.join(CASES)}; default: all")
    parser.add_argument("--allocator", choices=("returning", "default"), default="returning")
    parser.add_argument("--child", choices=CASES, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        child(options.child)
        return
    rows = []
    for case in options.cases or CASES:
        found = measured(case, options.allocator)
        total = sum(found["parts"].values())
        parts = ", ".join(f"{k} {v / MB:,.0f}" for k, v in found["parts"].items() if v >= MB)
        rows.append((case, total / MB, found["measured"] / MB, f"{total / found['measured']:.2f}", parts))
        print(f"{case}: {total / MB:,.0f} predicted, {found['measured'] / MB:,.0f} measured", file=sys.stderr)
    table(("case", "MB predicted", "MB measured", "ratio", "predicted parts"), rows)


if __name__ == "__main__":
    main()
