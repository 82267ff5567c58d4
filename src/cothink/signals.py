"""What a run's figures say about its health: the signals, their limits, and what a watch remembers of a run."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import median
from typing import Any, Literal

from cothink.watch import drawdown, gradient_norms, smooth

START = 10
"""Steps whose mean is a series' start value."""
FEW = 5
"""Values whose mean is compared where a figure is measured every so many steps, of some plays: one alone is noise."""
NOISE = 7.0
"""A fall must also exceed this many standard errors of the smoothed series: chance alone puts the highest of some
hundred smoothed values about six above a later one (400 steps at a spread of .15: 33 % false alarms at 6, 5 % at 7)."""


@dataclass(frozen=True, slots=True)
class Signal:
    """One thing to watch (spec/credit.md 7): the figure `key`, how it is measured, and when it speaks.

    `{role}` and `{policy}` in the key stand for each of them. `stop` holds after `patience` values in a row, `warn`
    after `warn_patience`. `back`: a warning asks to go back; without it, it is only said. `falling`: what learning does
    as well (surer, shorter, flatter, or bolder), so it is only said unless the reward falls.
    """

    name: str
    key: str
    measure: Literal["level", "rise", "start", "few", "best", "drop", "median", "mean"]
    warn: float | None
    stop: float | None
    patience: int = 1
    below: bool = False
    back: bool = True
    falling: bool = False
    warn_patience: int = 1


SIGNALS: tuple[Signal, ...] = (
    Signal("reward_drop", "reward", "drop", 0.15, 0.25, 20),
    Signal("test_drop", "test/accuracy", "best", 0.85, 0.70, 2, below=True),
    Signal("flat_groups", "reward_std", "start", 0.25, 0.10, 10, below=True, falling=True),
    Signal("no_success", "test/accuracy", "level", None, 0.01, 5, below=True),
    Signal("few_groups", "share_kept", "level", 0.30, 0.0, 5, below=True, back=False),
    Signal("gradient", "{policy}/gradient_norm", "median", 5.0, 10.0, 3),
    Signal("fewer_rounds", "rounds", "start", 0.6, None, below=True, falling=True),
    Signal("one_round", "one_round", "level", None, 0.8),
    Signal("one_round", "rounds", "level", None, 1.3, below=True),
    Signal("unfinished", "unfinished", "rise", 0.15, 0.50, back=False),
    Signal("mask_full", "mask_capped", "level", 0.5, None, back=False, warn_patience=20),
    Signal("early_finish", "early_finish", "level", 0.2, 0.6),
    Signal("lazy", "solo/gain", "mean", 0.02, 0.0, 21, below=True),
    Signal("unheard", "{role}/influence", "few", 0.25, 0.10, below=True),
    Signal("void", "{role}/void", "rise", 0.05, 0.20),
    Signal("shorter", "{role}/tokens_per_turn", "start", 0.5, 0.2, below=True, falling=True),
    Signal("entropy_low", "{role}/sampled_entropy", "start", 0.3, 0.05, below=True, falling=True),
    Signal("entropy_high", "{role}/sampled_entropy", "start", 2.0, 4.0, falling=True),
    Signal("update_kl", "{policy}/kl_update", "level", None, 0.1),
    Signal("reference_kl", "{policy}/kl_ref_k3", "level", 0.1, 1.0, falling=True),
    Signal("mismatch", "{policy}/mismatch", "level", 1e-3, 1e-2, back=False),
    Signal("ess", "{policy}/ess_fraction", "level", 0.5, 0.1, below=True, back=False),
    Signal("clipped", "{policy}/clip_fraction", "level", 0.2, 0.5, back=False),
    Signal("repeated", "{role}/repeated", "rise", 0.02, 0.20),
    Signal("net_push", "{role}/net_push", "mean", 0.1, 0.3, back=False),
)  # fmt: skip
"""The signals that a step's figures show. `rise` is measured from the start value, so that a task whose good answers
repeat words, or a team that starts out unfinished, is judged by what changes. 21 means of ten steps hold three that
share no step. A gap between engine and trainer is nothing to go back from: where both are one code path, the first
update is refused."""

BESIDE = ("accuracy", "required_rounds", "test/high")
"""Figures that some signals compare with."""
NAMES = tuple(dict.fromkeys(s.name for s in SIGNALS))
_WORDS = {
    "level": "is",
    "rise": "rose by",
    "start": "over its start is",
    "few": "of the last five over the first five is",
    "best": "over its best is",
    "drop": "lies below its best by the share",
    "median": "over its usual value is",
    "mean": "over ten steps is",
}


