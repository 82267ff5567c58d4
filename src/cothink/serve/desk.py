"""Requests at work: how many at once, until when, and what ends them early."""

from __future__ import annotations

import asyncio
import logging
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from cothink.answering import Answer, Late, WrongOption, fitted
from cothink.serve import protocol
from cothink.serve.counts import GONE, Counts
from cothink.serve.protocol import Ask, Refusal
from cothink.types import NoRoom, TaskTooLong, Turn

if TYPE_CHECKING:
    from cothink.api import LoadedTeam

log = logging.getLogger("cothink.serve")


@dataclass(frozen=True, slots=True)
class Limits:
    """Most plays at once (a request counts as many as its votes), seconds for one answer, bytes of one body."""

    plays: int = 256
    seconds: float = 600.0
    body: int = 1 << 20


class Work:
    """One request that is being answered; `inner` brings its turns as text, None at the end."""

    def __init__(self, ask: Ask):
        self.ask, self.inner = ask, asyncio.Queue[str | None]()
        self.task: asyncio.Task[Answer] | None = None

    def asks(self, play: int, role: str) -> None:
        """Nobody is told who is about to speak."""

    def said(self, play: int, turn: Turn) -> None:
        """Passes a turn on as text."""
        self.inner.put_nowait(protocol.said(turn, play, self.ask.wish.votes))

    async def result(self) -> Answer:
        """The answer; raises Refusal with what to tell the client."""
        assert self.task is not None
        try:
            return await asyncio.shield(self.task)
        except asyncio.CancelledError:
            if not self.task.cancelled():
                raise  # it is the caller who was cancelled
            raise Refusal(503, "the server is shutting down", code="shutting_down", retry=5) from None
        except (TaskTooLong, NoRoom) as error:
            raise Refusal(400, str(error), param="messages", code="context_length_exceeded") from None
        except (TimeoutError, Late):
            raise Refusal(504, "the team did not answer in time", code="timeout") from None
        except Exception as error:
            log.exception("a request failed")
            what = "the team could not answer this request; the server's log says why"
            raise Refusal(500, what, code="failed") from error


class Desk:
    """Lets requests in up to the limit of plays, and ends those that are left when the server stops."""

    def __init__(self, team: LoadedTeam, limits: Limits):
        self.team, self.limits = team, limits
        self.counts = Counts(team.session.engines.values())
        self.draining = False
        self._plays = 0
        self._tasks: set[asyncio.Task[Answer]] = set()

    def start(self, ask: Ask) -> Work:
        """Starts to answer; raises Refusal when there is no room, or the team cannot do what is asked."""
        votes = ask.wish.votes
        try:
            fitted(self.team.session, ask.wish)
        except WrongOption as error:
            raise Refusal(400, str(error), param=error.option, code="unsupported_value") from None
        if votes > self.limits.plays:
            what = f"{votes} votes are more than the {self.limits.plays} plays this server has room for"
            raise Refusal(400, what, param="votes", code="unsupported_value")
        if self.draining:
            raise Refusal(503, "the server is shutting down", code="shutting_down", retry=5)
        if self._plays + votes > self.limits.plays:
            what = f"{self._plays} of {self.limits.plays} plays are going on; try again in a moment"
            raise Refusal(429, what, code="too_many_requests", retry=1)
        work = Work(ask)
        self._count(votes)
        work.task = asyncio.create_task(self._answer(work))
        self._tasks.add(work.task)
        work.task.add_done_callback(lambda task: self._done(task, work))
        return work

    async def _answer(self, work: Work) -> Answer:
        began = time.perf_counter()
        async with asyncio.timeout(self.limits.seconds):
            found = await self.team.answer(work.ask.question, work.ask.wish, work)
        self.counts.answered(found, time.perf_counter() - began)
        return found

    def _done(self, task: asyncio.Task[Answer], work: Work) -> None:
        self._tasks.discard(task)
        self._count(-work.ask.wish.votes)
        work.inner.put_nowait(None)
        if not task.cancelled():
            task.exception()  # a client that has left does not ask for it

    def _count(self, plays: int) -> None:
        self._plays += plays
        self.counts.running.set(self._plays)

    def left(self, work: Work) -> None:
        """The client has gone: nobody needs the answer, and the engine's rows leave."""
        assert work.task is not None
        work.task.cancel()
        self.counts.requests.labels(str(GONE)).inc()

    async def close(self, seconds: float) -> int:
        """Refuses new requests, lets those at work finish for so long, ends the others and returns how many."""
        self.draining = True
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=seconds)
        cut = list(self._tasks)
        for task in cut:
            task.cancel()
        if cut:
            await asyncio.wait(cut)
        return len(cut)
