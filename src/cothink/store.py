"""Collected trees on disk: every call as it is answered, then the grades of its tree; a killed collection goes on.

A folder holds `header.json` (what the trees depend on) and `trees.jsonl`, to which lines are only added while a
collection runs: a task, the siblings of one call, or the finish and grades of a tree. `load` needs no model. Sampled
log-probs are not kept: sft and dpo read the trainer's, and their last digits depend on what was computed beside them.
"""

from __future__ import annotations

import fcntl
import json
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from cothink.record import RunError, write_atomic
from cothink.team import in_order, numbered
from cothink.trees import Grade, Tree
from cothink.types import UNKNOWN_ID, Completion, Episode, Finish, Task, Turn

FORMAT = 1
HEADER, TREES, LOCK = "header.json", "trees.jsonl", "lock"
SYNC = 1.0
"""Seconds after which what was written is forced to the disk: a power cut costs no more, a kill nothing."""

ANEW = "restore the file, or delete the folder to collect anew"
WRONG = (ValueError, TypeError, LookupError, AttributeError, RecursionError)
"""What reading a line that is not ours ends in."""

Line = dict[str, Any]


class StoreError(RunError):
    """A store that cannot be used as asked, or a file that is none."""


@dataclass
class Counts:
    """What was asked of the engines since the store was opened, and what came of it."""

    calls: int = 0
    completions: int = 0
    tokens: int = 0
    failed: int = 0
    first_error: str = ""


class Store:
    """An open store; `facts` are what its trees depend on, and those of an earlier attempt must be equal.

    One process at a time. `say` hears about a line that a kill has cut. Raises StoreError.
    """

    def __init__(self, folder: Path, facts: Mapping[str, Any], say: Callable[[str], None] | None = None):
        self.folder, self.counts = folder, Counts()
        folder.mkdir(parents=True, exist_ok=True)
        self._lock = (folder / LOCK).open("w")
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            self._lock.close()
            raise StoreError(f"{folder} is being written by another process; wait for it, or end it") from None
        try:
            self._claim({"format": FORMAT, **json.loads(json.dumps(facts))})
            self._cut(say)
            self._places: dict[str, list[int]] = {}
            self._done: set[str] = set()
            self.answered = 0
            """Calls that the folder holds the answers to."""
            for place, line in _lines(folder / TREES):
                self._note(place, line)
        except BaseException:
            self._lock.close()
            raise
        self._file = (folder / TREES).open("ab")
        self._synced = time.monotonic()

    def _claim(self, facts: Mapping[str, Any]) -> None:
        path = self.folder / HEADER
        if not path.exists():
            write_atomic(path, json.dumps(facts, indent=2, ensure_ascii=False))
            return
        known = json.loads(path.read_text(encoding="utf-8"))
        for key in (*known, *facts):
            if known.get(key) != facts.get(key):
                what = f"{self.folder} holds trees of another {key}: {known.get(key)}, not {facts.get(key)}"
                raise StoreError(f"{what}. Delete the folder to collect anew, or give this run a folder of its own")

    def _cut(self, say: Callable[[str], None] | None) -> None:
        """Removes a last line that a kill has left unfinished: its call is made again."""
        path = self.folder / TREES
        if not path.exists():
            return
        with path.open("r+b") as file:
            size = end = file.seek(0, os.SEEK_END)
            while end:
                start = max(0, end - 65_536)
                file.seek(start)
                found = file.read(end - start).rfind(b"\n")
                end = start + found + 1 if found >= 0 else start
                if found >= 0:
                    break
            if end < size:
                file.truncate(end)
                if say is not None:
                    say(f"{path}: the last line was cut off ({size - end} bytes); its call is made again")

    def _note(self, place: int, line: Line) -> None:
        self._places.setdefault(line["task"], []).append(place)
        self.answered += "turns" in line
        if "grades" in line:
            self._done.discard(line["task"])
            if not line["holes"]:
                self._done.add(line["task"])

    def done(self, task: Task) -> bool:
        """Whether the tree of a task is complete and graded; one with failed calls is not, it is tried again."""
        return task.id in self._done

    def book(self, task: Task, lasting: Callable[[str], bool]) -> Book:
        """The memory of one task's tree; `lasting` says whether a role's token ids mean anything in another process.

        Raises StoreError where the store holds another question of this name.
        """
        return Book(self, task, lasting, self._turns(task))

    def _turns(self, task: Task) -> dict[str, Completion]:
        found: dict[str, Completion] = {}
        known = False
        for line in self._of(task.id):
            if "question" in line:
                known = True
                if (line["question"], line["answer"]) != (task.question, task.answer):
                    what = f"{self.folder} holds a tree of another question {task.id!r}: the data has changed"
                    raise StoreError(f"{what}. Delete the folder to collect anew")
            if "turns" in line:
                found |= {turn.id: turn.completion for turn, _ in _siblings(line)}
        if not known:
            self.write({"task": task.id, "question": task.question, "answer": task.answer, "meta": dict(task.meta)})
        return found

    def _of(self, task: str) -> list[Line]:
        with (self.folder / TREES).open("rb") as file:
            found = []
            for place in self._places.get(task, ()):
                file.seek(place)
                found.append(json.loads(file.readline()))
        return found

    def write(self, line: Line) -> None:
        """Adds one line, which a kill of this process cannot take back."""
        place = self._file.tell()
        self._file.write(_text(line))
        self._file.flush()
        self._note(place, line)
        if time.monotonic() - self._synced > SYNC:
            self._sync()

    def _sync(self) -> None:
        os.fsync(self._file.fileno())
        self._synced = time.monotonic()

    def tidy(self, tasks: Iterable[Task]) -> None:
        """Writes the file anew in the order of the tasks and turns: whoever answered first leaves no trace."""
        part = self.folder / (TREES + ".part")
        places: dict[str, list[int]] = {}
        with part.open("wb") as file:
            order = dict.fromkeys(task.id for task in tasks)
            for name in (*order, *sorted(self._places.keys() - order.keys())):
                for line in _tidied(self._of(name)):
                    places.setdefault(name, []).append(file.tell())
                    file.write(_text(line))
            file.flush()
            os.fsync(file.fileno())
        os.replace(part, self.folder / TREES)
        self._file.close()
        self._file, self._places = (self.folder / TREES).open("ab"), places

    def close(self) -> None:
        """Closes the file and lets the next process in."""
        self._sync()
        self._file.close()
        self._lock.close()


