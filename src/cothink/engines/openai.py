"""A frozen outside agent behind an OpenAI-compatible chat server, named `openai:MODEL@URL`."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from typing import Any

from cothink.chat import Codec, InternCodec
from cothink.engines import replies
from cothink.engines.billing import Bill, Pace
from cothink.types import UNKNOWN_ID, Completion, Message, PlayError, Sampling


class OpenAIEngine:
    """Asks a chat server; it cannot be trained.

    Servers do not tell their token ids: every output id is -1, and there are as many as the server says it generated.
    The context limit of a workflow therefore counts messages and generated tokens for such a role.
    """

    def __init__(
        self, model: str, url: str | None, key: str | None, timeout: float, retries: int, pace: Pace, bill: Bill
    ):
        try:
            from openai import AsyncOpenAI, OpenAIError
        except ImportError:
            raise PlayError("an openai: model needs an extra: pip install 'cothink[serve]'") from None
        self.model, self._url, self._error = model, url or "the default server", OpenAIError
        self._make = lambda: AsyncOpenAI(base_url=url, api_key=key, timeout=timeout, max_retries=retries)
        self._clients: dict[Any, Any] = {}
        self._pace, self._bill = pace, bill
        self.figures = bill.figures
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
        await self._pace.turn()
        self._bill.allow()
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
            reply, retried = await replies.read(asked)
        except (self._error, replies.Unreadable) as error:
            raise PlayError(f"policy {policy}: {self.model} at {self._url}: {error}") from error
        self._bill.add(policy, getattr(reply, "usage", None), retried)
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


def engine(
    name: str,
    *,
    timeout: float = 120.0,
    retries: int = 3,
    requests_per_minute: float | None = None,
    prices: tuple[float, float] | None = None,
    max_cost: float | None = None,
) -> OpenAIEngine:
    """The engine of `openai:MODEL@URL`, or of the default server without URL; the key is OPENAI_API_KEY.

    `timeout` is of one request, in seconds. Requests that a busy or failing server refuses are repeated up to `retries`
    times, as late as it asks for, or after twice as long each time. `prices`: of a million prompt tokens and of a
    million output tokens; `max_cost`: the most that this process may spend, in the same currency.
    """
    model, _, url = name.removeprefix("openai:").partition("@")
    if not model:
        raise ValueError(f"{name!r} names no model; write openai:MODEL@http://host:port/v1")
    fit(timeout, retries, requests_per_minute, prices, max_cost)
    key = os.environ.get("OPENAI_API_KEY", "none")
    return OpenAIEngine(model, url or None, key, timeout, retries, Pace(requests_per_minute), Bill(prices, max_cost))


def fit(
    timeout: float = 120.0,
    retries: int = 3,
    requests_per_minute: float | None = None,
    prices: tuple[float, float] | None = None,
    max_cost: float | None = None,
) -> None:
    """Raises ValueError for options of `engine` that mean nothing."""
    if timeout <= 0 or retries < 0:
        raise ValueError(f"timeout {timeout:g}, retries {retries}: write a timeout above 0 and retries of 0 or more")
    if requests_per_minute is not None and requests_per_minute <= 0:
        raise ValueError(f"requests_per_minute {requests_per_minute:g}: write more than 0, or leave it out")
    if prices is not None and (len(prices) != 2 or min(prices) < 0):
        raise ValueError(f"prices {list(prices)}: write two, of a million prompt tokens and of a million output tokens")
    if max_cost is not None and (prices is None or max_cost <= 0):
        raise ValueError(f"max_cost {max_cost:g}: write more than 0, and prices: [PROMPT, OUTPUT] beside it")
