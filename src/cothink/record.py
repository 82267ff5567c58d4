"""The run folder: manifest, metrics, episodes, results, checkpoints; written so that a kill leaves it readable."""

from __future__ import annotations

import itertools
import json
import os
import platform
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

from cothink import seal
from cothink.seal import write_atomic
from cothink.types import Episode, Turn

KEEP_CHECKPOINTS = 2
STOPPED = "stopped.json"
PACKAGES = ("cothink", "torch", "transformers", "peft", "accelerate", "tokenizers", "math-verify", "pydantic")


class RunError(RuntimeError):
    """A run folder that cannot be used as asked."""


def versions() -> dict[str, str]:
    """Versions of Python and the libraries that decide results; never imports them."""
    found = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = "not installed"
    return found


def commit() -> str | None:
    """The git commit of the source tree, with `+` when files differ from it; None outside a checkout."""
    here = Path(__file__).parent
    try:
        head = subprocess.run(["git", "rev-parse", "HEAD"], cwd=here, capture_output=True, text=True, timeout=5)
        dirty = subprocess.run(["git", "status", "--porcelain"], cwd=here, capture_output=True, text=True, timeout=5)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return head.stdout.strip() + ("+" if dirty.stdout.strip() else "") if head.returncode == 0 else None


def _stopped(folder: Path) -> str:
    why = json.loads((folder / STOPPED).read_text(encoding="utf-8"))
    return (
        f"the watch stopped this run at step {why['step']}: {why['what']}. Start another one with other settings, or "
        f"delete {folder / STOPPED} to go on from where it stood"
    )


