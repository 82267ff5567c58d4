"""Run folders as a reader finds them: finished, growing, cut off in a line, or written by an older version."""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from cothink import source
from cothink.record import STOPPED, RunError

DEPTH = 4
"""How many folders deep runs are looked for."""
FRESH = 120.0
"""Seconds after its last write for which an unfinished run counts as running."""

Row = dict[str, Any]


class Tail:
    """The rows of a growing file of JSON lines; each call reads only what was added since the one before."""

    def __init__(self, path: Path):
        self.path = path
        self.rows: list[Row] = []
        self.unreadable = 0
        self._offset, self._file = 0, -1
        self._lock = threading.Lock()

    def read(self) -> list[Row]:
        """All rows so far; a last line without its end is left for the next call."""
        with self._lock:
            return self._read() if self.path.exists() else self.rows

    def _read(self) -> list[Row]:
        state = self.path.stat()
        if state.st_ino != self._file or state.st_size < self._offset:  # a resumed run writes the file anew
            self.rows, self._offset, self._file, self.unreadable = [], 0, state.st_ino, 0
        if state.st_size == self._offset:
            return self.rows
        with self.path.open("rb") as handle:
            handle.seek(self._offset)
            data = handle.read()
        whole = data[: data.rfind(b"\n") + 1]
        self._offset += len(whole)
        for line in whole.splitlines():
            row = _object(line)
            known = row is not None and isinstance(row.get("stage"), int) and isinstance(row.get("step"), int | float)
            if known:
                self.rows.append(row)  # type: ignore[arg-type]
            else:
                self.unreadable += 1
        return self.rows


def _object(line: bytes) -> Row | None:
    try:
        found = json.loads(line.decode("utf-8", "replace"))
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None


class Folder:
    """One run folder; small files are read when asked for, metrics as they grow, episodes never as a whole."""

    def __init__(self, path: Path, name: str | None = None):
        self.path = path
        self.name = name or path.resolve().name
        self._metrics = Tail(path / "metrics.jsonl")

    @property
    def recipe_text(self) -> str:
        """The recipe as the run wrote it."""
        return (self.path / "recipe.yaml").read_text(encoding="utf-8", errors="replace")

    @property
    def recipe(self) -> dict[str, Any]:
        """The recipe as a plain mapping: one written by another version is shown too; raises RecipeError."""
        found = source.parse(self.recipe_text, str(self.path / "recipe.yaml"))
        return found if isinstance(found, dict) else {}

    @property
    def stages(self) -> list[dict[str, Any]]:
        """The recipe's stages."""
        found = self.recipe.get("stages")
        return [s for s in found if isinstance(s, dict)] if isinstance(found, list) else []

    @property
    def roles(self) -> list[str]:
        """The names of the team's roles."""
        team = self.recipe.get("team")
        roles = team.get("roles") if isinstance(team, dict) else None
        return [*map(str, roles)] if isinstance(roles, dict) else []

    @property
    def manifest(self) -> dict[str, Any]:
        """When, how and with which versions the run began."""
        return self._json("manifest.json")

    @property
    def results(self) -> dict[str, Any]:
        """The evaluations so far, by label."""
        found = self._json("results.json")
        return {k: v for k, v in found.items() if isinstance(v, dict) and isinstance(v.get("accuracy"), int | float)}

    @property
    def stopped(self) -> dict[str, Any]:
        """Why the watch stopped the run; empty where it did not."""
        return self._json(STOPPED)

    def _json(self, name: str) -> dict[str, Any]:
        path = self.path / name
        return (_object(path.read_bytes()) or {}) if path.exists() else {}

    def metrics(self) -> list[Row]:
        """Every row of metrics so far."""
        return self._metrics.read()

    @property
    def unreadable(self) -> int:
        """Lines of metrics that were no JSON objects with a stage and a step."""
        return self._metrics.unreadable

    @property
    def touched(self) -> float:
        """When the run wrote last, in seconds since 1970."""
        places = [self.path / name for name in ("metrics.jsonl", "results.json", "state.json", "recipe.yaml")]
        episodes = self.path / "episodes"
        places += list(episodes.iterdir()) if episodes.is_dir() else []
        return max((p.stat().st_mtime for p in places if p.exists()), default=0.0)

    @property
    def status(self) -> str:
        """`finished`, `stopped`, `running` or `unfinished`."""
        if self.stopped:
            return "stopped"
        if self._json("state.json").get("stage", 0) >= len(self.stages) > 0:
            return "finished"
        return "running" if time.time() - self.touched < FRESH else "unfinished"

    @property
    def progress(self) -> str:
        """How far training is: `step 12 of 40`."""
        rows = self.metrics()
        if not rows:
            return ""
        last = rows[-1]
        stages = self.stages
        planned = stages[last["stage"]].get("steps") if last["stage"] < len(stages) else None
        return f"step {last['step']}" + (f" of {planned}" if planned else "")

    def episodes(self) -> dict[str, list[Path]]:
        """The files of episodes by stage folder (`01-rl`), each a step (or an evaluation), in order."""
        place = self.path / "episodes"
        folders = sorted(p for p in place.iterdir() if p.is_dir()) if place.is_dir() else []
        return {f.name: files for f in folders if (files := sorted(f.glob("*.jsonl")))}

    def warnings(self) -> list[tuple[int, str, str]]:
        """What the watch said: (step, `warn`, `stop` or `action`, words), in order."""
        found = []
        for row in self.metrics():
            said = row.get("watch")
            for words in said if isinstance(said, list) else []:
                level, _, rest = str(words).partition(" ")
                found.append((row["step"], level, rest))
            if row.get("watch/action"):
                found.append((row["step"], "action", str(row["watch/action"])))
        return found


def is_run(path: Path) -> bool:
    """Whether a folder is a run's."""
    return (path / "recipe.yaml").is_file() and (path / "manifest.json").is_file()


def opened(path: Path, name: str | None = None) -> Folder:
    """The run in a folder; raises RunError with what to name instead."""
    if is_run(path):
        return Folder(path, name)
    if not path.is_dir():
        raise RunError(f"there is no folder {path}; name one that `cothink run` wrote (runs/NAME)")
    inside = [found.relative_to(path) for found in walk(path)][:5]
    hint = f"; runs are in {', '.join(str(path / p) for p in inside)}" if inside else ""
    raise RunError(f"{path} is not a run folder: it has no recipe.yaml and manifest.json{hint}")


def named(paths: list[Path]) -> list[Folder]:
    """The runs in some folders, under names that tell them apart."""
    parts = [path.resolve().parts for path in paths]
    if len(set(parts)) < len(parts):
        raise RunError("the same run is named twice; name each folder once")
    for depth in range(1, max(map(len, parts), default=1) + 1):
        names = ["/".join(p[-depth:]) for p in parts]
        if len(set(names)) == len(names):
            return [opened(path, name) for path, name in zip(paths, names)]
    return [opened(path) for path in paths]


def walk(root: Path, depth: int = DEPTH) -> Iterator[Path]:
    """Run folders in and below a folder, by name; links out of it are not followed."""
    if is_run(root):
        yield root
        return
    if depth == 0 or not root.is_dir():
        return
    for path in sorted(root.iterdir()):
        if path.is_dir() and not path.is_symlink() and not path.name.startswith(".") and os.access(path, os.X_OK):
            yield from walk(path, depth - 1)


def is_evaluation(path: Path) -> bool:
    """Whether a folder holds what `cothink evaluate --out` wrote."""
    results = path / "results.json"
    return not is_run(path) and results.is_file() and "systems" in (_object(results.read_bytes()) or {})
