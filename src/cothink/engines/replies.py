"""Replies of an outside chat server: read up to a limit, and checked before anything is made of them."""

from __future__ import annotations

import json
from typing import Any

from cothink.types import PlayError, Sampling

MOST_BYTES = 16 << 20
"""Of one reply, unpacked; a longer one is given up while it arrives: what is at the other end is not ours."""
TOKEN_CHARACTERS = 64
"""Characters that a token stands for at most: a text longer than its tokens can be is cut like one at its limit."""


class Unreadable(PlayError):
    """A reply that is too long, breaks off, or is no answer."""


async def read(asked: Any) -> tuple[Any, int]:
    """The reply to `chat.completions.with_streaming_response.create(...)`, and how often it was repeated.

    Raises Unreadable.
    """
    from openai.types.chat import ChatCompletion

    async with asked as arriving:
        data, retried = await _received(arriving), int(getattr(arriving, "retries_taken", 0))
    try:
        reply = ChatCompletion.construct(**json.loads(data))
    except (ValueError, TypeError, RecursionError) as error:
        raise Unreadable(f"the reply is no JSON object: {str(error)[:200]}") from error
    choices = getattr(reply, "choices", None)
    if not isinstance(choices, list) or not all(isinstance(_said(c), str | None) for c in choices):
        raise Unreadable("the reply holds no choices with a text")
    return reply, retried


async def _received(arriving: Any) -> bytes:
    data = bytearray()
    try:
        async for chunk in arriving.iter_bytes():
            data += chunk
            if len(data) > MOST_BYTES:
                raise Unreadable(f"the reply is longer than {MOST_BYTES >> 20} MiB")
    except Unreadable:
        raise
    except Exception as error:  # of the library below the client, which is not always the same one
        raise Unreadable(f"the reply broke off: {type(error).__name__} {str(error)[:200]}".rstrip()) from error
    return bytes(data)


def _said(choice: Any) -> Any:
    return getattr(getattr(choice, "message", False), "content", False)


def spent(reply: Any, sampling: Sampling, n: int) -> int:
    """Tokens that the server says it generated, in bounds: at most what it was asked for."""
    told = getattr(getattr(reply, "usage", None), "completion_tokens", None)
    return min(max(told, n), n * sampling.max_tokens) if isinstance(told, int) else n


def cut(text: str, sampling: Sampling) -> tuple[str, bool]:
    """The text without halves of surrogate pairs (no tokenizer takes them), and whether its end was cut off."""
    most = TOKEN_CHARACTERS * sampling.max_tokens
    return text[:most].encode("utf-8", "replace").decode(), len(text) > most
