"""What an outside server is asked for and costs: a pace, a count, and a limit to spending."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field
from typing import Any

from cothink.types import PlayError

FIGURES = ("requests", "retries", "prompt_tokens", "output_tokens", "cost")


class Spent(PlayError):
    """The money that the recipe allows for a server is spent."""


@dataclass
class Pace:
    """Starts requests at most so often; they wait for their turn, first come, first served."""

    per_minute: float | None = None
    _next: float = 0.0

    def wait(self, now: float) -> float:
        """Seconds that a request which comes at `now` (seconds of a monotonic clock) has to wait."""
        if self.per_minute is None:
            return 0.0
        turn = max(now, self._next)
        self._next = turn + 60.0 / self.per_minute
        return turn - now

    async def turn(self) -> None:
        """Returns when it is this request's turn."""
        await asyncio.sleep(self.wait(time.monotonic()))


@dataclass
class Bill:
    """Requests and tokens of each policy, and their cost by `prices`: of a million prompt, and output, tokens.

    `most` bounds the cost of this process; what is under way when it is reached is still paid.
    """

    prices: tuple[float, float] | None = None
    most: float | None = None
    cost: float = 0.0
    _counts: dict[str, list[float]] = field(default_factory=dict)

    def allow(self) -> None:
        """Raises Spent where nothing is left."""
        if self.most is not None and self.cost >= self.most:
            raise Spent(f"{self.cost:.4g} spent, and max_cost allows {self.most:g}; write a larger server.max_cost")

    def add(self, policy: str, usage: Any, retries: int) -> None:
        """Counts one answered request; `usage` is what the server tells of it."""
        counts = self._counts.setdefault(policy, [0.0] * len(FIGURES))
        tokens = [getattr(usage, key, None) for key in ("prompt_tokens", "completion_tokens")]
        told = [float(max(t, 0)) if isinstance(t, int) else 0.0 for t in tokens]
        cost = sum(t * price for t, price in zip(told, self.prices or (0.0, 0.0))) / 1e6
        self.cost += cost
        for k, value in enumerate((1.0, float(retries), *told, cost)):
            counts[k] += value
        if self.prices is not None and not all(isinstance(t, int) for t in tokens):
            raise PlayError("the reply tells no usage, so its cost cannot be counted; remove server.prices")

    def figures(self) -> dict[str, float]:
        """`POLICY/server_*` since this was last asked; the cost only where there are prices."""
        found = {
            f"{policy}/server_{name}": value
            for policy, counts in self._counts.items()
            for name, value in zip(FIGURES, counts)
            if name != "cost" or self.prices is not None
        }
        self._counts = {policy: [0.0] * len(FIGURES) for policy in self._counts}
        return found
