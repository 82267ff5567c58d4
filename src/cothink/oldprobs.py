"""The trainer's own log-probs under the weights that sampled, taken before a step's first update."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from cothink.batch import microbatches, pad
from cothink.logprobs import allowed_tokens, is_flat, token_logprobs
from cothink.types import Sample

if TYPE_CHECKING:
    from cothink.policy import Policy


def with_old(policy: Policy, samples: Sequence[Sample], tokens: int) -> list[Sample]:
    """The samples with the trainer's `logprobs`, and what the engine said beside them as `rollout`.

    One forward pass over microbatches of `tokens` tokens. Tokens that a schema forced keep the engine's number.
    """
    free, masks = policy.unforced(samples)
    place = {id(s): k for k, s in enumerate(free)}
    found = list(samples)
    for micro in microbatches(free, tokens, padded=not is_flat(policy.model)):
        batch = pad(micro, [[0.0] * len(s.ids) for s in micro]).to(policy.device)
        allowed = allowed_tokens([masks.get(id(s)) for s in micro], batch)
        with torch.no_grad(), policy.computing():
            values = token_logprobs(policy.model, batch, allowed=allowed)[0].tolist()
        for sample, row in zip(micro, values, strict=True):
            k = place[id(sample)]
            ours = tuple(v if t >= 0 else w for v, t, w in zip(row, sample.turns, samples[k].logprobs))
            found[k] = replace(samples[k], logprobs=ours, rollout=samples[k].logprobs)
    return found
