"""Episodes on disk, a page at a time: what one row is (right, truncated, flipped), filters, and where to read on."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cothink.record import RunError
from cothink.types import TRUNCATED
from cothink.verify.exact import number, same_spelling
from cothink.verify.extract import marked

Row = Mapping[str, Any]

BUDGET = 8 << 20
"""Bytes that are read for one page at most: a rare kind of episode takes several requests, never the whole file."""
LONGEST = 64 << 20
"""A longer line is left out: it would fill the memory of whoever looks at it."""
FLIPS = ("fixed", "spoilt", "changed")


@dataclass(frozen=True, slots=True)
class Facts:
    """What lists and filters need of an episode.

    `flip` compares the answers that turns on the way state, in a box or behind a marker, with the graded one: `fixed`
    (right, and an earlier one was another), `spoilt` (wrong, and an earlier one was the gold), else `changed` or "".
    """

    verdict: str
    reward: float | None
    truncated: bool
    flip: str
    roles: tuple[str, ...]
    tokens: int


def facts(row: Row) -> Facts:
    """The facts of one row."""
    turns = row.get("turns") or ()
    scores = [s["value"] for s in row.get("rewards") or ()]
    return Facts(
        verdict=str(row.get("verdict") or "not graded"),
        reward=sum(scores) if scores else None,
        truncated=row.get("finish") == TRUNCATED or any(t.get("finish_reason") == "length" for t in turns),
        flip=_flip(row, turns),
        roles=tuple(dict.fromkeys(t["role"] for t in turns if t.get("tokens"))),
        tokens=sum(t.get("tokens") or 0 for t in turns),
    )


def _flip(row: Row, turns: Sequence[Row]) -> str:
    turns = _way(turns, row.get("graded"))
    stated = [answer for turn in turns if (answer := marked(shown(turn))) is not None]
    if not stated:
        return ""
    graded = next((marked(shown(t)) for t in turns if t.get("id") == row.get("graded")), None) or stated[-1]
    others = [answer for answer in stated if not _same(answer, graded)]
    if not others:
        return ""
    if row.get("accuracy") == 1.0:
        return "fixed"
    return "spoilt" if any(_same(answer, str(row.get("gold"))) for answer in others) else "changed"


def _way(turns: Sequence[Row], last: Any) -> Sequence[Row]:
    """The turns on the way to one of them: other branches of a tree changed nothing about its answer."""
    wanted = {last}
    for turn in reversed(turns):
        if turn.get("id") in wanted:
            wanted |= {*(turn.get("parents") or ())}
    return [turn for turn in turns if turn.get("id") in wanted] or turns


def _same(one: str, two: str) -> bool:
    value = number(one)
    return same_spelling(one, two) or (value is not None and value == number(two))


def shown(turn: Row) -> str:
    """What the others saw of a turn."""
    return str(turn.get("shown", turn.get("text", "")))


@dataclass(frozen=True, slots=True)
class Filter:
    """Which episodes are wanted; with a `role`, `truncated` asks about its turns alone.

    `low` and `high` bound the sum of the rewards, `words` must occur in the question, the gold answer or a turn.
    """

    verdict: str = ""
    truncated: bool = False
    flip: str = ""
    role: str = ""
    low: float | None = None
    high: float | None = None
    words: str = ""

    def __call__(self, row: Row) -> bool:
        known = facts(row)
        if self.verdict and known.verdict != self.verdict:
            return False
        if self.role and self.role not in known.roles:
            return False
        if self.truncated and not (self._cut(row) if self.role else known.truncated):
            return False
        if self.flip and not (known.flip == self.flip or (self.flip == "any" and known.flip)):
            return False
        if self.low is not None and (known.reward is None or known.reward < self.low):
            return False
        if self.high is not None and (known.reward is None or known.reward > self.high):
            return False
        return not self.words or self._says(row)

    def _cut(self, row: Row) -> bool:
        return any(t["role"] == self.role and t.get("finish_reason") == "length" for t in row.get("turns") or ())

    def _says(self, row: Row) -> bool:
        words = self.words.casefold()
        texts = [
            row.get("question"),
            row.get("gold"),
            row.get("task"),
            *(t.get("text") for t in row.get("turns") or ()),
        ]
        return any(words in str(text).casefold() for text in texts)


@dataclass(frozen=True, slots=True)
class Found:
    """One episode and its place: which of the files, and at which byte."""

    file: int
    offset: int
    row: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Page:
    """Episodes, how many were looked at, where to go on (None: there are no more), and lines that are no episodes."""

    found: list[Found]
    read: int
    then: tuple[int, int] | None
    unreadable: int = 0


def scan(
    files: Sequence[Path],
    wanted: Callable[[Row], bool],
    *,
    start: tuple[int, int] = (0, 0),
    most: int = 50,
    budget: int = BUDGET,
) -> Page:
    """The next `most` wanted episodes from a place on; stops after `budget` bytes with what was found by then."""
    found: list[Found] = []
    read = unreadable = 0
    file, offset = start
    check(files, start)
    while file < len(files):
        with files[file].open("rb") as handle:
            handle.seek(offset)
            while line := handle.readline(LONGEST):
                here, offset = offset, handle.tell()
                budget -= len(line)
                row = parsed(line)
                if row is None:
                    unreadable += line.endswith(b"\n")  # else it is still being written
                else:
                    read += 1
                if row is not None and wanted(row):
                    found.append(Found(file, here, row))
                if len(found) >= most or budget <= 0:
                    return Page(found, read, (file, offset), unreadable)
        file, offset = file + 1, 0
    return Page(found, read, None, unreadable)


def check(files: Sequence[Path], place: tuple[int, int]) -> None:
    """A place must be the beginning of a line: others are nobody's links, and half a line is no row."""
    file, offset = place
    if not (0 <= file <= len(files) and offset >= 0):
        raise RunError(f"there is no place {file}:{offset} in these {len(files)} files")
    if offset:
        with files[file].open("rb") as handle:
            handle.seek(offset - 1)
            if handle.read(1) != b"\n":
                raise RunError(f"byte {offset} of {files[file].name} is not the beginning of an episode")


