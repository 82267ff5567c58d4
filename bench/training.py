"""Training: tokens per second of `Policy.update` beside a plain padded forward, backward and AdamW step.

`python bench/training.py [--model smollm2] [--dtype bfloat16]` samples `--prompts` groups of `--siblings` answers of
ragged lengths once, and trains both on them. `tokens` are the samples' own, prompt and answer; `computed` are those
that went through the model: with padding in the plain loop, siblings' prompts once where the trainer shares them.
`share` is 6 x parameters x tokens per second, as a share of the measured ceiling, for both counts.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from functools import partial
from typing import Any

import common
import torch
from common import Measured
from torch import nn

from cothink import losses
from cothink.policy import Knobs, Policy
from cothink.types import Sample

RATE = 1e-9
"""So small that every repeat trains the weights that sampled: the trainer compares its log-probs with the engine's."""


def samples(policy: Policy, options: argparse.Namespace) -> list[Sample]:
    """Groups of siblings with advantages that are never zero."""
    speaker = common.local(policy, options.rows)
    work = common.work(
        speaker.codec("p"), common.chats(options.model, options.prompts, options.seed),
        options.siblings, options.shortest, options.longest, options.seed,
    )  # fmt: skip
    made = []
    for k, (prompt, group) in enumerate(zip(work.prompts, common.sample(speaker, work, options.seed))):
        for j, done in enumerate(group):
            blank, n = [0.0] * len(prompt), len(done.output_ids)
            made.append(
                Sample(
                    policy="p",
                    role="solver",
                    unit=f"{k}#{j}/solver",
                    ids=(*prompt, *done.output_ids),
                    turns=(*[-1] * len(prompt), *[0] * n),
                    logprobs=(*blank, *done.logprobs),
                    advantages=(*blank, *[1.0 if j % 2 else -1.0] * n),
                    task=str(k),
                    episode=f"{k}#{j}",
                )
            )
    return made


def knobs(microbatch: int) -> Knobs:
    """One optimiser step with the usual clipped loss."""
    return Knobs(loss=partial(losses.policy, clip="ppo"), aggregate="token_mean", microbatch_tokens=microbatch)


def ours(policy: Policy, rows: Sequence[Sample], microbatch: int) -> float:
    """One update; returns the tokens that went through the model, nan if the trainer does not tell."""
    return policy.update(rows, knobs(microbatch)).get("tokens_computed", float("nan"))


class Plain:
    """What anybody would write first: padded microbatches in order, whole logits, AdamW."""

    def __init__(self, policy: Policy):
        self._policy, self._pad = policy, policy.tokenizer.pad_token_id
        self._optimizer = torch.optim.AdamW(policy.model.parameters(), lr=RATE)

    def update(self, rows: Sequence[Sample], microbatch: int) -> float:
        """One step; returns the tokens that went through the model, padding included."""
        model = self._policy.model.train()
        self._optimizer.zero_grad(set_to_none=True)
        trained = sum(s.trained for s in rows)
        size = max(1, microbatch // max(len(s.ids) for s in rows))
        computed = 0
        for start in range(0, len(rows), size):
            part = rows[start : start + size]
            batch = self._tensors(part)
            with self._policy.precision():
                logits = model(input_ids=batch["ids"], attention_mask=batch["mask"], use_cache=False).logits
            logp = -nn.functional.cross_entropy(
                logits[:, :-1].float().flatten(0, 1), batch["ids"][:, 1:].flatten(), reduction="none"
            )
            ratio = (logp - batch["old"][:, 1:].flatten()).exp()
            (-(ratio * batch["advantages"][:, 1:].flatten()).sum() / trained).backward()
            computed += batch["ids"].numel()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        self._optimizer.step()
        model.eval()
        return float(computed)

    def _tensors(self, part: Sequence[Sample]) -> dict[str, Any]:
        width, device = max(len(s.ids) for s in part), self._policy.device
        fill = {"ids": self._pad, "mask": 0, "old": 0.0, "advantages": 0.0}
        lines = {
            "ids": [s.ids for s in part],
            "mask": [[1] * len(s.ids) for s in part],
            "old": [s.logprobs for s in part],
            "advantages": [s.advantages for s in part],
        }
        return {
            k: torch.tensor([[*v, *[fill[k]] * (width - len(v))] for v in values], device=device)
            for k, values in lines.items()
        }


def build() -> argparse.ArgumentParser:
    """The options."""
    return common.parser(
        __doc__, prompts=(16, 2), siblings=(8, 8), shortest=(16, 16), longest=(64, 64), rows=(256, 64),
        microbatch=(8192, 4096), repeats=(5, 2),
    )  # fmt: skip


def measure(options: argparse.Namespace) -> None:
    """Alternates both on the same samples and prints the table."""
    policy = common.policy(options.model, options.dtype, RATE)
    rows = samples(policy, options)
    plain = Plain(common.policy(options.model, options.dtype, RATE))
    tokens = sum(len(s.ids) for s in rows)

    def runner(update: Any) -> Any:
        def run(repeat: int) -> Measured:
            seconds, computed = common.timed(lambda: update(rows, options.microbatch))
            return Measured(seconds, {"computed": computed, "rate": tokens / seconds})

        return run

    systems = {"cothink update": runner(partial(ours, policy)), "plain padded loop": runner(plain.update)}
    for run in systems.values():
        run(0)  # warm-up: optimiser states, kernels
    runs = common.alternate(
        {**systems, "ceiling": lambda k: Measured(common.ceiling(policy.model, options.dtype), {})}, options.repeats
    )
    peak = common.median(runs.pop("ceiling"))
    _report(options, rows, tokens, runs, common.parameters(policy.model), peak)


def _report(
    options: argparse.Namespace, rows: Sequence[Sample], tokens: int, runs: Any, weights: int, peak: float
) -> None:
    common.header("Training", options, ceiling=f"{peak / 1e9:,.0f} GFLOP/s", microbatch_tokens=options.microbatch)
    lengths = [len(s.ids) for s in rows]
    print(
        f"{len(rows)} samples of {min(lengths)}-{max(lengths)} tokens in groups of {options.siblings}: {tokens:,} "
        f"tokens, {sum(s.trained for s in rows):,} trained"
    )
    base = runs["plain padded loop"]
    lines = []
    for name, found in runs.items():
        seconds, computed = common.median(found), common.median(found, "computed")
        ratio = common.median([Measured(b.seconds / a.seconds, {}) for a, b in zip(found, base)])
        shares = [common.percent(6.0 * weights * n / seconds / peak) for n in (tokens, computed)]
        lines.append((name, seconds, tokens / seconds, common.times(ratio), shares[0], computed, shares[1]))
    head = ("system", "seconds", "tokens/s", "ratio", "share of ceiling", "computed", "share computed")
    common.table(head, lines)


def main() -> None:
    """Reads the options and measures."""
    measure(common.parse(build()))


if __name__ == "__main__":
    main()