@dataclass(frozen=True, slots=True)
class Finding:
    """A signal that spoke at this step; `subject` is the role or policy, or empty for the team."""

    signal: str
    subject: str
    level: Literal["warn", "stop"]
    key: str
    measure: str
    value: float
    limit: float
    back: bool

    @property
    def name(self) -> str:
        """The signal, with the role or policy it speaks of."""
        return f"{self.signal}/{self.subject}" if self.subject else self.signal

    def __str__(self) -> str:
        if self.limit == math.inf:
            return f"{self.name}: {self.key} is not finite"
        return f"{self.name}: {self.key} {_WORDS[self.measure]} {self.value:.3g} (limit {self.limit:g})"


@dataclass
class Memory:
    """What a watch remembers between steps: the watched series since the last reset, and what it said and did."""

    series: dict[str, list[float | None]] = field(default_factory=dict)
    steps: int = 0
    resets: int = 0
    first: dict[str, int] = field(default_factory=dict)  # signal -> the step it first spoke at
    quiet: dict[str, int] = field(default_factory=dict)
    warned: int | None = None
    good: list[dict[str, Any]] = field(default_factory=list)
    rollbacks: list[dict[str, Any]] = field(default_factory=list)
    rate: float = 1.0

    def reset(self) -> None:
        """Forgets maxima and start values: the rows that are played have changed."""
        self.series, self.steps, self.first = {}, 0, {}
        self.resets += 1


Limits = Mapping[str, tuple[float | None, float | None] | None]


@dataclass(frozen=True, slots=True)
class Watch:
    """The signals of one team; `limits` replaces [warn, stop] of a signal, or of `signal/subject`.

    `clips`: whether clip fractions are those of a token ratio, for which alone the limits were found.
    """

    roles: Sequence[str]
    policies: Sequence[str]
    limits: Limits = field(default_factory=dict)
    warmup: int = 20
    clips: bool = True

    def see(self, step: int, figures: Mapping[str, Any], memory: Memory) -> list[Finding]:
        """Takes one step's figures into `memory` and returns what speaks, worst first.

        Nothing speaks in the first `warmup` steps after a reset, but an update that could not be applied.
        """
        memory.steps += 1
        fresh = self._remember(figures, memory)
        found: list[Finding] = []
        falling = is_falling(memory)
        for name in self.policies:
            if figures.get(f"{name}/skipped_updates"):
                loss = figures.get(f"{name}/loss", 0.0)
                key = f"{name}/{'gradient_norm' if math.isfinite(loss) else 'loss'}"
                found.append(Finding("gradient", name, "stop", key, "level", math.nan, math.inf, True))
        if memory.steps > self.warmup:
            for signal in SIGNALS:
                for key, subject in self._subjects(signal):
                    if key in fresh and self._applies(signal, memory):
                        found += [_milder(signal, f, falling) for f in self._judge(signal, subject, key, memory)]
        if any(f.back for f in found):  # one that is not heard again yet is ill all the same: no state to go back to
            memory.warned = step
        found = [f for f in found if memory.quiet.get(f.signal, 0) < step or f.limit == math.inf]
        return sorted(found, key=lambda f: f.level != "stop")

    def _remember(self, figures: Mapping[str, Any], memory: Memory) -> set[str]:
        keys = {key for signal in SIGNALS for key, _ in self._subjects(signal)}
        fresh = {k for k in (*keys, *BESIDE) if isinstance(figures.get(k), int | float)}
        for key in fresh:
            value = float(figures[key])
            memory.series.setdefault(key, []).append(round(value, 6) if math.isfinite(value) else None)
        return fresh

    def _subjects(self, signal: Signal) -> list[tuple[str, str]]:
        if "{role}" in signal.key:
            return [(signal.key.format(role=r), r) for r in self.roles]
        if "{policy}" in signal.key:
            return [(signal.key.format(policy=p), p) for p in self.policies]
        return [(signal.key, "")]

    def _applies(self, signal: Signal, memory: Memory) -> bool:
        def last(key: str) -> float:
            return (memory.series.get(key) or [None])[-1] or 0.0

        if signal.name == "one_round":
            return last("required_rounds") > 1
        if signal.name == "flat_groups":
            return last("accuracy") <= 0.95
        if signal.name == "test_drop":  # chance alone moves a small test set: the interval must lie below the best
            return last("test/high") < max((v for v in memory.series["test/accuracy"] if v is not None), default=0.0)
        return signal.name != "clipped" or self.clips

    def _judge(self, signal: Signal, subject: str, key: str, memory: Memory) -> list[Finding]:
        limits: tuple[float | None, float | None] | None = (signal.warn, signal.stop)
        for name in (signal.name, f"{signal.name}/{subject}"):
            limits = self.limits.get(name, limits)
        series = memory.series[key]
        if signal.measure == "drop" and (grades := _grades(memory)) is not series:
            key, series = "accuracy", grades
        values = measured(signal.measure, series, signal.below)
        for level, limit, patience in zip(
            ("stop", "warn"), (limits or (None, None))[::-1], (signal.patience, signal.warn_patience)
        ):
            tail = values[-patience:]
            if limit is not None and len(tail) == patience and all(_beyond(v, limit, signal.below) for v in tail):
                return [Finding(signal.name, subject, level, key, signal.measure, tail[-1] or 0.0, limit, signal.back)]
        return []


