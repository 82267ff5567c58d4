"""What the endpoint counts, as Prometheus reads it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily

from cothink.answering import Answer

SECONDS = (0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)
GONE = 499
"""Status of a request whose client left before it was answered."""


class Counts:
    """The figures of one server, apart from those of any other in this process."""

    def __init__(self, engines: Iterable[Any]):
        self.registry = CollectorRegistry()
        made: dict[str, Any] = {"registry": self.registry}
        self.requests = Counter("cothink_requests", "Chat requests answered, by status.", ["status"], **made)
        self.seconds = Histogram("cothink_answer_seconds", "Seconds of a whole answer.", buckets=SECONDS, **made)
        self.tokens = Counter("cothink_tokens", "Tokens of whole answers, by kind.", ["kind"], **made)
        self.turns = Counter("cothink_turns", "Turns of whole answers, by role.", ["role"], **made)
        self.running = Gauge("cothink_plays_running", "Plays that are going on.", **made)
        self.registry.register(_Engines(engines))

    def answered(self, found: Answer, seconds: float) -> None:
        """Counts a whole answer."""
        self.seconds.observe(seconds)
        self.tokens.labels("generated").inc(found.usage.generated)
        if found.usage.prompt is not None:
            self.tokens.labels("prompt").inc(found.usage.prompt)
        for turn in (t for play in found.plays for t in play.turns):
            self.turns.labels(turn.role).inc()

    def text(self) -> bytes:
        """All figures in the text format."""
        return generate_latest(self.registry)


class _Engines:
    """The counters that engines keep themselves."""

    def __init__(self, engines: Iterable[Any]):
        self._engines = [e for e in {id(e): e for e in engines}.values() if hasattr(e, "counters")]

    def collect(self) -> Iterable[Any]:
        tokens = CounterMetricFamily("cothink_engine_tokens", "Tokens of the local engine, by kind.", labels=["kind"])
        for kind in ("prefilled", "reused", "generated"):
            tokens.add_metric([kind], sum(getattr(e.counters, kind) for e in self._engines))
        passes = CounterMetricFamily("cothink_engine_passes", "Forward passes of the local engine.")
        passes.add_metric([], sum(e.counters.steps for e in self._engines))
        return [tokens, passes]
