"""Named test sets and groups of them, for `cothink evaluate --suite` and the `suite:` of an evaluate stage."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from cothink.resolve import Problem, RecipeError, bind, resolve, unknown

if TYPE_CHECKING:
    from cothink.recipe import Recipe
    from cothink.types import Task

Name = str | Sequence[str]


class Set(NamedTuple):
    """A loader's name and its options."""

    loader: str
    options: Mapping[str, Any]


def _overall(subset: str) -> Set:
    return Set("math", {"split": "overall", "subset": subset})


SETS: Mapping[str, Set] = {
    # Where a set lies in two files, the undamaged one: MATH500 and GSM8K have files of their own.
    "gsm8k": Set("gsm8k", {"split": "test"}),
    "math500": Set("math", {"split": "test"}),
    "aime24": _overall("aime24"),
    "aime25": _overall("aime25"),
    "amc23": _overall("amc23"),
    "gaokao2023en": _overall("gaokao2023en"),
    "minerva": _overall("minerva_math"),
    "olympiad": _overall("olympiadbench"),
    "csqa": Set("csqa", {"split": "test"}),
    "judgebench": Set("judgebench", {}),
    "wordsums": Set("wordsums", {"split": "test"}),
}
GROUPS: Mapping[str, Sequence[str]] = {
    "math": ("math500", "gsm8k", "aime24", "aime25", "amc23", "gaokao2023en", "minerva", "olympiad"),
    # The seven sets of arXiv 2503.09501: tables 1a and 3 (single turn), figures 5 and 8 (multi turn).
    "rema": ("math500", "gsm8k", "aime24", "amc23", "gaokao2023en", "minerva", "olympiad"),
    "rema-multi": ("math500", "aime24", "aime25", "amc23", "gaokao2023en", "gsm8k", "minerva"),
    "malt": ("gsm8k", "csqa", "math500"),
}
PATTERNS = ("wordsums:LEVEL", "wordsums:LOW-HIGH", "gym:GENERATOR", "a .jsonl, .json, .csv or .parquet file")
"""What a suite may be besides the names above."""

_ENDINGS = (".jsonl", ".json", ".ndjson", ".csv", ".parquet")
_LEVELS = re.compile(r"([0-9]+)(?:-([0-9]+))?")


def sets(suite: Name, where: str = "suite") -> dict[str, Set]:
    """Set name -> what it stands for; raises RecipeError for a name that stands for nothing."""
    names = (suite,) if isinstance(suite, str) else suite
    found = {part: _set(part, where) for name in names for part in GROUPS.get(name, (name,))}
    if not found:
        raise RecipeError(Problem(where, "names no set", f"one of: {', '.join((*SETS, *GROUPS))}", code="E01"))
    return found


def load(suite: Name) -> dict[str, Sequence[Task]]:
    """Set name -> its tasks."""
    return {name: tasks(name, found) for name, found in sets(suite).items()}


def tasks(name: str, found: Set) -> Sequence[Task]:
    """The tasks of one set."""
    return bind(resolve("tasks", found.loader), found.options, f"suite {name}")()


def _set(name: str, where: str) -> Set:
    if name in SETS:
        return SETS[name]
    kind, _, rest = name.partition(":")
    levels = _LEVELS.fullmatch(rest)
    if kind == "wordsums" and levels:
        return Set("wordsums", {"split": "test", "levels": [int(levels[1]), int(levels[2] or levels[1])]})
    if kind == "gym" and rest:
        return Set("gym", {"split": "test", "generator": rest})
    if Path(name).suffix.lower() in _ENDINGS:
        return Set("files", {"split": "test", "path": name})
    problem = unknown(where, "suite", name, (*SETS, *GROUPS))
    fix = f"{problem.write}; or {', '.join(PATTERNS)}"
    raise RecipeError(Problem(where, problem.what, fix, problem.nearest, "E01"))


def problems(suite: Name, where: str) -> list[Problem]:
    """What is wrong with a stage's suite."""
    try:
        for name, found in sets(suite, where).items():
            bind(resolve("tasks", found.loader), found.options, f"{where} {name}")
    except RecipeError as error:
        return list(error.problems)
    return []


def idle(recipe: Recipe) -> Iterator[tuple[tuple[str | int, ...], str]]:
    """`on` beside a suite: (place, reason)."""
    for k, stage in enumerate(recipe.stages):
        if stage.kind == "evaluate" and stage.suite is not None:
            yield ("stages", k, "on"), "the stage plays a suite"
