"""Plays questions and keeps every finished one as a line of a file.

An engine of ours rounds by what shares a pass, so its questions are played in fixed blocks, each begun afresh and kept
when it is whole: stopped and resumed, the file comes out the same, byte for byte. Servers are asked without such walls.

A row is one play: the episode as `record.episode_row` writes it, and `set`, `play` (0-based), `answer` (None: states
none), `vote` (plays of one question with equal answers have equal numbers), `prompt_tokens` of each turn, and `pair`
and `order` of a pair that is judged in both orders.
"""

from __future__ import annotations

import asyncio
import json
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from cothink.record import RunError, episode_row, write_atomic
from cothink.session import Session
from cothink.stages.judging import pair_of
from cothink.stages.playing import afresh, grade
from cothink.team import Failure, Job, play, stable_seed
from cothink.types import Episode, Finish, PlayError, Task
from cothink.votes import answer_of, classes

Row = dict[str, Any]
Key = tuple[str, str]
"""Set name and task id."""

FAILED = "failed"
"""Verdict of a play that brought no answer: too late, or a question longer than the context."""
BLOCK = 64
"""Plays of a block, at most: what a kill may cost, against the wait for the last of a block to finish."""
PATIENCE = 8
"""Questions that may fail by an error before any succeeds; then the run stops with the first error."""


class Answers:
    """The rows of one system, by question; with a path also on disk, a finished question at a time."""

    def __init__(self, path: Path | None = None):
        self.path = path
        self.rows: dict[Key, list[Row]] = defaultdict(list)
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._read(path)

    def _read(self, path: Path) -> None:
        if not path.exists():
            return
        data = path.read_bytes()
        whole = data[: data.rfind(b"\n") + 1]
        if len(whole) < len(data):  # a kill in the middle of a line: that question is played again
            with path.open("r+b") as file:
                file.truncate(len(whole))
        for line in whole.decode().splitlines():
            row = json.loads(line)
            self.rows[row["set"], row["task"]].append(row)
        for rows in self.rows.values():
            rows.sort(key=lambda row: row["play"])

    def of(self, set_name: str, task: Task) -> list[Row]:
        """The plays of a question so far; raises RunError when the file's question is another one."""
        rows = self.rows.get((set_name, task.id), [])
        if rows and (rows[0]["question"], rows[0]["gold"]) != (task.question, task.answer):
            what = f"{self.path} holds answers to another question {task.id!r} of the set {set_name!r}"
            raise RunError(f"{what}: the data has changed. Name another folder with --out, or delete this file")
        return rows

    def complete(self, tasks: Mapping[str, Sequence[Task]], k: int) -> bool:
        """Whether every question has k plays already."""
        return all(len(self.of(name, task)) >= k for name, found in tasks.items() for task in found)

    def add(self, set_name: str, task: Task, rows: Sequence[Row], *, keep: bool = True) -> None:
        """The plays of one question, appended to the file in one write unless `keep` is off (`tidy` writes them)."""
        self.rows[set_name, task.id].extend(rows)
        if keep and self.path is not None:
            with self.path.open("a", encoding="utf-8") as file:
                file.write(_lines(rows))

    def tidy(self, tasks: Mapping[str, Sequence[Task]]) -> None:
        """Writes the file anew in the order of the questions: whoever finished first leaves no trace."""
        if self.path is None:
            return
        order = {(name, task.id): k for name, found in tasks.items() for k, task in enumerate(found)}
        sets = {name: k for k, name in enumerate(tasks)}
        last = len(order)

        def place(key: Key) -> tuple[int, int, Key]:
            return sets.get(key[0], len(sets)), order.get(key, last), key

        write_atomic(self.path, "".join(_lines(self.rows[key]) for key in sorted(self.rows, key=place)))


def _lines(rows: Iterable[Row]) -> str:
    return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)


