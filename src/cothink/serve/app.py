"""The routes of the endpoint."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import hmac
import time
from collections.abc import AsyncIterator
from typing import Any

from fastapi import FastAPI, Request
from starlette.exceptions import HTTPException
from starlette.responses import Response

from cothink.serve import protocol
from cothink.serve.desk import Desk, Work
from cothink.serve.protocol import Refusal

PATIENCE = 30.0
"""Seconds that a body may take to arrive."""
SILENCE = 15.0
"""Seconds without a turn after which a stream says that it is still there: proxies cut silent ones."""


def app(desk: Desk, key: str | None = None) -> FastAPI:
    """The application of one team; with a `key`, everything but /health needs it as a bearer token."""
    made = FastAPI(docs_url=None, redoc_url=None, openapi_url=None)
    served, began = desk.team.name, int(time.time())
    card = {"id": served, "object": "model", "created": began, "owned_by": "cothink"}
    digest = None if key is None else hashlib.sha256(key.encode()).digest()

    def admit(request: Request) -> None:
        given = request.headers.get("authorization", "").removeprefix("Bearer ").encode("latin-1")
        # Digests have one length, and are compared in constant time.
        if digest is not None and not hmac.compare_digest(hashlib.sha256(given).digest(), digest):
            raise Refusal(
                401, "wrong or missing API key; send it as `Authorization: Bearer KEY`", code="invalid_api_key"
            )

    @made.exception_handler(Refusal)
    async def refused(request: Request, error: Refusal) -> Response:
        return _refusal(error)

    @made.exception_handler(HTTPException)
    async def strange(request: Request, error: HTTPException) -> Response:
        known = "POST /v1/chat/completions, GET /v1/models, GET /health, GET /metrics"
        return _refusal(Refusal(error.status_code, f"{error.detail}; this server has {known}"))

    @made.exception_handler(Exception)
    async def broken(request: Request, error: Exception) -> Response:
        return _refusal(Refusal(500, "a fault of this server; its log says more", code="failed"))

    @made.get("/health")
    async def health() -> Response:
        return _json({"status": "stopping" if desk.draining else "ok"}, 503 if desk.draining else 200)

    @made.get("/metrics")
    async def metrics(request: Request) -> Response:
        admit(request)
        return Response(desk.counts.text(), media_type="text/plain; version=0.0.4; charset=utf-8")

    @made.get("/v1/models")
    async def models(request: Request) -> Response:
        admit(request)
        return _json({"object": "list", "data": [card]})

    @made.get("/v1/models/{name:path}")
    async def model(request: Request, name: str) -> Response:
        admit(request)
        if name != served:
            raise Refusal(404, f"there is no model {name!r} here; write {served!r}", code="model_not_found")
        return _json(card)

    @made.post("/v1/chat/completions")
    async def chat(request: Request) -> Response:
        try:
            admit(request)
            ask = protocol.parse(await _body(request, desk.limits.body), served)
            work = desk.start(ask)
            return Stream(desk, work) if ask.stream else await _whole(request, desk, work)
        except Refusal as error:
            desk.counts.requests.labels(str(error.status)).inc()
            raise

    return made


async def _body(request: Request, most: int) -> bytes:
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":  # a web page of a stranger can send anything else without asking first
        raise Refusal(415, f"the body is {kind or 'of no type'}; send Content-Type: application/json")
    too_long = Refusal(413, f"the body is longer than {most} bytes", code="body_too_long")
    length = request.headers.get("content-length", "0")
    if length.isdigit() and int(length) > most:
        raise too_long
    data = bytearray()
    try:
        async with asyncio.timeout(PATIENCE):
            async for chunk in request.stream():
                data += chunk
                if len(data) > most:
                    raise too_long
    except TimeoutError:
        raise Refusal(408, f"the body did not arrive within {PATIENCE:g} s", code="timeout") from None
    return bytes(data)


async def _whole(request: Request, desk: Desk, work: Work) -> Response:
    async with _watching(request.receive, desk, work) as gone:
        answer = asyncio.ensure_future(work.result())
        await asyncio.wait({answer, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not answer.done():
            answer.cancel()
            return Response(status_code=204)  # nobody is there to read it
        found = answer.result()
    turns = []
    while (text := work.inner.get_nowait()) is not None:
        turns.append(text)
    desk.counts.requests.labels("200").inc()
    return _json(protocol.completion(work.ask, found, "".join(turns), desk.team.name))


@contextlib.asynccontextmanager
async def _watching(receive: Any, desk: Desk, work: Work) -> AsyncIterator[asyncio.Task[None]]:
    """A task that ends when the client leaves; work that is not done at the end of the block is given up."""

    async def gone() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass

    watcher = asyncio.create_task(gone())
    try:
        yield watcher
    finally:
        watcher.cancel()
        if work.task is not None and not work.task.done():
            desk.left(work)


class Stream(Response):
    """Sends an answer as it is spoken; an error before the first turn is an ordinary error response."""

    def __init__(self, desk: Desk, work: Work):
        super().__init__()
        self._desk, self._work = desk, work

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        chunks = protocol.Chunks(self._work.ask, self._desk.team.name)
        started = False

        async def put(*lines: bytes) -> None:
            nonlocal started
            if not started:
                headers = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-cache")]
                await send({"type": "http.response.start", "status": 200, "headers": headers})
                lines = (chunks.first(), *lines)
                started = True
            for line in lines:
                await send({"type": "http.response.body", "body": line, "more_body": True})

        async with _watching(receive, self._desk, self._work) as gone:
            try:
                async for text in _turns(self._work, gone):
                    await put(b": still thinking\n\n" if text is None else chunks.inner(text))
                if gone.done() and not (self._work.task and self._work.task.done()):
                    return
                await put(*chunks.last(await self._work.result()))
                self._desk.counts.requests.labels("200").inc()
            except Refusal as error:
                self._desk.counts.requests.labels(str(error.status)).inc()
                if not started:
                    await _refusal(error)(scope, receive, send)
                    return
                await put(protocol.event(error.body()))
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def _turns(work: Work, gone: asyncio.Task[None]) -> AsyncIterator[str | None]:
    """The turns of the inner conversation, and None for a long silence; ends with the work, or when the client goes."""
    while not gone.done():
        waiting = asyncio.ensure_future(work.inner.get())
        try:
            await asyncio.wait({waiting, gone}, timeout=SILENCE, return_when=asyncio.FIRST_COMPLETED)
        finally:
            if not waiting.done():
                waiting.cancel()
        if waiting.done() and not waiting.cancelled():
            text = waiting.result()
            if text is None:
                return
            yield text
        elif not gone.done():
            yield None


def _json(data: Any, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    return Response(protocol.dumps(data), status, headers, media_type="application/json")


def _refusal(error: Refusal) -> Response:
    headers = {} if error.retry is None else {"Retry-After": str(error.retry)}
    if error.status == 401:
        headers["WWW-Authenticate"] = "Bearer"
    return _json(error.body(), error.status, headers)
