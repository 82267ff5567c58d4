"""Peak memory above the loaded model: sampling and one update, beside `model.generate` and a plain padded loop.

`python bench/memory.py [--model smollm2] [--dtype bfloat16]` runs every case in a process of its own. A case loads its
model, does a little of the work (libraries, optimiser states are not counted twice), and then reports by how much the
resident memory of the whole work passed what was resident before it.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import common
import generation
import torch
import training
from common import Measured

CASES = ("generation/cothink", "generation/model.generate", "update/cothink", "update/plain padded loop")
MIB = 1 << 20


def forget_peak() -> bool:
    """Lets the kernel count the peak anew from here; False where it cannot."""
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return False
    return True


def resident() -> int:
    """Bytes of memory in use now."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def peak() -> int:
    """The most bytes of memory in use so far."""
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return most if sys.platform == "darwin" else most * 1024


def prepared(case: str, options: argparse.Namespace) -> tuple[Callable[[], object], Callable[[], object]]:
    """A little of a case's work, and all of it."""
    kind, _, system = case.partition("/")
    policy = common.policy(options.model, options.dtype)
    if kind == "update":
        rows = training.samples(policy, options)
        few = rows[: options.siblings]
        if system == "cothink":
            return (lambda: training.ours(policy, few, options.microbatch)), (
                lambda: training.ours(policy, rows, options.microbatch)
            )
        plain = training.Plain(policy)
        return (lambda: plain.update(few[:1], options.microbatch)), (lambda: plain.update(rows, options.microbatch))
    speaker: Any = common.local(policy, options.rows)
    chats = common.chats(options.model, options.prompts, options.seed)
    spans = options.shortest, options.longest, options.seed
    few, work = (
        common.work(speaker.codec("p"), part, siblings, *spans)
        for part, siblings in ((chats[:1], 1), (chats, options.siblings))
    )
    if system == "cothink":
        return (lambda: generation.sample_local(speaker, policy, few, 1)), (
            lambda: generation.sample_local(speaker, policy, work, 0)
        )
    speaker = None  # with it goes its own copy of the weights, where it has one
    policy.model.to(getattr(torch, options.dtype))
    return (lambda: generation.sample_generate(policy, few, options.rows)), (
        lambda: generation.sample_generate(policy, work, options.rows)
    )


def child(case: str, options: argparse.Namespace) -> None:
    """Runs one case in this process and prints what it took."""
    little, everything = prepared(case, options)
    little()
    anew = forget_peak()
    before = resident() if anew else peak()
    everything()
    print(json.dumps({"before": before, "peak": max(peak(), before), "anew": anew}))


def asked(case: str, argv: list[str]) -> Measured:
    """Runs one case in a process of its own."""
    done = subprocess.run([sys.executable, __file__, *argv, "--case", case], capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{case} failed:\n{done.stderr[-2000:]}")
    found = json.loads(done.stdout.splitlines()[-1])
    return Measured(0.0, {"mib": (found["peak"] - found["before"]) / MIB, "before": found["before"] / MIB})


def build() -> argparse.ArgumentParser:
    """The options."""
    made = common.parser(
        __doc__, prompts=(64, 4), siblings=(8, 8), shortest=(16, 16), longest=(64, 64), rows=(256, 64),
        microbatch=(8192, 4096), repeats=(1, 1),
    )  # fmt: skip
    made.add_argument("--case", choices=CASES, help="run this case alone, in this process")
    return made


def measure(options: argparse.Namespace, argv: list[str]) -> None:
    """Runs all cases and prints the table."""
    runs = common.alternate({case: lambda k, case=case: asked(case, argv) for case in CASES}, options.repeats)
    model = common.policy(options.model).model
    top = common.ceiling(model, options.dtype)
    common.header("Memory", options, ceiling=f"{top / 1e9:,.0f} GFLOP/s", rows=options.rows)
    print(
        f"{options.prompts} prompts x {options.siblings} siblings of {options.shortest}-{options.longest} tokens; "
        f"microbatches of {options.microbatch} tokens"
    )
    rows = []
    for case, found in runs.items():
        kind = case.partition("/")[0]
        base = next(c for c in CASES if c.startswith(kind) and not c.endswith("/cothink"))
        more = common.median(found, "mib")
        ratio = common.median(runs[base], "mib") / max(more, 1e-3)
        rows.append((case, common.median(found, "before"), more, common.times(ratio)))
    common.table(("case", "MiB loaded", "MiB more at the peak", "ratio"), rows)
    print("ratio: the other way's memory at the peak over this one's")


def main() -> None:
    """Reads the options and measures, or runs one case."""
    options = common.parse(build())
    if options.case:
        child(options.case, options)
    else:
        measure(options, sys.argv[1:])


if __name__ == "__main__":
    main()
