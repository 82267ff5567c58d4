"""Rewards on form: an answer where one is due, none where it leaks."""

from __future__ import annotations

from cothink.types import Episode, Task, Turn
from cothink.verify import has_answer_format, has_box


def boxed(task: Task, turn: Turn, episode: Episode) -> float | None:
    """1 if the turn states a non-empty answer in `\\boxed{}`, else 0."""
    return float(has_answer_format(turn.text))


def no_leak(task: Task, turn: Turn, episode: Episode) -> float | None:
    """-1 if the turn holds an explicit answer format (`\\boxed`), else 0: a plan must not give the answer away."""
    return -1.0 if has_box(turn.text) else 0.0


def finished(task: Task, turn: Turn, episode: Episode) -> float | None:
    """1 if the turn ended by itself, 0 if it was cut at its token limit or never spoke."""
    return float(turn.completion.finish_reason == "stop")
