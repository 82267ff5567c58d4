"""Which of several workers answers a request, and what becomes of it when that worker ends; nothing here knows Ray."""

from __future__ import annotations

import asyncio
from bisect import bisect_right, insort
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, Protocol

from cothink.types import Completion, PlayError

TRIES = 3
"""Workers that may end over one request, or in a row without an answer of any (times their number)."""
SLACK = 32
"""Answers a worker may owe beyond the least busy one before chats leave it: reading a chat again beats waiting."""
KEPT = 10_000
"""Chats whose worker is remembered; then all are forgotten."""
POLL = 0.25
"""Seconds between two looks at workers that are starting, while there is no other."""


class Gone(Exception):
    """The process of a worker has ended; the message says what is known about it."""


class Worker(Protocol):
    """One worker as the pool sees it; what it is asked is the caller's business."""

    def ready(self) -> bool:
        """Whether it has started; raises Gone if it never will."""
        ...

    def end(self) -> None:
        """Makes sure that nothing is left of it."""
        ...


@dataclass(eq=False)
class Seat:
    """A worker at its place in the pool, and what it owes: requests, and answers of all of them."""

    number: int
    worker: Any
    up: bool = False
    requests: int = 0
    answers: int = 0


class Homes:
    """Which seat holds the beginning of a chat: the longest known one that a prompt continues."""

    def __init__(self) -> None:
        self._seats: dict[tuple[int, ...], Seat] = {}
        self._known: list[tuple[int, ...]] = []

    def find(self, prompt: tuple[int, ...]) -> Seat | None:
        """The seat that has read, or said, the longest beginning of a prompt."""
        while place := bisect_right(self._known, prompt):
            near = self._known[place - 1]
            same = next((k for k, (a, b) in enumerate(zip(near, prompt)) if a != b), min(len(near), len(prompt)))
            if same == len(near):
                return self._seats[near]
            prompt = prompt[:same]
        return None

    def keep(self, ids: tuple[int, ...], seat: Seat) -> None:
        """Remembers who holds these ids."""
        if len(self._known) >= KEPT:
            self.__init__()
        if ids not in self._seats:
            insort(self._known, ids)
        self._seats[ids] = seat


class Pool:
    """Seats of workers: a chat stays with the worker that holds its beginning, others go to the least busy one.

    A worker that ends is replaced at once. What it had been asked is asked again, of the others or of its successor:
    whoever answers, the answer is the same, because it depends on weights, prompt and seed alone.
    """

    def __init__(self, start: Callable[[], Worker], size: int, say: Callable[[str], None]):
        self._start, self._say = start, say
        self.seats = [Seat(k + 1, start()) for k in range(size)]
        self.deaths = self.repeated = 0
        self._vain = 0
        self._homes: dict[str, Homes] = {}

    async def ask(
        self, policy: str, prompt: tuple[int, ...], n: int, call: Callable[[Any], Awaitable[list[Completion]]]
    ) -> list[Completion]:
        """What `call` gets from the worker that is chosen for a prompt and its n answers.

        Raises PlayError when every worker that is asked ends.
        """
        last = None
        for _ in range(TRIES):
            seat = await self._seat(policy, prompt)
            seat.requests += 1
            seat.answers += n
            try:
                found = await call(seat.worker)
            except Gone as error:
                last = error
                self.repeated += 1
                self._replace(seat, error)
                continue
            finally:
                seat.requests -= 1
                seat.answers -= n
            self._vain = 0
            homes = self._homes.setdefault(policy, Homes())
            for one in found:
                homes.keep((*prompt, *one.output_ids), seat)
            return found
        raise PlayError(f"{TRIES} workers in a row ended over one request of policy {policy}; the last one: {last}")

    def forget(self) -> None:
        """Nobody holds a chat any more."""
        self._homes.clear()

    async def _seat(self, policy: str, prompt: tuple[int, ...]) -> Seat:
        while not (up := [seat for seat in list(self.seats) if self._up(seat)]):
            await asyncio.sleep(POLL)
        least = min(up, key=lambda seat: seat.answers)
        home = self._homes[policy].find(prompt) if policy in self._homes else None
        return home if home in up and home.answers <= least.answers + SLACK else least

    def _up(self, seat: Seat) -> bool:
        if not seat.up:
            try:
                seat.up = seat.worker.ready()
            except Gone as error:
                self._replace(seat, error)
        return seat.up

    def _replace(self, seat: Seat, error: Gone) -> None:
        """Puts a new worker in the place of one that has ended, unless another of its requests has told already."""
        if seat not in self.seats:
            return
        self.deaths += 1
        self._vain += 1
        if self._vain > TRIES * len(self.seats):
            raise PlayError(f"{self._vain} workers in a row ended before any had answered; the last one: {error}")
        seat.worker.end()
        self.seats[self.seats.index(seat)] = Seat(seat.number, self._start())
        self._say(
            f"worker {seat.number} of {len(self.seats)} has ended ({error}); a new one is started, and its "
            f"{seat.requests} open requests are asked again (workers lost so far: {self.deaths})"
        )
