"""A frozen outside agent behind an OpenAI-compatible chat server, named `openai:MODEL@URL`."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from typing import Any

from cothink.chat import Codec, InternCodec
from cothink.engines import replies
from cothink.types import UNKNOWN_ID, Completion, Message, PlayError, Sampling


class OpenAIEngine:
    """Asks a chat server; it cannot be trained.

    Servers do not tell their token ids: every output id is -1, and there are as many as the server says it generated.
    The context limit of a workflow therefore counts messages and generated tokens for such a role.
    """

    def __init__(self, model: str, url: str | None, key: str | None, timeout: float, retries: int):
        try:
            from openai import AsyncOpenAI, OpenAIError
        except ImportError:
            raise PlayError("an openai: model needs an extra: pip install 'cothink[serve]'") from None
        self.model, self._url, self._error = model, url or "the default server", OpenAIError
        self._make = lambda: AsyncOpenAI(base_url=url, api_key=key, timeout=timeout, max_retries=retries)
        self._clients: dict[Any, Any] = {}
        self._codec = InternCodec()

    def codec(self, policy: str) -> Codec:
        """One id per message: the server has the real tokenizer."""
        return self._codec

    def load(self, policy: str, weights: Any, version: int) -> None:
        """The server keeps its own weights."""

    async def generate(
        self,
        policy: str,
        messages: Sequence[Message],
        prompt_ids: tuple[int, ...],
        sampling: Sampling,
        n: int,
        seed: int,
    ) -> list[Completion]:
        """See `Engine`; top_k is not part of the protocol and is refused."""
        if sampling.top_k:
            raise PlayError(f"policy {policy}: an openai: server knows no top_k; remove it from the role")
        try:
            asked = self._client().chat.completions.with_streaming_response.create(
                model=self.model,
                messages=[{"role": m.role, "content": m.content} for m in messages],
                n=n,
                temperature=sampling.temperature,
                top_p=sampling.top_p,
                max_tokens=sampling.max_tokens,
                seed=seed % 2**31,
                **({"stop": list(sampling.stop)} if sampling.stop else {}),
                **({"response_format": _format(sampling.schema)} if sampling.schema is not None else {}),
            )
            reply = await replies.read(asked)
        except (self._error, replies.Unreadable) as error:
            raise PlayError(f"policy {policy}: {self.model} at {self._url}: {error}") from error
        share, rest = divmod(replies.spent(reply, sampling, n), n)
        done = []
        for k, choice in enumerate(reply.choices):
            text, long = replies.cut(choice.message.content or "", sampling)
            # A server cuts the stop string away; it belongs to the text, as with every other engine.
            stopped = getattr(choice, "stop_reason", None)
            if isinstance(stopped, str) and stopped in sampling.stop and not text.endswith(stopped):
                text += stopped
            ids = (UNKNOWN_ID,) * max(1, share + (k < rest))
            reason = "length" if long or choice.finish_reason == "length" else "stop"
            done.append(Completion(text, prompt_ids, ids, (), reason))
        return done

    def _client(self) -> Any:
        """One client per event loop: its connections belong to the loop that opened them."""
        import asyncio

        loop = asyncio.get_running_loop()
        self._clients = {known: client for known, client in self._clients.items() if not known.is_closed()}
        if loop not in self._clients:
            self._clients[loop] = self._make()
        return self._clients[loop]


def _format(schema: str) -> Any:
    """What the protocol calls a JSON schema that the answer must fit."""
    return {"type": "json_schema", "json_schema": {"name": "answer", "strict": True, "schema": json.loads(schema)}}


def engine(name: str, *, timeout: float = 120.0, retries: int = 3) -> OpenAIEngine:
    """The engine of `openai:MODEL@URL`, or of the default server without URL; the key is OPENAI_API_KEY."""
    model, _, url = name.removeprefix("openai:").partition("@")
    if not model:
        raise ValueError(f"{name!r} names no model; write openai:MODEL@http://host:port/v1")
    return OpenAIEngine(model, url or None, os.environ.get("OPENAI_API_KEY", "none"), timeout, retries)
