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
from collections.abc import Collection, Iterable, Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

from cothink.types import Episode

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


def write_atomic(path: Path, text: str) -> None:
    """Replaces a file in one move, so that a reader or a kill never meets half of it."""
    temporary = path.with_name(path.name + ".part")
    temporary.write_text(text, encoding="utf-8")
    os.replace(temporary, path)


def _stopped(folder: Path) -> str:
    why = json.loads((folder / STOPPED).read_text(encoding="utf-8"))
    return (
        f"the watch stopped this run at step {why['step']}: {why['what']}. Start another one with other settings, or "
        f"delete {folder / STOPPED} to go on from where it stood"
    )


def last_checkpoint(folder: Path) -> Path | None:
    """The newest checkpoint of a run folder; None before the first."""
    state = folder / "state.json"
    name = json.loads(state.read_text()).get("checkpoint") if state.exists() else None
    return folder / "checkpoints" / name if name else None


class Run:
    """One run folder; `state` is where a resumed run goes on: {"stage", "step", ...}, empty for a fresh run."""

    def __init__(self, folder: Path, recipe_text: str, seed: int):
        self.folder = folder
        self.state: dict[str, Any] = {}
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
            folder.mkdir(parents=True, exist_ok=True)
            self._write_manifest(seed)
            write_atomic(known, recipe_text)
        self._metrics = (folder / "metrics.jsonl").open("a", encoding="utf-8")

    @property
    def checkpoints(self) -> Path:
        """The folder of checkpoints."""
        return self.folder / "checkpoints"

    def _write_manifest(self, seed: int) -> None:
        manifest = {
            "seed": seed,
            "started": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
            "commit": commit(),
            "command": sys.argv,
            "versions": versions(),
            "platform": platform.platform(),
        }
        write_atomic(self.folder / "manifest.json", json.dumps(manifest, indent=2))

    def _resume(self) -> None:
        state = self.folder / "state.json"
        if state.exists():
            self.state = json.loads(state.read_text())
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
        current = self.checkpoints / (self.state.get("checkpoint") or "none")
        if self.state == {**state, "checkpoint": current.name} and current.is_dir():
            return current  # this very state is saved already
        name = self.free_name(state["stage"], state["step"], keep) if name is None else name
        place, part = self.checkpoints / name, self.checkpoints / (name + ".part")
        shutil.rmtree(part, ignore_errors=True)
        part.mkdir(parents=True)
        for policy in policies.values():
            policy.save(part)
            if hasattr(policy, "save_state"):
                policy.save_state(part / "training")
        shutil.rmtree(place, ignore_errors=True)  # only now: the state file may still point at it
        os.replace(part, place)
        self.state = {**state, "checkpoint": name}
        write_atomic(self.folder / "state.json", json.dumps(self.state, indent=2))
        old = sorted(p for p in self.checkpoints.iterdir() if p.is_dir() and p != place and p.name not in keep)
        for folder in old[: max(0, len(old) - (KEEP_CHECKPOINTS - 1))]:
            shutil.rmtree(folder)
        return place

    def stop(self, reason: Mapping[str, Any]) -> None:
        """Marks the run as stopped by its watch: it is not resumed before somebody has removed the mark."""
        write_atomic(self.folder / STOPPED, json.dumps(reason, indent=2))

    def finish_stage(self, index: int) -> None:
        """Notes that stages up to `index` are done, so that a resumed run starts with the next one."""
        self.state = {"stage": index + 1, "step": 0, "checkpoint": self.state.get("checkpoint")}
        write_atomic(self.folder / "state.json", json.dumps(self.state, indent=2))

    def close(self) -> None:
        """Closes the metrics file."""
        self._metrics.close()


def episode_row(
    episode: Episode, returns: Mapping[str, float | None] | None = None, advantages: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """One episode as a JSON object: per-turn text, tokens, rewards, return and advantage."""
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
                "advantage": advantages.get(turn.id),
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
