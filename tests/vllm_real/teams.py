"""Policies, and what two engines over them say to the same prompts."""

from __future__ import annotations

import asyncio

import torch

from cothink.engines import local
from cothink.loading import load_policies
from cothink.models import where
from cothink.parts import PolicyPart
from cothink.types import Completion, Message, Sampling

QUESTIONS = ("Ann has 3 apples and gets 4. How many?", "What is 7 + 5?", "Count the birds: two and two.", "Say 1.")
GREEDY = Sampling(temperature=0.0, max_tokens=12)


def policies(model: str = "builtin:tiny", **parts: dict) -> dict:
    """Policies of one model by name, such as `a={"lora_r": 4}`; adapters get weights that change what they say."""
    specs = {name: PolicyPart(model=model, **part) for name, part in parts.items()}
    found = load_policies(specs, where)
    for k, policy in enumerate(found.values()):
        if policy.adapter is not None:
            shake(policy, seed=k)
    return found


def shake(policy, seed: int, size: float = 0.05) -> None:
    """Random steps of the trained weights; the version goes up as after an update."""
    dice = torch.Generator().manual_seed(1000 + seed)
    with torch.no_grad():
        for weight in policy.parameters():
            weight.add_(size * torch.randn(weight.shape, generator=dice).to(weight.dtype))
    policy.version += 1


def says(engine, policy: str, how: Sampling = GREEDY, n: int = 1, seed: int = 7) -> list[Completion]:
    """Completions of all questions, asked at once."""

    async def asked() -> list[list[Completion]]:
        codec = engine.codec(policy)
        chats = [[Message("system", "Solve."), Message("user", q)] for q in QUESTIONS]
        return await asyncio.gather(*(engine.generate(policy, c, codec.start(c), how, n, seed) for c in chats))

    return [one for group in asyncio.run(asked()) for one in group]


def beside(made: dict):
    """The local engine over the same policies."""
    return local.engine(made)


def logprobs(policy, completion: Completion, temperature: float = 1.0) -> list[float]:
    """The trainer's log-probs of a completion's tokens."""
    from cothink.batch import pad
    from cothink.types import Sample

    prompt, output = completion.prompt_ids, completion.output_ids
    turns = (-1,) * len(prompt) + (0,) * len(output)
    spoken = (0.0,) * len(prompt) + completion.logprobs
    sample = Sample(
        policy.name, "r", "u", (*prompt, *output), turns, spoken, (0.0,) * len(turns), temperature=temperature
    )
    with torch.no_grad():
        values = policy.logprobs(pad([sample], [(1.0,) * len(turns)]))[0]
    return values[0, len(prompt) :].tolist()
