"""What the local engine samples: requests, and what comes back for each of their completions."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from cothink.chat import TemplateCodec
from cothink.types import Sampling


@dataclass(slots=True)
class Answer:
    """One completion being sampled, the k-th of its request."""

    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    text: str | None = None
    reason: str = "length"
    matcher: Any = None


@dataclass(eq=False)
class Request:
    """One call of `generate`: `limit` is the most tokens an answer may have."""

    policy: str
    prompt: tuple[int, ...]
    sampling: Sampling
    seed: int
    limit: int
    answers: list[Answer]
    stops: Stops
    grammar: Any = None
    future: asyncio.Future[None] | None = None
    left: int = 0

    def __post_init__(self) -> None:
        self.left = len(self.answers)
        if self.grammar is not None:
            for answer in self.answers:
                answer.matcher = self.grammar.matcher()

    def dice(self, place: int) -> np.ndarray:
        """The random numbers [limit] of one answer: its own stream, whatever runs beside it."""
        return np.random.default_rng([self.seed, place]).random(self.limit)

    @property
    def abandoned(self) -> bool:
        """Whether nobody waits for it any more."""
        return self.future is not None and self.future.cancelled()


class Stops:
    """When an answer ends: at end tokens, or where a stop string is complete in its text."""

    def __init__(self, codec: TemplateCodec, size: int):
        self._codec, self._size = codec, size
        self.ids = np.array(sorted(codec.stop_ids), np.int64)
        self._tails: dict[str, np.ndarray | None] = {}

    def maybe(self, strings: Sequence[str]) -> np.ndarray:
        """Which tokens [V] may complete one of the strings: those whose text holds its last character."""
        found = np.zeros(self._size, bool)
        for stop in strings:
            if stop not in self._tails:
                last = stop[-1]
                texts = (self._codec.read((i,)) for i in range(self._size)) if last.isascii() else None
                self._tails[stop] = None if texts is None else np.array([last in text for text in texts])
            tail = self._tails[stop]
            found |= True if tail is None else tail
        return found

    def cut(self, ids: Sequence[int], strings: Sequence[str]) -> str | None:
        """The text up to and with the first complete stop string, None if there is none; the sampled ids are kept."""
        text = self._codec.read(tuple(ids))
        ends = [text.index(s) + len(s) for s in strings if s in text]
        return text[: min(ends)] if ends else None


class Sampler(Protocol):
    """Samples requests of the policies that share one model; `advance` works until at least one of them is done."""

    def submit(self, request: Request) -> None: ...

    def advance(self) -> list[Request]: ...

    def fail(self) -> list[Request]: ...

    @property
    def load(self) -> int: ...


@dataclass
class Counters:
    """What an engine did, in tokens: prompts computed and taken from the cache, answers; and its forward passes."""

    prefilled: int = 0
    reused: int = 0
    generated: int = 0
    steps: int = 0
    restarted: int = 0
    peak_cache_tokens: int = 0
