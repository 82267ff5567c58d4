"""Figures of an evaluation, from its rows: accuracy, pass@k, maj@k with intervals, by set and level, and the cost.

Intervals are 95 %: Wilson where every question counts 0 or 1 (or all the same), else the bootstrap over questions. The
vote of maj@k: equal answers are one answer, plays that state none do not vote, a tie goes to the answer given first.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from cothink import stats
from cothink.stages.answers import FAILED, Row
from cothink.stages.judging import swap_consistency

Figure = list[float]
"""Value, low, high."""


class Questions:
    """The rows of one system, by question and in order; a question's key is its task id, behind its set if several."""

    def __init__(self, rows: Iterable[Row]):
        rows = list(rows)
        several = len({row["set"] for row in rows}) > 1
        self.plays: dict[str, list[Row]] = defaultdict(list)
        for row in rows:
            self.plays[f"{row['set']}/{row['task']}" if several else row["task"]].append(row)
        self.sets: dict[str, list[str]] = defaultdict(list)
        self.levels: dict[str, list[str]] = defaultdict(list)
        for key, plays in self.plays.items():
            self.sets[plays[0]["set"]].append(key)
            if plays[0]["level"] is not None:
                self.levels[str(plays[0]["level"])].append(key)
        self.k = min(map(len, self.plays.values()), default=0)
        """Plays of the question that has fewest."""

    def mean(self) -> dict[str, float]:
        """pass@1 of every question: the mean over its plays."""
        return {key: sum(map(_right, plays)) / len(plays) for key, plays in self.plays.items()}

    def first(self) -> dict[str, float]:
        """Whether the first play of every question is right."""
        return {key: float(_right(plays[0])) for key, plays in self.plays.items()}

    def passed(self, k: int) -> dict[str, float]:
        """Unbiased pass@k of every question."""
        return {key: stats.pass_at_k(len(p), sum(map(_right, p)), k) for key, p in self.plays.items()}

    def voted(self, k: int) -> dict[str, float]:
        """maj@k of every question, the mean over its disjoint runs of k plays."""
        return {key: _voted(plays, k) for key, plays in self.plays.items()}


def _right(row: Row) -> bool:
    return row["accuracy"] == 1.0


def _voted(plays: Sequence[Row], k: int) -> float:
    return stats.majority_at_k([row["vote"] for row in plays], [_right(row) for row in plays], k)


def summarise(rows: Iterable[Row]) -> dict[str, Any]:
    """All figures of one system; `per_task` maps a question to its pass@1, which is what paired comparisons need."""
    rows = list(rows)
    questions = Questions(rows)
    mean = questions.mean()
    accuracy, low, high = figure([*mean.values()])
    sizes, swap = _powers(questions.k), swap_consistency(rows)
    by_set = {name: _part(mean, keys) for name, keys in questions.sets.items()}
    by_level = {name: _part(mean, keys) for name, keys in sorted(questions.levels.items(), key=_by_number)}
    return {
        "accuracy": accuracy,
        "low": low,
        "high": high,
        "n": len(mean),
        "k": questions.k,
        "episodes": len(rows),
        "first": figure([*questions.first().values()]),
        "pass_at": {str(k): figure([*questions.passed(k).values()]) for k in sizes},
        "maj_at": {str(k): figure([*questions.voted(k).values()]) for k in sizes},
        "macro": macro([[mean[key] for key in keys] for keys in questions.sets.values()]),
        "sets": by_set,
        "by_level": by_level,
        "levels": {name: part["accuracy"] for name, part in by_level.items()},
        **_cost(rows),
        **({} if swap is None else {"swap": swap}),
        "per_task": mean,
    }


def figure(values: Sequence[float]) -> Figure:
    """Mean with its interval."""
    if not values:
        return [0.0, 0.0, 1.0]
    # Where all questions count the same there is nothing to draw anew, and an interval of no width would be a lie.
    if set(values) <= {0.0, 1.0} or len(set(values)) == 1:
        total = sum(values)
        return [total / len(values), *stats.wilson(total, len(values))]
    return [*stats.bootstrap_mean(values)]