@dataclass
class Book:
    """The memory of one tree (see `team.Memory`): what is known of it, and where its next calls go."""

    store: Store
    task: Task
    lasting: Callable[[str], bool]
    known: dict[str, Completion] = field(default_factory=dict)
    holes: int = 0
    turns: dict[str, tuple[Turn, int]] = field(default_factory=dict)

    def recall(self, ids: Sequence[str], prompt: tuple[int, ...]) -> list[Completion] | None:
        """The completions of a call that was answered before, None for a new one."""
        if not all(name in self.known for name in ids):
            return None
        found = [self.known[name] for name in ids]
        if any(c.prompt_ids not in ((), prompt) for c in found):
            what = (
                f"the stored turns of task {self.task.id} answer another prompt: its tokenizer or template has changed"
            )
            raise StoreError(f"{what}. Delete {self.store.folder} to collect anew")
        return found

    def keep(self, turns: Sequence[Turn], place: int) -> None:
        """Writes the siblings of one call."""
        counts = self.store.counts
        counts.calls += 1
        counts.completions += len(turns)
        counts.tokens += sum(len(turn.completion.output_ids) for turn in turns)
        self.store.write(_call(self.task.id, turns, place, self.lasting(turns[0].role)))

    def failed(self, parents: Sequence[str], role: str, error: Exception) -> None:
        """Counts a call that brought nothing."""
        self.holes += 1
        self.store.counts.failed += 1
        self.store.counts.first_error = self.store.counts.first_error or f"{role}: {type(error).__name__}: {error}"

    def close(self, finish: Finish, grades: Mapping[str, Grade]) -> None:
        """Writes how the tree ended and what each turn's answer is worth, by the ids of the finished episode."""
        marks = {turn: [grade.verdict, grade.answer] for turn, grade in grades.items()}
        self.store.write({"task": self.task.id, "finish": [finish.reason, finish.text, finish.turn], "grades": marks,
                          "holes": self.holes})  # fmt: skip


def header(folder: str | Path) -> dict[str, Any]:
    """What the trees of a folder depend on, as they were collected."""
    path = Path(folder) / HEADER
    if not path.exists():
        raise StoreError(f"{folder} holds no trees (no {HEADER}): name the folder that a collect stage wrote")
    try:
        facts = json.loads(path.read_text(encoding="utf-8"))
        shape = facts["workflow"].get("branching") or []
        if not all(isinstance(n, int) for n in (facts["round"], *shape)) or not isinstance(facts["split"], str):
            raise TypeError("round, split and branching are numbers and a name")
        if not all(isinstance(origin, dict) for origin in (facts.get("roles", {}), *facts.get("roles", {}).values())):
            raise TypeError("roles are mappings")
    except WRONG as error:
        raise StoreError(f"{path} is not what was written ({_said(error)}); {ANEW}") from None
    return facts


def _said(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error)[:200]}"


def load(folder: str | Path, *, partial: bool = False) -> list[Tree]:
    """The graded trees of a folder, in the order of its file; with `partial` also those that are still growing."""
    facts = header(folder)
    origin = facts.get("roles", {})
    by_task: dict[str, list[Line]] = {}
    path = Path(folder) / TREES
    if path.exists():
        for _, line in _lines(path, forgive=True):
            by_task.setdefault(line["task"], []).append(line)
    found = []
    for lines in by_task.values():
        try:
            made = _tree(lines, facts["split"], facts["round"], origin, partial)
        except WRONG as error:
            what = f"{path}: the lines of task {lines[0]['task']!r} are not what was written ({_said(error)})"
            raise StoreError(f"{what}; {ANEW}") from None
        if made is not None:
            found.append(made)
    return found


