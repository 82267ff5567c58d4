"""Generated word problems: one running total, `level` changes, and sentences that do not matter."""

from __future__ import annotations

import random
import zlib
from collections.abc import Sequence
from itertools import count as count_from

from cothink.types import Task

MAX_LEVEL = 8
TOP = 99
"""No start, no total and no answer ever leaves 0..99."""
AMOUNTS = range(2, 10)
"""What one step may add or take; no two sentences of a problem do the same with the same amount."""

NAMES = ("Tom", "Ann", "Ben", "Eva", "Sam", "Mia", "Leo", "Kim", "Max", "Zoe")
THINGS = ("apples", "pears", "eggs", "pens", "books", "cards", "coins", "keys")
FOOD = ("apples", "pears", "eggs")
STARTS = ("has", "had")
GAINS = ("gets", "buys", "finds", "wins")
LOSSES = ("loses", "sells", "drops", "lends")
OPENING = "{name} counts {thing}."
QUESTIONS = ("How many {thing} does {name} have now?", "How many {thing} are left with {name}?")

_COUNTS = {"train": 2000, "test": 500}
_TEST_SHARE = 5  # one number skeleton in five belongs to the test side
_PATIENCE = 200  # draws in a row that bring nothing new before we say that the space is used up


def load(
    split: str = "train",
    *,
    levels: int | Sequence[int] = (1, MAX_LEVEL),
    count: int | None = None,
    seed: int = 0,
    distractors: int | Sequence[int] = (0, 2),
) -> list[Task]:
    """Return `count` different problems of one split, the same ones for the same options.

    `levels` (arithmetic steps) and `distractors` (sentences that do not matter) are one number or an inclusive
    range `[low, high]`, drawn uniformly. `count` is 2000 for `train` and 500 for `test` unless given. The number
    skeleton of a problem (its start and its steps) decides its split, so no test skeleton is ever trained on.
    Raises ValueError on an option that cannot be met.
    """
    if split not in _COUNTS:
        raise ValueError(f"wordsums: unknown split {split!r}; write 'train' or 'test'")
    low, high = _span("levels", levels, 1, MAX_LEVEL)
    few, many = _span("distractors", distractors, 0, 4)
    wanted = _COUNTS[split] if count is None else count
    if isinstance(wanted, bool) or not isinstance(wanted, int) or wanted < 1:
        raise ValueError(f"wordsums: count must be a whole number of at least 1, got {count!r}")
    rng = random.Random(f"wordsums/{split}/{low}-{high}/{few}-{many}/{seed}")
    found: dict[str, Task] = {}
    idle = 0
    while len(found) < wanted:
        task = draw(rng, rng.randint(low, high), rng.randint(few, many), split=split)
        idle = idle + 1 if task.question in found else 0
        if idle > _PATIENCE:
            raise ValueError(
                f"wordsums: only {len(found)} different problems found for levels {low}-{high}; lower count ({wanted})"
            )
        found.setdefault(task.question, task)
    return [
        Task(f"wordsums/{split}/{seed}/{i}", t.question, t.answer, t.meta)
        for i, t in zip(count_from(), found.values(), strict=False)
    ]


def draw(rng: random.Random, level: int, distractors: int, *, split: str = "train") -> Task:
    """Draw one problem of one side; `meta["steps"]` is the gold plan and `meta["noise"]` what must not be used.

    A step reads `start 5`, `add 3`, `take 2` or `double`; a noise entry is `[place, step]`, where `place` counts the
    steps told before it.
    """
    while True:
        steps, answer = _skeleton(rng, level)
        if side(steps) == split:
            break
    name, other = rng.sample(NAMES, 2)
    thing, else_ = rng.sample(THINGS, 2)
    told = [_sentence(rng, name, thing, step) for step in steps]
    noise: list[tuple[int, str]] = []
    lines: list[tuple[int, str]] = [(place + 1, line) for place, line in enumerate(told)]
    unused = [f"{verb} {n}" for verb in ("start", "add", "take") for n in AMOUNTS]
    for step in rng.sample([step for step in unused if step not in steps], distractors):
        place = rng.randint(0, level + 1)
        who, what = (other, thing) if rng.random() < 0.5 else (name, else_)
        noise.append((place, step))
        lines.append((place, _sentence(rng, who, what, step)))
    lines.sort(key=lambda pair: pair[0])  # stable: a distractor at place p follows the p-th step
    noise.sort(key=lambda pair: pair[0])
    question = rng.choice(QUESTIONS).format(thing=thing, name=name)
    text = " ".join([OPENING.format(thing=thing, name=name), *(line for _, line in lines), question])
    meta = {"level": level, "steps": steps, "noise": [list(pair) for pair in noise]}
    return Task("wordsums", text, str(answer), meta)


def side(steps: Sequence[str]) -> str:
    """Say which split a number skeleton belongs to: a stable hash of its steps, whatever the names and things."""
    return "test" if zlib.crc32(", ".join(steps).encode()) % _TEST_SHARE == 0 else "train"


def apply(value: int, step: str) -> int:
    """Apply one step (`start 5`, `add 3`, `take 2`, `double`) to a running total."""
    verb, _, number = step.partition(" ")
    if verb == "double":
        return 2 * value
    if verb == "start":
        return int(number)
    return value + int(number) if verb == "add" else value - int(number)


def _skeleton(rng: random.Random, level: int) -> tuple[list[str], int]:
    value = rng.randint(2, 30)
    steps = [f"start {value}"]
    unused = [f"{verb} {n}" for verb in ("add", "take") for n in AMOUNTS] + ["double"]
    for _ in range(level):
        fits = [step for step in unused if 0 <= apply(value, step) <= TOP and apply(value, step) != value]
        steps.append(rng.choice(fits))
        unused.remove(steps[-1])
        value = apply(value, steps[-1])
    return steps, value


def _sentence(rng: random.Random, name: str, thing: str, step: str) -> str:
    verb, _, number = step.partition(" ")
    if verb == "double":
        return f"{name} doubles the {thing}."
    if verb == "start":
        return f"{name} {rng.choice(STARTS)} {number} {thing}."
    if verb == "add":
        return f"{name} {rng.choice(GAINS)} {number} {thing}."
    losses = (*LOSSES, "eats") if thing in FOOD else LOSSES
    return f"{name} {rng.choice(losses)} {number} {thing}."


def _span(option: str, value: int | Sequence[int], least: int, most: int) -> tuple[int, int]:
    pair = [value, value] if isinstance(value, int) else list(value) if isinstance(value, (list, tuple)) else []
    whole = len(pair) == 2 and all(isinstance(v, int) and not isinstance(v, bool) for v in pair)
    if not whole or not least <= pair[0] <= pair[1] <= most:
        raise ValueError(
            f"wordsums: {option} must be a whole number or [low, high] within {least}..{most}, got {value!r}"
        )
    return pair[0], pair[1]