def parsed(line: bytes) -> dict[str, Any] | None:
    """The episode of a line; None where it is half written, too long or something else."""
    try:
        row = json.loads(line.decode("utf-8", "replace"))
    except (ValueError, RecursionError):
        return None
    if not isinstance(row, dict) or not isinstance(row.get("turns"), list):
        return None
    scores = row.get("rewards") or []
    sound = all(map(_is_turn, row["turns"])) and isinstance(scores, list) and all(map(_is_score, scores))
    return row if sound else None


def _is_turn(turn: Any) -> bool:
    """Whether what is read of a turn has the kinds that `record.episode_row` writes; absent is as good as None."""
    if not isinstance(turn, dict) or not isinstance(turn.get("role"), str):
        return False
    advantage = turn.get("advantage")
    lists = {key: turn.get(key) or [] for key in ("parents", "pieces", "logprobs")}
    lists["advantage"] = advantage if isinstance(advantage, list) else []
    if not all(isinstance(found, list) for found in lists.values()):
        return False
    numbers = [turn.get("return"), None if isinstance(advantage, list) else advantage]
    return (
        all(isinstance(turn.get(key), int | None) for key in ("tokens", "round"))
        and all(isinstance(v, int | float | None) for v in numbers)
        and all(isinstance(v, int | float) for v in (*lists["logprobs"], *lists["advantage"]))
        and all(isinstance(v, str | int) for v in (*lists["parents"], turn.get("id", "")))
        and all(isinstance(piece, str) for piece in lists["pieces"])
    )


def _is_score(score: Any) -> bool:
    known = isinstance(score, dict) and {"turn", "name", "value", "to"} <= score.keys()
    return known and isinstance(score["value"], int | float)


def at(file: Path, offset: int) -> dict[str, Any]:
    """The episode that begins at a byte of a file."""
    check([file], (0, offset))
    with file.open("rb") as handle:
        handle.seek(offset)
        row = parsed(handle.readline(LONGEST))
    if row is None:
        raise RunError(f"there is no episode at byte {offset} of {file.name}")
    return row


def telling(file: Path, most: int) -> list[dict[str, Any]]:
    """Up to `most` episodes of a file that differ in kind: flipped, truncated, wrong and right ones in turn."""
    kinds: dict[str, list[dict[str, Any]]] = {}
    for one in scan([file], lambda row: True, most=400, budget=BUDGET // 2).found:
        known = facts(one.row)
        kind = known.flip or ("truncated" if known.truncated else known.verdict)
        kinds.setdefault(kind, []).append(one.row)
    order = [k for k in (*FLIPS, "truncated", "wrong", "right") if k in kinds]
    order += [k for k in kinds if k not in order]
    picked: list[dict[str, Any]] = []
    for depth in range(most):
        picked += [kinds[k][depth] for k in order if depth < len(kinds[k])]
    return picked[:most]
