"""Engines sample completions; each file imports its heavy library inside itself."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

if TYPE_CHECKING:
    from cothink.chat import Codec
    from cothink.types import Completion, Message, Sampling


@runtime_checkable
class Engine(Protocol):
    """What the team player asks of an engine.

    `generate` returns `n` completions of one prompt; the k-th depends only on weights, prompt, sampling and
    `(seed, k)`, never on what else is running. `messages` is the same prompt as text, for engines behind a chat API.
    """

    def codec(self, policy: str) -> Codec: ...

    async def generate(
        self,
        policy: str,
        messages: Sequence[Message],
        prompt_ids: tuple[int, ...],
        sampling: Sampling,
        n: int,
        seed: int,
    ) -> list[Completion]: ...

    def load(self, policy: str, weights: Any, version: int) -> None: ...
