"""The same questions answered by two runs: pages of pairs, read from both files in step."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cothink.report.episodes import BUDGET, LONGEST, check, parsed
from cothink.report.markup import first_line, text

Key = tuple[Any, Any, Any]


@dataclass(frozen=True, slots=True)
class Pair:
    """One question of both: where its answers begin in their files, and their verdicts."""

    question: str
    first: int
    second: int
    verdicts: tuple[str, str]


def page(
    one: Path, two: Path, *, differ: bool, start: tuple[int, int] = (0, 0), most: int = 50
) -> tuple[list[Pair], tuple[int, int] | None]:
    """The next pairs from a byte of each file on, and where to go on; `differ`: only those with other verdicts.

    Evaluations keep their answers in the order of the questions, so both files are read in step; a play that has no
    counterpart within a page's reach is left out.
    """
    check([one], (0, start[0]))
    others = _Others(two, start[1])
    found: list[Pair] = []
    for offset, then, row in _lines(one, start[0]):
        match = others.find(_key(row))
        if match is not None:
            both = str(row.get("verdict")), match[1]
            if not differ or both[0] != both[1]:
                found.append(Pair(first_line(str(row.get("question", ""))), offset, match[0], both))
        if len(found) >= most or then - start[0] > BUDGET:
            return found, (then, others.then)
    return found, None


class _Others:
    """The answers of the second file, read as far as somebody has asked for one; verdicts are kept, texts are not."""

    def __init__(self, path: Path, start: int):
        check([path], (0, start))
        self._known: dict[Key, tuple[int, str]] = {}
        self._lines = _lines(path, start)
        self._end = start + 2 * BUDGET
        self.then = start
        """Behind the last answer that was found."""

    def find(self, key: Key) -> tuple[int, str] | None:
        while key not in self._known and self._end > 0:
            offset, then, row = next(self._lines, (0, 0, {}))
            if not row or offset > self._end:
                self._end = 0
                return None
            self._known[_key(row)] = offset, str(row.get("verdict"))
            self.then = then if _key(row) == key else self.then
        return self._known.get(key)


def _lines(path: Path, start: int) -> Iterator[tuple[int, int, Mapping[str, Any]]]:
    """(begin, end, row) of the episodes from a byte on."""
    with path.open("rb") as handle:
        handle.seek(start)
        offset = start
        while line := handle.readline(LONGEST):
            here, offset = offset, handle.tell()
            row = parsed(line)
            if row is not None:
                yield here, offset, row


def _key(row: Mapping[str, Any]) -> Key:
    return row.get("set"), row.get("task"), row.get("play")


def verdicts(pair: Pair) -> str:
    """Both verdicts as badges."""
    return " ".join(f'<span class="badge {text(v)}">{text(v)}</span>' for v in pair.verdicts)
