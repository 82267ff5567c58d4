"""The watch at work in an rl stage: it says what a step shows, goes back to a good state, or stops the run."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from cothink.parts import RL
from cothink.session import Session
from cothink.signals import Finding, Watch, healthy
from cothink.stages.rows import Progress

KEEP_GOOD = 3
QUIET = 20
"""Steps for which a signal that was acted on is not heard again."""
COLLAPSE = (
    "reward_drop", "test_drop", "flat_groups", "fewer_rounds", "one_round", "gradient", "lazy", "unheard",
)  # fmt: skip
"""Signals whose stop means a collapsed run (spec/credit.md 7)."""


class Collapse(RuntimeError):
    """The watch stopped the run; the message names the signal, and the first one that spoke."""


def put_back(session: Session, policies: Sequence[str], folder: Path) -> None:
    """Weights and optimisers of a checkpoint, under new version numbers: engines may keep what a version said."""
    for name in policies:
        policy = session.policies[name]
        version = policy.version
        policy.forget_optimizer()
        policy.load(folder, folder / "training")
        policy.version = version + 1
        session.engines[name].load(name, None, policy.version)


class Guard:
    """Hears the signals of one stage. `save` writes a checkpoint under a name, or under the usual one.

    Going back restores weights, optimisers, the estimator's averages, the place in an alternating schedule and what
    the watch had seen, and halves the learning rate. Steps, rows, tokens and therefore all random numbers go on: no
    batch is played twice.
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
        self._session, self._stage, self._index, self._here = session, stage, index, here
        self._order, self._save = order, save
        options = stage.loss.options
        token_ratio = options.get("ratio", "token") == "token" and options.get("clip", "clip_higher") in (
            "ppo",
            "clip_higher",
        )
        self._watch = Watch([*session.roles], list(order), stage.watch.limits, stage.watch.warmup, token_ratio)
        self._found: list[Finding] = []

    def begin(self) -> None:
        """Keeps the weights the stage starts with: however bad the first steps are, there is a way back."""
        fresh = self._here.step == 0 and not self._here.watch.good
        if self._stage.watch.mode == "act" and fresh and self._session.run is not None:
            self._keep()

    def see(self, figures: Mapping[str, Any]) -> dict[str, Any]:
        """Hears one finished step; returns what the metrics shall say about it."""
        memory, step = self._here.watch, self._here.step
        if self._stage.watch.mode == "off":
            return {}
        self._found = self._watch.see(step, figures, memory)
        for f in self._found:
            if f.name not in memory.first:
                memory.first[f.name] = step
                self._session.say(f"watch: {f.level} {f}")
        said: dict[str, Any] = {"watch": [f"{f.level} {f}" for f in self._found]} if self._found else {}
        if self._cause is not None:
            said["watch/action"] = "stop" if self._no_way_back else f"back to step {memory.good[-1]['step']}"
        return {**said, "watch/warnings": float(len(self._found)), "watch/rollbacks": float(len(memory.rollbacks))}

    @property
    def _cause(self) -> Finding | None:
        """The worst finding that asks for an action."""
        if self._stage.watch.mode != "act":
            return None
        return next((f for f in self._found if f.level == "stop" or f.back), None)

    @property
    def _no_way_back(self) -> str:
        """Why the run must stop rather than go back; empty where it may."""
        cause, memory = self._cause, self._here.watch
        assert cause is not None
        if cause.level == "stop":
            return "it is beyond the limit that stops a run"
        if any(back["signal"] == cause.signal for back in memory.rollbacks):
            return "it has been acted on before"
        if len(memory.rollbacks) >= self._stage.watch.rollbacks:
            return f"all roll-backs allowed ({self._stage.watch.rollbacks}) are used up"
        return "" if memory.good else "there is no good state yet"

    def act(self) -> bool:
        """Goes back, stops (raises Collapse), or keeps this state as a good one; True where it went back."""
        memory, step, watch = self._here.watch, self._here.step, self._stage.watch
        if watch.mode != "act":
            return False
        if self._cause is not None:
            if self._no_way_back:
                self._stop(self._cause)
            self._back(self._cause)
            return True
        last = memory.good[-1]["step"] if memory.good else 0
        if self._session.run is not None and step - last >= watch.every and healthy(step, memory, watch.warmup):
            self._keep()
        return False

    def end(self) -> None:
        """Lets go of the good states: the stage has come through."""
        self._here.watch.good = []

    def _keep(self) -> None:
        here, memory, run = self._here, self._here.watch, self._session.run
        assert run is not None
        name = run.free_name(self._index, here.step, here.kept)
        memory.good.append(
            {
                "checkpoint": name,
                "step": here.step,
                "place": here.place,
                "memory": dict(here.memory),
                "steps": memory.steps,
                "resets": memory.resets,
                "lengths": {key: len(series) for key, series in memory.series.items()},
                "rate": memory.rate,
            }
        )
        del memory.good[:-KEEP_GOOD]
        self._save(name)

    def _back(self, cause: Finding) -> None:
        here, memory, session = self._here, self._here.watch, self._session
        assert session.run is not None
        good = memory.good[-1]
        memory.rate *= 0.5
        put_back(session, self._order, session.run.checkpoints / good["checkpoint"])
        for name in self._order:
            session.policies[name].scale_rate(memory.rate / good["rate"])
        here.place = good["place"]
        here.memory.clear()
        here.memory |= good["memory"]
        if good["resets"] == memory.resets:
            memory.series = {k: v[: good["lengths"].get(k, 0)] for k, v in memory.series.items()}
            memory.steps = good["steps"]
        else:  # other rows have been played since: what was seen then says nothing about these
            memory.reset()
        memory.rollbacks.append({"step": here.step, "signal": cause.signal, "what": str(cause), "to": good["step"]})
        memory.quiet[cause.signal] = here.step + QUIET
        memory.first, memory.warned = {}, None
        session.say(f"watch: back to the state of step {good['step']}, learning rates x {memory.rate:g}")

    def _stop(self, cause: Finding) -> NoReturn:
        here, memory, session = self._here, self._here.watch, self._session
        first = min(memory.first, key=lambda name: memory.first[name])
        why = str(cause) if cause.level == "stop" else f"{cause}; no way back: {self._no_way_back}"
        if first != cause.name:
            since = memory.first[first]
            why += f"; the first signal was {first} at step {since}, {here.step - since} steps before"
        good = memory.good[-1]["checkpoint"] if memory.good else None
        if good is not None:
            why += f"; the newest good state is checkpoints/{good}"
        memory.quiet |= {f.signal: here.step + QUIET for f in self._found}  # whoever resumes knows about these
        self._save()
        if session.run is not None:
            session.run.stop(
                {
                    "step": here.step,
                    "what": why,
                    "signal": cause.name,
                    "collapsed": cause.level == "stop" and cause.signal in COLLAPSE,
                    "first": {"signal": first, "step": memory.first[first]},
                    "signals": dict(memory.first),
                    "rollbacks": memory.rollbacks,
                    "good": good,
                }
            )
        raise Collapse(f"the watch stopped the run at step {here.step}: {why}")
