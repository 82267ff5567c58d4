"""`save_on: best` in an rl stage: the state with the best test accuracy stays, and is what the stage leaves behind."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from cothink.parts import RL
from cothink.record import RunError
from cothink.session import Session
from cothink.stages.guard import put_back
from cothink.stages.rows import Progress

MEASURE = "test/accuracy"


class Best:
    """Compares the evaluations inside one stage; of equal ones the earliest counts.

    A state that the watch went back from is never kept. `save` writes a checkpoint under a name.
    """

    def __init__(
        self,
        session: Session,
        stage: RL,
        index: int,
        here: Progress,
        order: Sequence[str],
        save: Callable[..., Any],
    ):
        self._session, self._index, self._here, self._order, self._save = session, index, here, order, save
        self._wanted = stage.save_on == "best"
        if self._wanted and session.run is None:
            raise RunError("save_on: best keeps its state in a run folder, and there is none; write save_on: last")

    def hear(self, figures: Mapping[str, Any]) -> None:
        """Keeps the state as it stands where its evaluation beats those before."""
        here, run = self._here, self._session.run
        value = figures.get(MEASURE) if self._wanted else None
        if value is None or (here.best is not None and value <= here.best["accuracy"]):
            return
        assert run is not None
        name = run.free_name(self._index, here.step, here.kept)
        here.best = {"checkpoint": name, "step": here.step, "accuracy": value, "left": False}
        self._save(name)

    def end(self) -> None:
        """Puts the weights of the best evaluation back, and lets its checkpoint go with the others."""
        here, run, best = self._here, self._session.run, self._here.best
        if not self._wanted or run is None or (best is not None and best["left"]):
            return
        if best is None:
            self._session.say(f"stage {self._index}: ended before its first evaluation: its last weights are kept")
            return
        if best["step"] != here.step:
            put_back(self._session, self._order, run.checkpoints / best["checkpoint"])
        here.best = {**best, "left": True}
        self._session.say(
            f"stage {self._index}: leaves the weights of step {best['step']}, "
            f"whose test accuracy of {best['accuracy']:.3f} was the best"
        )