def macro(groups: Sequence[Sequence[float]]) -> Figure:
    """Mean of the sets' means with its interval; one set alone is a plain mean."""
    filled = [group for group in groups if len(group)]
    every = [value for group in filled for value in group]
    if len(filled) < 2:
        return figure(every)
    if len(set(every)) > 1:
        return [*stats.bootstrap_macro(filled)]
    # As in `figure`; the mean of S means varies like a proportion of S^2 / sum(1/n) questions.
    size = len(filled) ** 2 / sum(1 / len(group) for group in filled)
    return [every[0], *stats.wilson(every[0] * size, size)]


def _part(mean: Mapping[str, float], keys: Sequence[str]) -> dict[str, Any]:
    value, low, high = figure([mean[key] for key in keys])
    return {"accuracy": value, "low": low, "high": high, "n": len(keys)}


def _by_number(item: tuple[str, Any]) -> tuple[float, str]:
    name = item[0]
    return (float(name), name) if name.isdigit() else (float("inf"), name)


def _powers(k: int) -> list[int]:
    """1, 2, 4, ... and k itself."""
    return sorted({k, *(2**j for j in range(k.bit_length()) if 2**j <= k)} - {0})


def _cost(rows: Sequence[Row]) -> dict[str, Any]:
    """Tokens, calls, rounds, and shares of finish reasons and verdicts; placeholders cost nothing and count nowhere."""
    n = max(len(rows), 1)
    turns = [turn for row in rows for turn in row["turns"] if turn["tokens"]]
    roles = dict.fromkeys(turn["role"] for turn in turns)
    return {
        "tokens": sum(turn["tokens"] for turn in turns),
        "prompt_tokens": sum(turn["prompt_tokens"] for turn in turns),
        "distinct_prompt_tokens": _distinct(rows),
        "calls": len(turns),
        "rounds": sum(1 + max((turn["round"] for turn in row["turns"]), default=-1) for row in rows) / n,
        "finish": _shares(row["finish"] for row in rows),
        "verdicts": _shares(str(row["verdict"]) for row in rows),
        "roles": {role: _role([t for t in turns if t["role"] == role]) for role in roles},
    }


def _distinct(rows: Sequence[Row]) -> int:
    """Prompt tokens when plays that ask the same thing share it: equal roles after equal texts have one prompt."""
    found: dict[tuple[object, ...], int] = {}
    for row in rows:
        ways: dict[str, tuple[object, ...]] = {}
        for turn in row["turns"]:
            before = tuple(ways[parent] for parent in turn["parents"])
            if turn["tokens"]:
                found[row["set"], row["task"], turn["role"], turn["round"], before] = turn["prompt_tokens"]
            ways[turn["id"]] = (*before, turn["role"], turn["text"])
    return sum(found.values())


def _shares(values: Iterable[str]) -> dict[str, float]:
    counts = Counter(values)
    return {name: count / counts.total() for name, count in sorted(counts.items())}


def _role(turns: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """A role's turns and tokens, and the shares that were cut at the limit and that showed the others nothing."""
    n = len(turns)
    return {
        "turns": n,
        "tokens": sum(turn["tokens"] for turn in turns),
        "prompt_tokens": sum(turn["prompt_tokens"] for turn in turns),
        "cut": sum(turn["finish_reason"] == "length" for turn in turns) / n,
        "void": sum(not turn.get("shown", turn["text"]).strip() for turn in turns) / n,
    }


def not_graded(values: Mapping[str, Any]) -> dict[str, float]:
    """Shares of plays that are neither right nor wrong, each apart."""
    return {word: values["verdicts"].get(word, 0.0) for word in ("unparsable", "error", FAILED)}