def _make(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except (FileExistsError, NotADirectoryError):
        file = next(p for p in (folder, *folder.parents) if p.exists())
        raise RunError(f"{file} is a file, and a run needs a folder: name another one with --out") from None


def _state(folder: Path) -> dict[str, Any]:
    """Where a run stands; empty for one that has not begun. Raises ValueError where its file is damaged."""
    file = folder / "state.json"
    if not file.exists():
        return {}
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except ValueError:
        found = None
    if not isinstance(found, dict):
        raise ValueError(f"{file} is damaged: it is not what was written")
    return found


def last_checkpoint(folder: Path) -> Path | None:
    """The newest checkpoint of a run folder; None before the first, RunError where it is not what was written."""
    try:
        name = _state(folder).get("checkpoint")
    except ValueError as error:
        raise RunError(f"{error}. Run the recipe again: it goes on from the newest checkpoint") from None
    if not name:
        return None
    place = folder / "checkpoints" / name
    wrong = seal.damage(place)
    if wrong is not None:
        raise RunError(f"{place} is damaged: {wrong}. Run the recipe again: it goes on from the checkpoint before")
    return place


class Run:
    """One run folder; `state` is where a resumed run goes on: {"stage", "step", ...}, empty for a fresh run.

    It belongs to this process until `close`. `notes` say what was wrong with what was found.
    """

    def __init__(self, folder: Path, recipe_text: str, seed: int, processes: int = 1):
        self.folder = folder
        self.state: dict[str, Any] = {}
        self.notes: list[str] = []
        _make(folder)
        self._lock = seal.lock(folder)
        if self._lock is None:
            raise RunError(
                f"another process ({(folder / seal.LOCK).read_text().strip() or 'unknown'}) works in {folder}: wait "
                "for it, or give this run its own folder with --out"
            )
        try:
            self._open(recipe_text, seed, processes)
        except BaseException:
            self._lock.close()
            raise

    def _open(self, recipe_text: str, seed: int, processes: int) -> None:
        folder = self.folder
        known = folder / "recipe.yaml"
        if known.exists():
            if (folder / STOPPED).exists():
                raise RunError(_stopped(folder))
            if known.read_text(encoding="utf-8") != recipe_text:
                raise RunError(
                    f"{folder} holds a run of another recipe (see {known}). Give this run its own folder with --out, "
                    "change the recipe's name, or delete the folder"
                )
            self._resume()
        else:
            if (folder / "state.json").exists():
                raise RunError(f"{folder} holds a checkpoint and no recipe.yaml: delete it, or name another with --out")
            self._write_manifest(seed, processes)
            write_atomic(known, recipe_text)
        self._metrics = (folder / "metrics.jsonl").open("a", encoding="utf-8")

    @property
    def checkpoints(self) -> Path:
        """The folder of checkpoints."""
        return self.folder / "checkpoints"

    def _write_manifest(self, seed: int, processes: int) -> None:
        manifest = {
            "seed": seed,
            "started": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
            "commit": commit(),
            "command": sys.argv,
            "processes": processes,
            "versions": versions(),
            "platform": platform.platform(),
        }
        write_atomic(self.folder / "manifest.json", json.dumps(manifest, indent=2))

    def _resume(self) -> None:
        self._trust()
        for part in self.checkpoints.glob("*.part"):
            shutil.rmtree(part)
        kept = []
        metrics = self.folder / "metrics.jsonl"
        place = (self.state.get("stage", 0), self.state.get("step", 0))
        if metrics.exists():  # rows after the last checkpoint will be written again
            for line in metrics.read_text(encoding="utf-8").splitlines():
                try:
                    row = json.loads(line)
                except ValueError:
                    continue
                if (row["stage"], row["step"]) <= place or row["stage"] < place[0]:
                    kept.append(line)
            write_atomic(metrics, "".join(line + "\n" for line in kept))

    def _trust(self) -> None:
        """Reads the state; goes back to the newest checkpoint that is what was written, where the last one is not."""
        name, bad, wrong = None, "state.json", None
        try:
            self.state = _state(self.folder)
            name = self.state.get("checkpoint")
            if name:
                bad, wrong = f"checkpoint {name}", seal.damage(self.checkpoints / name)
        except ValueError:
            wrong = "it is not what was written"
        if wrong is None:
            return
        self.notes.append(f"{bad} is damaged: {wrong}")
        whole = [p for p in self.checkpoints.glob("*") if p.name != name and seal.damage(p) is None]
        if not whole:
            raise RunError(
                f"{bad} of {self.folder} is damaged ({wrong}), and there is no other to go back to: delete "
                "the folder to begin anew, or put back what is missing"
            )
        self.state = max((seal.facts(p) for p in whole), key=lambda s: (s["stage"], s["step"], s["checkpoint"]))
        self.notes.append(f"going back to checkpoint {self.state['checkpoint']}")
        write_atomic(self.folder / "state.json", json.dumps(self.state, indent=2))
        if name:
            shutil.rmtree(self.checkpoints / name, ignore_errors=True)

    @property
    def place(self) -> Path | None:
        """The checkpoint that `state` goes on from; None before the first."""
        name = self.state.get("checkpoint")
        return self.checkpoints / name if name else None

    def metrics(self, stage: int, step: int, values: Mapping[str, Any]) -> None:
        """Appends one line of metrics."""
        row = {"stage": stage, "step": step, "time": round(time.time(), 3), **values}
        self._metrics.write(json.dumps(row) + "\n")
        self._metrics.flush()

    def episodes(self, name: str, step: int, rows: Iterable[Mapping[str, Any]]) -> None:
        """Writes the episodes of one step as JSON lines, replacing what an interrupted attempt left."""
        folder = self.folder / "episodes" / name
        folder.mkdir(parents=True, exist_ok=True)
        write_atomic(folder / f"{step:06d}.jsonl", "".join(json.dumps(r, ensure_ascii=False) + "\n" for r in rows))

    @property
    def results(self) -> dict[str, Any]:
        """Results of the evaluations done so far, by label."""
        path = self.folder / "results.json"
        return json.loads(path.read_text()) if path.exists() else {}

    def result(self, label: str, values: Mapping[str, Any]) -> None:
        """Adds one evaluation to `results.json`."""
        write_atomic(self.folder / "results.json", json.dumps({**self.results, label: values}, indent=2))

    def free_name(self, stage: int, step: int, taken: Collection[str] = ()) -> str:
        """A name for the checkpoint of a step that is neither the current one's nor `taken`.

        A step can have several states (rows that were filtered since): the first one stays whole until the state file
        no longer points at it.
        """
        plain = f"stage{stage:02d}-step{step:06d}"
        names = itertools.chain([plain], (f"{plain}-{k}" for k in itertools.count(1)))
        return next(n for n in names if n != self.state.get("checkpoint") and n not in taken)

    def is_saved(self, state: Mapping[str, Any]) -> bool:
        """Whether the current checkpoint holds this very state."""
        name = self.state.get("checkpoint") or "none"
        return self.state == {**state, "checkpoint": name} and (self.checkpoints / name).is_dir()

    def checkpoint(
        self,
        policies: Mapping[str, Any],
        state: Mapping[str, Any],
        keep: Collection[str] = (),
        name: str | None = None,
    ) -> Path:
        """Saves every policy and the place to go on from; of the older checkpoints, the last and those in `keep` stay.

        `name` is one that `free_name` gave.
        """
        if self.is_saved(state):
            return self.checkpoints / self.state["checkpoint"]
        name = self.free_name(state["stage"], state["step"], keep) if name is None else name
        place, part = self.checkpoints / name, self.checkpoints / (name + ".part")
        shutil.rmtree(part, ignore_errors=True)
        part.mkdir(parents=True)
        for policy in policies.values():
            policy.save(part)
            if hasattr(policy, "save_state"):
                policy.save_state(part / "training")
        self.state = {**state, "checkpoint": name}
        seal.seal(part, self.state)
        shutil.rmtree(place, ignore_errors=True)  # only now: the state file may still point at it
        os.replace(part, place)
        seal.sync(self.checkpoints)
        write_atomic(self.folder / "state.json", json.dumps(self.state, indent=2))
        old = sorted(p for p in self.checkpoints.iterdir() if p.is_dir() and p != place and p.name not in keep)
        for folder in old[: max(0, len(old) - (KEEP_CHECKPOINTS - 1))]:
            shutil.rmtree(folder)
        return place

    def stop(self, reason: Mapping[str, Any]) -> None:
        """Marks the run as stopped by its watch: it is not resumed before somebody has removed the mark."""
        write_atomic(self.folder / STOPPED, json.dumps(reason, indent=2))

    def after(self, index: int) -> dict[str, Any]:
        """The state in which the stages up to `index` are done."""
        return {"stage": index + 1, "step": 0, "checkpoint": self.state.get("checkpoint")}

    def finish_stage(self, index: int) -> None:
        """Notes that stages up to `index` are done, so that a resumed run starts with the next one."""
        self.state = self.after(index)
        write_atomic(self.folder / "state.json", json.dumps(self.state, indent=2))

    def close(self) -> None:
        """Closes the metrics file and lets go of the folder."""
        try:
            self._metrics.close()
        finally:  # a full disk refuses the rest of a line once more
            if self._lock is not None:
                self._lock.close()


def episode_row(
    episode: Episode,
    returns: Mapping[str, float | None] | None = None,
    advantages: Mapping[str, Any] | None = None,
    pieces: Callable[[str, int], str] | None = None,
) -> dict[str, Any]:
    """One episode as a JSON object: per-turn text, tokens, rewards, return and advantage (one, or one per token).

    With `pieces`, which says what a token of a policy reads as, every token and its log-prob is written too.
    """
    returns, advantages = returns or {}, advantages or {}
    turns = []
    for turn in episode.turns:
        c = turn.completion
        turns.append(
            {
                "id": turn.id,
                "parents": list(turn.parents),
                "role": turn.role,
                "policy": turn.policy,
                "round": turn.round,
                "text": c.text,
                **({"shown": turn.text} if turn.text != c.text else {}),
                "tokens": len(c.output_ids),
                "finish_reason": c.finish_reason,
                "version": c.version,
                "return": returns.get(turn.id),
                "advantage": _advantage(advantages.get(turn.id)),
                **({} if pieces is None or not c.logprobs else _tokens(turn, pieces)),
            }
        )
    return {
        "id": episode.id,
        "task": episode.task.id,
        "question": episode.task.question,
        "gold": episode.task.answer,
        "level": episode.task.meta.get("level"),
        "finish": episode.finish.reason,
        "graded": episode.finish.turn,
        "accuracy": episode.accuracy,
        "verdict": episode.verdict,
        "rewards": [{"turn": s.turn, "name": s.name, "value": s.value, "to": s.to} for s in episode.rewards],
        "turns": turns,
    }


def _advantage(value: Any) -> Any:
    """One number where all tokens of a turn have the same."""
    if isinstance(value, list | tuple):
        return value[0] if len(set(value)) == 1 else list(value)
    return value


def _tokens(turn: Turn, pieces: Callable[[str, int], str]) -> dict[str, Any]:
    c = turn.completion
    return {
        "pieces": [pieces(turn.policy, token) for token in c.output_ids],
        "logprobs": [round(p, 4) for p in c.logprobs],
    }
