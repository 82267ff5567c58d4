"""Answers under a JSON schema: what is sampled fits, and the trainer sees the distribution it was sampled from."""

from __future__ import annotations

import asyncio
import json
from functools import partial

import pytest
import torch

from cothink import losses
from cothink.engines.local import engine as local_engine
from cothink.loading import load_policies
from cothink.parts import PolicyPart
from cothink.policy import Knobs
from cothink.types import Message, Sample, Sampling

pytest.importorskip("llguidance")
SCHEMA = json.dumps(
    {
        "type": "object",
        "properties": {"action": {"enum": ["PLAN", "SOLVE"]}, "output": {"type": "string", "maxLength": 6}},
        "required": ["action", "output"],
        "additionalProperties": False,
    }
)


def ask(engine, n, sampling):
    messages = [Message("user", "plan")]
    prompt = engine.codec("p").start(messages)
    return asyncio.run(engine.generate("p", messages, prompt, sampling, n, 3))


def test_constrained_answers_fit_and_train_on_the_masked_distribution(tiny_folder):
    """rema §7 row 33: schema-valid output under constraint; forced tokens are not trained."""
    policy = load_policies({"p": PolicyPart(model=str(tiny_folder), learning_rate=1e-3)}, str)["p"]
    done = ask(local_engine({"p": policy}), 12, Sampling(max_tokens=60, schema=SCHEMA))
    whole = [c for c in done if c.finish_reason == "stop"]
    assert len(whole) >= 6 and {json.loads(c.text)["action"] for c in whole} == {"PLAN", "SOLVE"}
    rows = []
    for k, c in enumerate(done):
        blank, n = (0.0,) * len(c.prompt_ids), len(c.output_ids)
        rows.append(
            Sample(
                "p", "meta", f"{k}/meta", (*c.prompt_ids, *c.output_ids), (-1,) * len(blank) + (0,) * n,
                (*blank, *c.logprobs), (*blank, *[1.0 if k % 2 else -1.0] * n), schema=c.schema,
            )
        )  # fmt: skip
    free, masks = policy.unforced(rows)
    forced = sum(r.trained for r in rows) - sum(s.trained for s in free)
    zero = sum(lp == 0.0 for c in done for lp in c.logprobs)
    assert forced == zero > 12  # a forced token was sampled with probability 1
    assert all(len(masks[id(s)]) == s.trained for s in free)
    knobs = Knobs(loss=partial(losses.policy, clip="none", dual_clip=None, log_ratio_max=None), aggregate="token_mean")
    metrics = policy.update(rows, knobs)
    assert metrics["engine_gap_max"] < 1e-4 and metrics["gradient_norm"] > 0


def test_a_masked_token_gets_no_gradient(tiny_folder):
    from cothink.logprobs import _TokenLogprob

    torch.manual_seed(0)
    states, weight = torch.randn(3, 4, requires_grad=True), torch.randn(7, 4, requires_grad=True)
    allowed = torch.tensor([[1, 1, 0, 0, 1, 0, 0], [1] * 7, [0, 1, 1, 0, 0, 0, 0]], dtype=torch.bool)
    targets = torch.tensor([4, 2, 1])
    values, entropies = _TokenLogprob.apply(states, weight, None, targets, torch.ones(3), allowed, True)  # type: ignore[misc]
    (values.sum() + 0.3 * entropies.sum()).backward()
    got = states.grad.clone(), weight.grad.clone()
    states.grad = weight.grad = None
    logp = (states @ weight.T).masked_fill(~allowed, -1e30).log_softmax(-1)
    spread = -(logp.exp() * logp.masked_fill(~allowed, 0.0)).sum()
    (logp.gather(1, targets[:, None]).sum() + 0.3 * spread).backward()
    assert torch.allclose(got[0], states.grad, atol=1e-6) and torch.allclose(got[1], weight.grad, atol=1e-6)
