"""The scripted engine answers from a list or a function: for tests, dry runs and `cothink check`."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any

from cothink.chat import Codec, InternCodec
from cothink.types import Completion, Message, Sampling


@dataclass(frozen=True, slots=True)
class Call:
    """One recorded engine call."""

    policy: str
    messages: tuple[Message, ...]
    prompt_ids: tuple[int, ...]
    sampling: Sampling
    n: int
    seed: int


Reply = str | Completion
Script = Callable[[Call], "Reply | list[Reply] | Awaitable[Any]"] | Sequence[Reply]


class ScriptedEngine:
    """Answers every call from a script and keeps the calls in `calls`.

    The script is a list used up in order, or a function of the `Call` (plain or async) that returns one reply for all
    siblings or a list of n. A reply is a text, or a `Completion` where finish reason or ids matter; an exception in a
    list is raised. Stop strings cut texts as a real engine would.
    """

    def __init__(self, script: Script, codec: Codec | None = None):
        self._script = script if callable(script) else iter(list(script))
        self._codec = InternCodec() if codec is None else codec  # an empty codec is false
        self.calls: list[Call] = []

    def codec(self, policy: str) -> Codec:
        """One codec for every policy."""
        return self._codec

    def load(self, policy: str, weights: Any, version: int) -> None:
        """A script has no weights."""

    async def generate(
        self,
        policy: str,
        messages: Sequence[Message],
        prompt_ids: tuple[int, ...],
        sampling: Sampling,
        n: int,
        seed: int,
    ) -> list[Completion]:
        """Records the call and answers it; see `Engine`."""
        call = Call(policy, tuple(messages), tuple(prompt_ids), sampling, n, seed)
        self.calls.append(call)
        if callable(self._script):
            reply = self._script(call)
            if asyncio.iscoroutine(reply):
                reply = await reply
            replies = reply if isinstance(reply, list) else [reply] * n
        else:
            replies = [self._next(call) for _ in range(n)]
        return [self._complete(r, call) for r in replies]

    def _next(self, call: Call) -> Any:
        try:
            reply = next(self._script)  # type: ignore[arg-type]
        except StopIteration:
            raise RuntimeError(f"the script is used up at call {len(self.calls)} (policy {call.policy!r})") from None
        if isinstance(reply, Exception):
            raise reply
        return reply

    def _complete(self, reply: Any, call: Call) -> Completion:
        if isinstance(reply, Completion):
            if reply.prompt_ids:
                return reply
            text, reason = reply.text, reply.finish_reason
        else:
            text, reason = reply, "stop"
        for stop in call.sampling.stop:
            if stop in text:
                text = text[: text.index(stop) + len(stop)]
        ids = (self._codec.intern("assistant", text),) if isinstance(self._codec, InternCodec) else ()
        return Completion(text, call.prompt_ids, tuple(ids), (0.0,) * len(ids), reason)


def engine(script: Script, codec: Codec | None = None) -> ScriptedEngine:
    """A `ScriptedEngine`."""
    return ScriptedEngine(script, codec)
