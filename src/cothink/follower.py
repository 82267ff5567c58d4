"""A run folder as the processes see it that do not write it: the same state, names and places, and nothing on disk."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Any

from cothink.record import Run


class Follower(Run):
    """Goes through the states of the leading process's `Run`, whose `state` it begins with.

    The folder lies on a disk that all processes see: states that a run goes back to are read from there.
    """

    def __init__(self, folder: Path, state: Mapping[str, Any]):
        self.folder, self.state, self.notes = folder, dict(state), []

    def metrics(self, stage: int, step: int, values: Mapping[str, Any]) -> None:
        """The leading process writes them."""

    def episodes(self, name: str, step: int, rows: Iterable[Mapping[str, Any]]) -> None:
        """The leading process writes them."""

    def result(self, label: str, values: Mapping[str, Any]) -> None:
        """The leading process writes it."""

    def checkpoint(
        self,
        policies: Mapping[str, Any],
        state: Mapping[str, Any],
        keep: Collection[str] = (),
        name: str | None = None,
    ) -> Path:
        """The leading process writes it; this one notes the place."""
        if self.is_saved(state):
            return self.checkpoints / self.state["checkpoint"]
        name = self.free_name(state["stage"], state["step"], keep) if name is None else name
        self.state = {**state, "checkpoint": name}
        return self.checkpoints / name

    def stop(self, reason: Mapping[str, Any]) -> None:
        """The leading process writes the mark."""

    def finish_stage(self, index: int) -> None:
        """Notes that stages up to `index` are done."""
        self.state = self.after(index)

    def close(self) -> None:
        """There is nothing open."""