def _milder(signal: Signal, finding: Finding, falling: bool) -> Finding:
    """The finding as it counts while the reward does not fall."""
    return replace(finding, level="warn", back=False) if signal.falling and not falling else finding


def is_falling(memory: Memory, share: float = 0.05) -> bool:
    """Whether the smoothed reward lies below its best by more than `share`, and more than chance explains."""
    fall = (measured("drop", _grades(memory)) or [None])[-1]
    return fall is not None and fall > share


def _grades(memory: Memory) -> list[float | None]:
    """The reward's series; where rewards can be negative, a share of them means nothing and the grade replaces it."""
    series = memory.series.get("reward", [])
    return memory.series.get("accuracy", []) if any(v is not None and v < 0 for v in series) else series


def healthy(step: int, memory: Memory, warmup: int, quiet: int = 10) -> bool:
    """Whether a state is worth going back to: heard, without a warning for `quiet` steps, the reward near its best."""
    warned = memory.warned is not None and step - memory.warned < quiet
    return memory.steps > warmup and not warned and not is_falling(memory)


def measured(measure: str, series: Sequence[float | None], below: bool = False) -> list[float | None]:
    """A series as its signal sees it, None where there is nothing to compare with yet.

    The start value is the mean of the first ten steps, or the first step's where that is the better one: a run that
    breaks with its first update has had one good step. `below`: low values are the bad ones.
    """
    if measure == "level":
        return list(series)
    plain = [v for v in series if v is not None]
    if measure == "median":  # a gradient that had all but vanished may come back to its usual size
        usual = math.fsum(plain[:START]) / START if len(plain) >= START else 0.0
        ratios = gradient_norms(series).values
        return [None if r is None or v is None or usual <= 0 else min(r, v / usual) for r, v in zip(ratios, series)]
    if measure == "best":
        return [v / best if (best := max(plain[: k + 1])) > 0 else None for k, v in enumerate(plain)]
    if measure == "few":
        means = [math.fsum(plain[max(0, k + 1 - FEW) : k + 1]) / FEW for k in range(len(plain))]
        return [m / means[FEW - 1] if k >= FEW and means[FEW - 1] > 0 else None for k, m in enumerate(means)]
    if len(plain) <= START:
        return [None] * len(plain)
    mean = math.fsum(plain[:START]) / START
    start = max(mean, plain[0]) if below else min(mean, plain[0])
    if measure == "rise":
        return [v - start for v in plain]
    if measure == "start":
        return [v / start if start > 0 else None for v in plain]
    if measure == "mean":
        return [math.fsum(plain[max(0, k - 9) : k + 1]) / min(10, k + 1) for k in range(len(plain))]
    return _fall(mean, plain)


def _fall(start: float, series: Sequence[float], rate: float = 0.1) -> list[float | None]:
    """Drawdown of the smoothed series, which begins at its start value; None where it may be noise."""
    line = [start, *series[START:]]
    levels, falls = smooth(line, rate), drawdown(line, rate=rate).values
    # With those of the start: where a run breaks soon, the jumps of its fall alone would pass for noise.
    jumps = [abs(x - start) for x in series[:START]] + [abs(x - before) for x, before in zip(line[1:], levels)]
    found: list[float | None] = []
    for k in range(1, len(line)):
        # A normal series' median jump is 0.67 standard deviations; smoothing leaves sqrt(rate / (2 - rate)) of one.
        noise = median(jumps[: START + k][-50:]) / 0.6745 * math.sqrt(rate / (2 - rate))
        found.append(falls[k] if max(levels[: k + 1]) - levels[k] > NOISE * noise else None)
    return found


def _beyond(value: float | None, limit: float, below: bool) -> bool:
    return value is not None and (value <= limit if below else value > limit)
