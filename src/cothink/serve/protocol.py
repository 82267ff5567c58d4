"""The chat completions protocol: a request body becomes a question and a wish, an answer becomes JSON or chunks."""

from __future__ import annotations

import json
import re
import time
import uuid
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from cothink.answering import Answer, Usage, Wish, checked, question_of
from cothink.resolve import nearest, short
from cothink.types import Message, Turn

MAX_VOTES = 64
NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "n": (1,), "presence_penalty": (0,), "frequency_penalty": (0,), "logit_bias": ({},), "logprobs": (False,),
    "stop": ([],), "tools": ([],), "functions": ([],), "parallel_tool_calls": (True, False), "tool_choice": ("none",),
    "store": (False,), "response_format": ({"type": "text"},), "modalities": (["text"],), "service_tier": ("auto",),
}  # fmt: skip
"""Parameters that a team cannot follow, with the values that ask for nothing: those are accepted."""
INSTEAD: Mapping[str, str] = {
    "n": "ask several times, or let the team vote: votes",
    "max_completion_tokens": "max_tokens bounds each turn, and max_turns the turns of teams that count them",
    "stop": "the roles of a team end their own turns",
}
IGNORED = ("user", "metadata", "safety_identifier", "prompt_cache_key")
"""Parameters that only label a request: accepted, and not looked at."""
MESSAGE_KEYS = ("role", "content", "reasoning_content")
"""The reasoning of earlier answers may come back with them; it is not read again."""


