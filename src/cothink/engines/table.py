"""A softmax table: an engine and its policies in plain Python, so that a workflow can learn without torch.

The state is the exact prompt, the action one of a few whole texts, the gradient the textbook one.
"""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from cothink.chat import Codec, InternCodec
from cothink.types import Completion, Message, Sample, Sampling

Actions = Sequence[str] | Callable[[Sequence[Message]], Sequence[str]]


class TablePolicy:
    """Logits per (prompt, action); one Sample token is one whole action.

    `learning_rate` scales plain gradient ascent on sum of advantage x log-probability.
    """

    def __init__(self, name: str, actions: Actions, codec: InternCodec, learning_rate: float = 1.0):
        self.name, self.learning_rate, self.version = name, learning_rate, 0
        self._actions, self._codec = actions, codec
        self._logits: dict[tuple[int, ...], dict[int, float]] = {}

    def probabilities(self, prompt: tuple[int, ...], messages: Sequence[Message] = ()) -> dict[int, float]:
        """Action id -> probability at temperature 1."""
        if prompt not in self._logits:
            actions = self._actions(messages) if callable(self._actions) else self._actions
            self._logits[prompt] = {self._codec.intern("assistant", a): 0.0 for a in actions}
        return softmax(self._logits[prompt])

    def update(self, samples: Sequence[Sample], **knobs: Any) -> dict[str, float]:
        """One gradient step on all samples; the knobs of a torch policy mean nothing to a table."""
        steps: list[tuple[tuple[int, ...], int, float]] = []
        for sample in samples:
            for j, turn in enumerate(sample.turns):
                if turn >= 0:
                    steps.append((sample.ids[:j], sample.ids[j], sample.advantages[j]))
        gradient: dict[tuple[int, ...], dict[int, float]] = {}
        for state, action, advantage in steps:
            g = gradient.setdefault(state, dict.fromkeys(self._logits[state], 0.0))
            for other, p in softmax(self._logits[state]).items():
                g[other] += advantage * ((other == action) - p)
        for state, g in gradient.items():
            for action, value in g.items():
                self._logits[state][action] += self.learning_rate * value / max(len(samples), 1)
        self.version += 1
        return {"updates": 1.0}

    def save(self, folder: Path) -> None:
        """Writes `NAME.json`: for every prompt, as texts, the logit of every action."""
        text = self._codec.decode
        rows = [
            [[text((i,)) for i in state], {text((a,)): v for a, v in row.items()}]
            for state, row in self._logits.items()
        ]
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{self.name}.json").write_text(json.dumps({"version": self.version, "table": rows}, indent=1))


class TableEngine:
    """Samples from table policies, all over one codec."""

    def __init__(self, policies: Mapping[str, TablePolicy], codec: InternCodec):
        self.policies, self._codec = dict(policies), codec

    def codec(self, policy: str) -> Codec:
        """One id per message."""
        return self._codec

    def load(self, policy: str, weights: Any, version: int) -> None:
        """The engine samples from the policies themselves, so there is nothing to copy."""

    async def generate(
        self,
        policy: str,
        messages: Sequence[Message],
        prompt_ids: tuple[int, ...],
        sampling: Sampling,
        n: int,
        seed: int,
    ) -> list[Completion]:
        """See `Engine`; temperature 0 takes the likeliest action."""
        table = self.policies[policy]
        p = table.probabilities(tuple(prompt_ids), messages)
        if sampling.temperature not in (0.0, 1.0):
            logits = {a: math.log(max(v, 1e-300)) / sampling.temperature for a, v in p.items()}
            p = softmax(logits)
        done = []
        for k in range(n):
            if sampling.temperature == 0.0:
                action, logprob = max(p, key=lambda a: p[a]), 0.0
            else:
                action = random.Random(f"{seed}/{k}").choices(list(p), list(p.values()))[0]
                logprob = math.log(p[action])
            text = self._codec.decode((action,))
            done.append(Completion(text, tuple(prompt_ids), (action,), (logprob,), "stop", table.version))
        return done


def softmax(logits: Mapping[int, float]) -> dict[int, float]:
    """Probabilities of a row of logits."""
    top = max(logits.values())
    weights = {a: math.exp(v - top) for a, v in logits.items()}
    total = sum(weights.values())
    return {a: w / total for a, w in weights.items()}


def engine(actions: Mapping[str, Actions], learning_rate: float = 1.0) -> TableEngine:
    """A table engine with one policy per name; `actions` are its whole answers, or a function of the messages."""
    codec = InternCodec()
    return TableEngine({name: TablePolicy(name, acts, codec, learning_rate) for name, acts in actions.items()}, codec)