class _Desk:
    """What one call of `ask` shares among its questions."""

    def __init__(self, session: Session, k: int, seed: object, temperature: float | None, answers: Answers):
        self.session, self.k, self.seed, self.answers = session, k, seed, answers
        self.roles = session.roles
        self.blocks = any(hasattr(engine, "forget") for engine in session.engines.values())
        if temperature is not None:
            self.roles = {
                n: replace(r, sampling=replace(r.sampling, temperature=temperature)) for n, r in session.roles.items()
            }
        self.errors: list[Failure] = []
        self.questions_failed = 0
        self.answered = False

    async def question(self, set_name: str, task: Task) -> int:
        """Plays what is missing of one question; returns the number of plays."""
        known = self.answers.of(set_name, task)
        first = len(known)
        jobs = [Job(task, f"{task.id}#{j}", stable_seed(self.seed, task.id, j)) for j in range(first, self.k)]
        if not jobs:
            return 0
        team, session = self.session.recipe.team, self.session
        try:
            played = await play(jobs, session.answering, self.roles, session.engines, deadline=team.deadline)
        except PlayError as error:  # every play of this question failed by an error
            self._failed(Failure(task.id, jobs[0].id, "error", str(error)), error, len(jobs))
            return len(jobs)
        broken = [f for f in played.failures if f.kind == "error"]
        if broken:
            self.errors += broken
            return len(jobs)
        self.answered = True
        found: dict[str, Episode | Failure] = {e.id: e for e in await grade(played.episodes)}
        found |= {f.episode: f for f in played.failures}
        rows = [_row(set_name, task, first + j, found[job.id]) for j, job in enumerate(jobs)]
        votes = await classes(task, [row["answer"] for row in [*known, *rows]])
        for row, vote in zip(rows, votes[first:], strict=True):
            row["vote"] = vote
        self.answers.add(set_name, task, rows, keep=not self.blocks)
        return len(jobs)

    def _failed(self, failure: Failure, error: PlayError, plays: int) -> None:
        self.errors += [failure] * plays
        self.questions_failed += 1
        if not self.answered and self.questions_failed >= PATIENCE:
            raise error


async def ask(
    session: Session,
    tasks: Mapping[str, Sequence[Task]],
    k: int,
    seed: object,
    *,
    temperature: float | None = None,
    answers: Answers | None = None,
    on_done: Callable[[int], None] | None = None,
) -> tuple[list[Row], Counter[str]]:
    """`k` graded plays of every question, in the order of the questions, and what failed, by kind.

    Questions that `answers` holds already are not played again. With an engine of ours the file gains a block of
    64 plays (`team.concurrency` if less) at a time, with a server a question. A play that ran out of its deadline or
    did not fit the context is a row with the verdict `failed`. A question with a play that failed by an error (a
    server that is down) is left out and not kept, so that the next call tries it again; raises PlayError when all of
    them failed.
    """
    answers = Answers() if answers is None else answers
    desk = _Desk(session, k, seed, temperature, answers)
    limit = session.recipe.team.concurrency
    at_once = max(1, (min(limit, BLOCK) if desk.blocks else limit) // k)
    gate = asyncio.Semaphore(at_once)
    done = 0

    async def one(set_name: str, task: Task) -> None:
        nonlocal done
        async with gate:
            await desk.question(set_name, task)
        done += k
        if on_done:
            on_done(done)

    asked = [(name, task) for name, found in tasks.items() for task in found]
    size = at_once if desk.blocks else max(1, len(asked))
    for start in range(0, len(asked), size):
        if desk.blocks:
            afresh(session)
        try:
            async with asyncio.TaskGroup() as group:
                for name, task in asked[start : start + size]:
                    group.create_task(one(name, task))
        except ExceptionGroup as several:
            raise several.exceptions[0] from None
        answers.tidy(tasks)
    plays = [answers.of(name, task) for name, task in asked]
    rows = [row for known in plays if len(known) >= k for row in known[:k]]
    if not rows and desk.errors:
        raise PlayError(f"all questions failed; the first error: {desk.errors[0].message}")
    failures = Counter(row["failure"] for row in rows if "failure" in row)
    return rows, failures + Counter(error=len(desk.errors))


def _row(set_name: str, task: Task, play: int, found: Episode | Failure) -> Row:
    if isinstance(found, Failure):
        row = episode_row(Episode(found.episode, task, (), Finish(found.kind, ""))) | pair_of(task.meta)
        return {**row, "set": set_name, "play": play, "failure": found.kind, "accuracy": 0.0, "verdict": FAILED,
                "answer": None, "vote": None}  # fmt: skip
    return row_of(found, set_name, play)


def row_of(episode: Episode, set_name: str, play: int) -> Row:
    """The row of a graded episode; its vote is counted once all plays of its question are known."""
    row: Row = {**episode_row(episode), **pair_of(episode.task.meta)}
    for turn, spoken in zip(row["turns"], episode.turns, strict=True):
        turn["prompt_tokens"] = len(spoken.completion.prompt_ids)
    states = episode.verdict in ("right", "wrong")
    answer = answer_of(episode.task, episode.finish.text) if states else None
    return {**row, "set": set_name, "play": play, "answer": answer, "vote": None}