class Refusal(Exception):
    """A request that is answered by an error; `param` names what is wrong with it."""

    def __init__(
        self, status: int, message: str, *, param: str | None = None, code: str | None = None, retry: int | None = None
    ):
        message = short(message, 1_000)  # it quotes what the client wrote
        super().__init__(message)
        self.param = None if param is None else short(param, 200)
        self.status, self.message, self.code, self.retry = status, message, code, retry

    def body(self) -> dict[str, Any]:
        """The error as the protocol writes it."""
        kinds = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error", 504: "timeout_error"}
        kind = kinds.get(self.status, "invalid_request_error" if self.status < 500 else "server_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}


class StreamOptions(BaseModel):
    """What a stream carries beside the answer."""

    model_config = ConfigDict(extra="forbid")
    include_usage: bool | None = None


class Body(BaseModel):
    """What a request may hold; `votes`, `max_turns` and `trace` are our own."""

    model_config = ConfigDict(extra="forbid", strict=True)

    model: str
    messages: Annotated[list[dict[str, Any]], Field(min_length=1, max_length=1000)]
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    seed: int | None = None
    votes: Annotated[int, Field(ge=1, le=MAX_VOTES)] | None = None
    max_turns: Annotated[int, Field(ge=1)] | None = None
    trace: bool | None = None


@dataclass(frozen=True, slots=True)
class Ask:
    """One request, understood."""

    question: str
    wish: Wish
    stream: bool = False
    usage: bool = False
    trace: bool = False


def parse(data: bytes, served: str) -> Ask:
    """The request of a JSON body; raises Refusal for anything that would not be followed."""
    try:
        tree = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise Refusal(400, f"the body is not JSON: {error}", code="invalid_json") from None
    if not isinstance(tree, dict):
        raise Refusal(400, "the body must be a JSON object, such as {\"model\": ..., \"messages\": [...]}")  # fmt: skip
    body = _body({k: v for k, v in tree.items() if v is not None and k not in IGNORED})
    if body.model != served:
        what = f"there is no model {body.model!r} here; write {served!r}"
        raise Refusal(404, what, param="model", code="model_not_found")
    if body.stream_options is not None and not body.stream:
        raise Refusal(400, "stream_options is for streams; write stream: true, or leave it out", param="stream_options")
    try:
        question = checked(question_of([_message(k, m) for k, m in enumerate(body.messages)]))
    except ValueError as error:
        raise Refusal(400, str(error), param="messages") from None
    wish = Wish(body.votes or 1, body.max_turns, body.temperature, body.top_p, body.max_tokens, body.seed)
    usage = body.stream_options is not None and bool(body.stream_options.include_usage)
    return Ask(question, wish, bool(body.stream), usage, bool(body.trace))


def _body(tree: dict[str, Any]) -> Body:
    for key in list(tree):
        if key in Body.model_fields:
            continue
        if key in NEUTRAL and tree[key] in NEUTRAL[key]:
            del tree[key]
        elif key in NEUTRAL or key in INSTEAD:
            hint = INSTEAD.get(key, "leave it out")
            raise Refusal(400, f"{key} is not supported by a team: {hint}", param=key, code="unsupported_parameter")
        else:
            close = nearest(key, Body.model_fields)
            hint = f"; did you mean {close!r}?" if close else f"; known are {', '.join(Body.model_fields)}"
            raise Refusal(400, f"unknown parameter {key!r}{hint}", param=key, code="unknown_parameter")
    try:
        return Body.model_validate(tree)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        raise Refusal(400, f"{where}: {first['msg'].removeprefix('Input should be ')}", param=where) from None


def _message(place: int, given: dict[str, Any]) -> Message:
    where = f"messages[{place}]"
    strange = next((k for k, v in given.items() if v not in (None, [], {}) and k not in MESSAGE_KEYS), None)
    if strange is not None:
        raise ValueError(f"{where}: a team does not read {strange!r}; a message has a role and a content")
    role = {"developer": "system"}.get(str(given.get("role")), given.get("role"))
    if role not in ("system", "user", "assistant"):
        raise ValueError(f"{where}: role {role!r} is not understood; write system, developer, user or assistant")
    return Message(role, _content(where, given.get("content")))


def _content(where: str, content: Any) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise ValueError(f"{where}: content is {type(content).__name__}; write a text, or a list of text parts")
    parts = []
    for part in content:
        text = part.get("text") if isinstance(part, Mapping) and part.get("type") == "text" else None
        if not isinstance(text, str):
            raise ValueError(f'{where}: a part of content is no text; write {{"type": "text", "text": "..."}}')
        parts.append(text)
    return "".join(parts)


# what goes back


def said(turn: Turn, play: int, plays: int) -> str:
    """One turn of the inner conversation as text: who speaks, in which of several plays, and what."""
    number = f"{play + 1}/{plays} " if plays > 1 else ""
    return f"[{number}{turn.role}] {turn.text}\n\n"


def usage(found: Usage) -> dict[str, Any] | None:
    """Tokens as the protocol counts them, over all calls and plays; None where an outside server hides its prompts."""
    if found.prompt is None:
        return None
    return {
        "prompt_tokens": found.prompt,
        "completion_tokens": found.generated,
        "total_tokens": found.prompt + found.generated,
        "completion_tokens_details": {"reasoning_tokens": found.inner},
    }


def new_id() -> str:
    """The name of one answer."""
    return f"chatcmpl-{uuid.uuid4().hex}"


def completion(ask: Ask, found: Answer, inner: str, served: str) -> dict[str, Any]:
    """A whole answer."""
    message = {"role": "assistant", "content": found.text, "reasoning_content": inner or None}
    choice = {"index": 0, "message": message, "finish_reason": _reason(found), "logprobs": None}
    return {
        "id": new_id(), "object": "chat.completion", "created": int(time.time()), "model": served, "choices": [choice],
        "usage": usage(found.usage), **({"trace": found.trace()} if ask.trace else {}),
    }  # fmt: skip


def _reason(found: Answer) -> Literal["stop", "length"]:
    return "stop" if found.whole else "length"


class Chunks:
    """The parts of one streamed answer, as lines to send."""

    def __init__(self, ask: Ask, served: str):
        self._ask = ask
        self._head = {
            "id": new_id(), "object": "chat.completion.chunk", "created": int(time.time()), "model": served,
        }  # fmt: skip

    def first(self) -> bytes:
        """The opening, which names the speaker."""
        return self._delta({"role": "assistant", "content": ""})

    def inner(self, text: str) -> bytes:
        """A turn of the inner conversation."""
        return self._delta({"reasoning_content": text})

    def last(self, found: Answer) -> Iterator[bytes]:
        """The final message, its finish reason (with the trace), the usage where asked for, and the end mark."""
        yield self._delta({"content": found.text})
        trace = {"trace": found.trace()} if self._ask.trace else {}
        yield self._delta({}, _reason(found), **trace)
        if self._ask.usage:
            yield event({**self._head, "choices": [], "usage": usage(found.usage)})
        yield b"data: [DONE]\n\n"

    def _delta(self, delta: dict[str, Any], reason: str | None = None, **more: Any) -> bytes:
        choice = {"index": 0, "delta": delta, "finish_reason": reason, "logprobs": None}
        null_usage = {"usage": None} if self._ask.usage else {}
        return event({**self._head, "choices": [choice], **null_usage, **more})


def event(data: Any) -> bytes:
    """One event of a stream."""
    return b"data: " + dumps(data) + b"\n\n"


def dumps(data: Any) -> bytes:
    """JSON in bytes; halves of surrogate pairs, which UTF-8 cannot hold, are escaped."""
    text = json.dumps(data, ensure_ascii=False, separators=(",", ":"))
    return re.sub("[\ud800-\udfff]", lambda m: f"\\u{ord(m[0]):04x}", text).encode()