def _tree(
    lines: Sequence[Line], split: str, round: int, origin: Mapping[str, Mapping[str, Any]], partial: bool
) -> Tree | None:
    row = next((line for line in lines if "question" in line), None)
    end = next((line for line in reversed(lines) if "grades" in line), None)
    if row is None or (end is None and not partial):
        return None
    pairs = [pair for line in lines if "turns" in line for pair in _siblings(line)]
    reason, text, turn = end["finish"] if end is not None else ("", "", None)
    turns, _ = numbered([t for t, _ in pairs], {t.id: place for t, place in pairs}, Finish(reason, text))
    task = Task(row["task"], row["question"], row["answer"], row["meta"])
    grades = {name: Grade(*mark) for name, mark in (end["grades"] if end is not None else {}).items()}
    stated = [task.question, task.answer, reason, text, *(grade.verdict for grade in grades.values())]
    if not all(isinstance(one, str) for one in stated) or not isinstance(task.meta, dict):
        raise TypeError("a text is no text")
    return Tree(Episode(f"{task.id}#0", task, turns, Finish(reason, text, turn)), grades, split, round, origin)


def _call(task: str, turns: Sequence[Turn], place: int, lasting: bool) -> Line:
    first = turns[0]
    prompt = first.completion.prompt_ids if lasting else ()
    said = []
    for turn in turns:
        done = turn.completion
        ids = done.output_ids if lasting else (UNKNOWN_ID,) * len(done.output_ids)
        said.append({
            "id": turn.id, "text": done.text, **({"shown": turn.text} if turn.text != done.text else {}),
            "output_ids": list(ids),
            "finish_reason": done.finish_reason, "version": done.version,
            **({"schema": done.schema} if done.schema is not None else {}),
        })  # fmt: skip
    return {"task": task, "parents": list(first.parents), "role": first.role, "policy": first.policy,
            "round": first.round, "place": place, "prompt_ids": list(prompt), "turns": said}  # fmt: skip


def _siblings(line: Line) -> list[tuple[Turn, int]]:
    """The turns of one stored call, each with its place among its siblings; raises StoreError."""
    try:
        found = [*_read(line)]
        if not all(
            isinstance(text, str) for turn, _ in found for text in (turn.id, turn.role, turn.text, *turn.parents)
        ):
            raise TypeError("a text is no text")
    except WRONG as error:
        raise StoreError(f"a call of task {line['task']!r} is not what was written ({_said(error)}); {ANEW}") from None
    return found


def _read(line: Line) -> Iterator[tuple[Turn, int]]:
    prompt = tuple(line["prompt_ids"])
    for k, said in enumerate(line["turns"]):
        done = Completion(
            said["text"], prompt, tuple(said["output_ids"]), (), said["finish_reason"],
            said["version"], said.get("schema"),
        )  # fmt: skip
        shown = said.get("shown", said["text"])
        turn = Turn(said["id"], tuple(line["parents"]), line["role"], line["policy"], done, shown, line["round"])
        yield turn, line["place"] + k


def _tidied(lines: Sequence[Line]) -> Iterator[Line]:
    """A task's lines in their proper order: the task, its calls from the root on, how it ended."""
    yield from (line for line in lines if "question" in line)
    calls = {line["turns"][0]["id"]: line for line in lines if "turns" in line}
    pairs = [pair for line in calls.values() for pair in _siblings(line)]
    rank = {name: k for k, name in enumerate(in_order([t for t, _ in pairs], {t.id: place for t, place in pairs}))}
    yield from (calls[name] for name in sorted(calls, key=rank.__getitem__))
    yield from [line for line in lines if "grades" in line][-1:]


def _text(line: Line) -> bytes:
    return (json.dumps(line, ensure_ascii=False, separators=(",", ":")) + "\n").encode("utf-8", "surrogatepass")


def _lines(path: Path, forgive: bool = False) -> Iterator[tuple[int, Line]]:
    """Place and content of every line; with `forgive`, an unfinished last one is passed over."""
    if not path.exists():
        return
    place = 0
    with path.open("rb") as file:
        for number, raw in enumerate(file, 1):
            if raw.endswith(b"\n") or not forgive:
                try:
                    line = json.loads(raw)
                    if not isinstance(line["task"], str):
                        raise TypeError("its task is no text")
                except WRONG as error:
                    what = f"{path}, line {number}: not what was written ({_said(error)})"
                    raise StoreError(f"{what}; {ANEW}") from None
                yield place, line
            place += len(raw)
