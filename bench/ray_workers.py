"""Pools of Ray workers beside the local engine: tokens per second with 1, 2, ... workers, and what new weights cost.

`python bench/ray_workers.py [--workers 1 2] [--lora-r 16]` needs the extra `ray`. All sample the same prompts from the
same weights, full ones or an adapter with `--lora-r`. `update` is the time from changed weights in the trainer until
every worker has them: for the local engine, which samples from the trainer's own, there is none. Start-up is told in
a column of its own, and is not part of the others. A pool can be faster than one process only where the machine has
processors for its workers beside the one that asks: every worker has one thread, the local engine has `--threads`.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from typing import Any

import common
import torch
from common import Measured

from cothink import models
from cothink.loading import load_policies
from cothink.parts import PolicyPart
from cothink.policy import Policy


def nudge(policy: Policy) -> None:
    """New weights, as after an update."""
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter.add_(1e-4 * torch.randn_like(parameter))
    policy.version += 1


def update(engine: Any, policy: Policy) -> None:
    """Hands the weights over and waits until everybody has them."""
    engine.load("p", None, policy.version)
    if hasattr(engine, "settle"):
        engine.settle()


def measured(engine: Any, work: common.Work, policy: Policy) -> Callable[[int], Measured]:
    """One repeat: all the work, then new weights."""

    def run(repeat: int) -> Measured:
        engine.forget()
        seconds, groups = common.timed(lambda: common.sample(engine, work, repeat))
        tokens = sum(len(done.output_ids) for group in groups for done in group)
        nudge(policy)
        new, _ = common.timed(lambda: update(engine, policy))
        return Measured(seconds, {"tokens": tokens / seconds, "update": new})

    return run


def build() -> argparse.ArgumentParser:
    """The options."""
    made = common.parser(
        __doc__, prompts=(64, 8), siblings=(8, 8), shortest=(16, 16), longest=(64, 64), rows=(256, 64), repeats=(3, 2)
    )
    made.add_argument("--workers", type=int, nargs="+", default=[1, 2], metavar="N")
    made.add_argument("--lora-r", type=int, default=None, metavar="N", help="an adapter; full weights without it")
    return made


def main(argv: Sequence[str] | None = None) -> None:
    """Measures all and prints the table."""
    options = common.parse(build(), argv)
    from cothink.engines import ray

    part = PolicyPart(model=options.model, dtype=options.dtype, lora_r=options.lora_r)
    policy = load_policies({"p": part}, models.where)["p"]
    engines: dict[str, Any] = {"local": common.local(policy, options.rows)}
    starts = {"local": float("nan")}
    for count in options.workers:
        begun = time.perf_counter()
        name = f"ray, {count} worker{'s' * (count > 1)}"
        engines[name] = ray.engine({"p": policy}, workers=count, max_rows=options.rows)
        starts[name] = time.perf_counter() - begun
    work = common.work(
        engines["local"].codec("p"), common.chats(options.model, options.prompts, options.seed),
        options.siblings, options.shortest, options.longest, options.seed,
    )  # fmt: skip
    for engine in engines.values():
        common.sample(engine, work, 0)
    runs = common.alternate({name: measured(e, work, policy) for name, e in engines.items()}, options.repeats)
    common.header("a pool of workers", options, ray=common.installed("ray"))
    base = common.median(runs["local"], "tokens")
    common.table(
        ("engine", "tokens/s", "to local", "update, s", "start, s"),
        [
            (name, common.median(found, "tokens"), common.times(common.median(found, "tokens") / base),
             common.median(found, "update") if name != "local" else float("nan"), starts[name])
            for name, found in runs.items()
        ],
    )  # fmt: skip
    for engine in list(engines.values())[1:]:
        engine.close()


if __name__ == "__main__":
    main()
