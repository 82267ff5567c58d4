"""Endless training chats for the built-in model: for every role a good way to act, then mixed with worse ways.

The mixture is the point. A model that has only seen good behaviour leaves reinforcement learning nothing to select;
here every bad habit (no plan, a vague plan, a skipped step, a used distractor, a guess) is one more mode to lose.
The skills themselves are learnt first and much faster from `CLEAN` chats alone; `MIXED` chats then add the habits.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from cothink.builtin.prompts import FINISH, INSTRUCT, PROMPTS, REFINE, VERIFY
from cothink.tasks.wordsums import TOP, apply, draw
from cothink.types import Message, Task

Chat = list[Message]

LEVELS = (1, 2, 3, 4, 5, 6, 7, 8)
LEVEL_WEIGHTS = (1, 2, 3, 3, 3, 1.5, 1, 1)
PLAIN_WEIGHTS = (0.3, 0.5, 1, 2, 2, 2, 2, 2)
"""Long stories without distractors teach order best: more answer under each question."""
FULL, EMPTY, VAGUE, WRONG, LEAK = "full", "empty", "vague", "wrong", "leak"
PACED, AT_ONCE, EARLY, LATE = "paced", "at_once", "early", "late"
DRILLS = 0.12
"""Share of drills: sums and copying without a story to read."""


@dataclass(frozen=True, slots=True)
class Habits:
    """How often each way of acting is shown; shares are relative weights, `*_care` the share of careful solutions."""

    plans: Mapping[str, float]
    both: Mapping[str, float]  # plan_solve's own plans
    rounds: Mapping[str, float]  # multi-turn dialogues
    alone_care: float  # solo and generator
    unplanned_care: float  # after an empty or vague plan
    planned_care: float  # share of plans with steps that are followed to the letter
    trust: float  # verifier: says "right" without a look
    recheck: float  # verifier: recomputes carefully
    copy: float  # refiner: copies the verifier's sums
    keep: float  # refiner: repeats the first answer
    refine_care: float  # refiner on its own


CLEAN = Habits(
    plans={FULL: 1},
    both={FULL: 1},
    rounds={PACED: 0.7, AT_ONCE: 0.3},
    alone_care=1,
    unplanned_care=1,
    planned_care=1,
    trust=0,
    recheck=1,
    copy=0.4,
    keep=0,
    refine_care=1,
)
MIXED = Habits(
    plans={FULL: 0.38, EMPTY: 0.33, VAGUE: 0.20, WRONG: 0.04, LEAK: 0.05},
    both={FULL: 0.38, EMPTY: 0.33, VAGUE: 0.20, WRONG: 0.09},
    rounds={PACED: 0.34, AT_ONCE: 0.12, EARLY: 0.20, LATE: 0.10, VAGUE: 0.18, WRONG: 0.06},
    alone_care=0.42,
    unplanned_care=0.22,
    planned_care=0.97,
    trust=0.35,
    recheck=0.40,
    copy=0.45,
    keep=0.20,
    refine_care=0.6,
)


def careful(task: Task) -> list[str]:
    """Return the gold plan."""
    return list(task.meta["steps"])


def sloppy(rng: random.Random, task: Task) -> list[str]:
    """Return a plan that nearly always has a fault: a step skipped or turned round, a distractor used, no end."""
    steps = careful(task)
    noise = [(int(place), str(step)) for place, step in task.meta["noise"]]
    kind = rng.choices(("skip", "distract", "early", "flip"), (4, 4 if noise else 0, 2, 1))[0]
    if kind == "distract":
        place, step = rng.choice(noise)
        if step.startswith("start") and rng.random() < 0.5:
            steps[0] = step
        else:
            steps.insert(max(1, place), step.replace("start", "add"))
    elif kind == "early":
        steps = steps[: rng.randint(1, len(steps) - 1)]
    elif kind == "flip":
        at = rng.randrange(1, len(steps))
        turned = {"add": "take", "take": "add", "double": "double"}
        verb, _, number = steps[at].partition(" ")
        steps[at] = f"{turned[verb]} {number}".strip()
    if kind == "skip" or (kind == "distract" and rng.random() < 0.3):
        gone = rng.randrange(1, len(steps))
        steps = [step for at, step in enumerate(steps) if at == 0 or (at != gone and rng.random() < 0.75)]
    return steps


def work(steps: Sequence[str], value: int | None = None) -> tuple[str, int]:
    """Write the arithmetic of some steps, going on from `value`; a step that would leave 0..99 is passed over."""
    lines = []
    total = 0 if value is None else value
    for step in steps:
        after = apply(total, step)
        if not 0 <= after <= TOP:
            continue
        if not step.startswith("start"):
            sign, by = ("-", total - after) if step.startswith("take") else ("+", after - total)
            lines.append(f"{total} {sign} {by} = {after}.")
        total = after
    return " ".join(lines) or f"{total}.", total


def solution(rng: random.Random, task: Task, care: float) -> tuple[str, int]:
    """Solve a task without a plan, carefully with probability `care`; else with faults or by a plain guess."""
    if rng.random() < care:
        text, total = work(careful(task))
    elif rng.random() < 0.12:
        guess = rng.randint(1, 50)
        return f"\\boxed{{{guess}}}", guess
    else:
        text, total = work(sloppy(rng, task))
    return f"{text} \\boxed{{{total}}}", total


def plan(rng: random.Random, task: Task, modes: Mapping[str, float]) -> tuple[str, str, list[str]]:
    """Write a plan: its mode, its text and the steps that it names (none when it names none)."""
    mode = rng.choices(list(modes), list(modes.values()))[0]
    steps = careful(task)
    if mode == FULL:
        return mode, ", ".join(steps), steps
    if mode == WRONG:
        steps = sloppy(rng, task)
        return mode, ", ".join(steps), steps
    if mode == EMPTY:
        return mode, "Solve it." if rng.random() < 0.65 else "", []
    if mode == VAGUE:
        name = re.search(r"(?:does|with) ([A-Z][a-z]+)", task.question)
        verbs = " and ".join(dict.fromkeys(step.split()[0] for step in steps[1:]))
        return mode, rng.choice((verbs, f"find what {name[1] if name else 'Tom'} has")), []
    box = f"\\boxed{{{rng.randint(1, 50)}}}"
    if rng.random() < 0.5:
        return mode, box, []
    return mode, f"{', '.join(steps)}. {box}", steps


def follow(rng: random.Random, task: Task, habits: Habits) -> tuple[str, str]:
    """Write a plan and the answer to it: done as told where it names steps, on one's own and mostly badly where not."""
    mode, written, steps = plan(rng, task, habits.plans)
    if steps and rng.random() < habits.planned_care:
        text, total = work(steps)
        return written, f"{text} \\boxed{{{total}}}"
    if mode == LEAK and rng.random() < 0.8:
        return written, written[written.index("\\boxed") :]
    return written, solution(rng, task, habits.unplanned_care)[0]


def _chat(role: str, *texts: str) -> Chat:
    speakers = ("user", "assistant")
    turns = [Message(speakers[at % 2], text) for at, text in enumerate(texts)]
    return [Message("system", PROMPTS[role]), *turns]


def _solo(rng: random.Random, task: Task, habits: Habits) -> Chat:
    return _chat("solo", task.question, solution(rng, task, habits.alone_care)[0])


def _plan_solve(rng: random.Random, task: Task, habits: Habits) -> Chat:
    _, written, steps = plan(rng, task, habits.both)
    if steps and rng.random() < habits.planned_care:
        text, total = work(steps)
        return _chat("plan_solve", task.question, f"{written}\n{text} \\boxed{{{total}}}")
    text = solution(rng, task, habits.unplanned_care)[0]
    return _chat("plan_solve", task.question, f"{written or 'Solve it.'}\n{text}")


def _meta(rng: random.Random, task: Task, habits: Habits) -> Chat:
    return _chat("meta", task.question, plan(rng, task, habits.plans)[1])


def _reasoning(rng: random.Random, task: Task, habits: Habits) -> Chat:
    written, answer = follow(rng, task, habits)
    return _chat("reasoning", INSTRUCT.format(question=task.question, plan=written), answer)


def drill(rng: random.Random) -> Chat:
    """A long plan under a short question that it does not fit: copy the numbers, do the sums, trust the plan."""
    asked = draw(rng, rng.randint(1, 2), 0)
    steps = careful(draw(rng, rng.randint(4, 8), 0))
    text, total = work(steps)
    user = INSTRUCT.format(question=asked.question, plan=", ".join(steps))
    return _chat("reasoning", user, f"{text} \\boxed{{{total}}}")


def _rounds(rng: random.Random, task: Task, habits: Habits) -> list[tuple[str, str]]:
    """Play one multi-turn dialogue: (meta's text, reasoning's text) for each round."""
    mode = rng.choices(list(habits.rounds), list(habits.rounds.values()))[0]
    if mode == VAGUE:
        asks = rng.choice((["Solve it."], ["go on", "Solve it."], ["find it", "go on", "Solve it."]))
        ends = [f"{ask} {FINISH}" if at == len(asks) - 1 else ask for at, ask in enumerate(asks)]
        boxed = solution(rng, task, habits.unplanned_care)[0]
        partial = boxed[: boxed.index("\\boxed")].rstrip() or "0."
        return [(ask, boxed if FINISH in ask else partial) for ask in ends]
    steps = sloppy(rng, task) if mode == WRONG else careful(task)
    parts: list[list[str]] = []
    while steps:
        size = len(steps) if mode == AT_ONCE else rng.randint(1, 2) + (not parts)
        parts.append(steps[:size])
        steps = steps[size:]
    if mode == EARLY and len(parts) > 1:
        parts = parts[: rng.randint(1, len(parts) - 1)]
    asks = [", ".join(part) for part in parts]
    if mode == LATE:
        extra = rng.randint(1, 3)
        asks += ["go on"] * (extra - 1) + ["box it"]
        parts += [[] for _ in range(extra)]
    rounds, value = [], None
    for at, (ask, part) in enumerate(zip(asks, parts)):
        text, value = work(part, value)
        last = at == len(parts) - 1
        boxed = f"{text} \\boxed{{{value}}}" if part else f"\\boxed{{{value}}}"
        rounds.append((f"{ask} {FINISH}" if last else ask, boxed if last else text))
    return rounds


def _meta_multi(rng: random.Random, task: Task, habits: Habits) -> Chat:
    texts = [text for pair in _rounds(rng, task, habits) for text in pair]
    return _chat("meta_multi", task.question, *texts[:-1])


def _reasoning_multi(rng: random.Random, task: Task, habits: Habits) -> Chat:
    texts = [text for pair in _rounds(rng, task, habits) for text in pair]
    texts[0] = INSTRUCT.format(question=task.question, plan=texts[0])
    return _chat("reasoning_multi", *texts)


def _generated(rng: random.Random, task: Task, care: float) -> tuple[str, int]:
    text, total = solution(rng, task, care)
    return f"{text}\nFinal Answer: {total}", total


def _generator(rng: random.Random, task: Task, habits: Habits) -> Chat:
    return _chat("generator", task.question, _generated(rng, task, habits.alone_care)[0])


def _verified(rng: random.Random, task: Task, claimed: int, habits: Habits) -> str:
    pick = rng.random()
    if pick < habits.trust:
        return f"right.\nFinal Answer: {claimed}"
    text, total = work(careful(task) if pick < habits.trust + habits.recheck else sloppy(rng, task))
    return f"{text} {'right' if total == claimed else 'wrong'}.\nFinal Answer: {total}"


def _verifier(rng: random.Random, task: Task, habits: Habits) -> Chat:
    answer, claimed = _generated(rng, task, MIXED.alone_care)
    user = VERIFY.format(question=task.question, answer=answer)
    return _chat("verifier", user, _verified(rng, task, claimed, habits))


def _refiner(rng: random.Random, task: Task, habits: Habits) -> Chat:
    answer, claimed = _generated(rng, task, MIXED.alone_care)
    verification = _verified(rng, task, claimed, habits)
    user = REFINE.format(question=task.question, answer=answer, verification=verification)
    pick = rng.random()
    sums = re.match(r"(.*\.) (?:right|wrong)\.", verification)
    if pick < habits.copy and sums:
        total = verification.rsplit(" ", 1)[1]
        refined = f"{sums[1]} \\boxed{{{total}}}\nFinal Answer: {total}"
    elif pick > 1 - habits.keep:
        refined = answer
    else:
        refined = _generated(rng, task, habits.refine_care)[0]
    return _chat("refiner", user, refined)


Maker = Callable[[random.Random, Task, Habits], Chat]
MAKERS: dict[Maker, float] = {
    _solo: 0.16,
    _plan_solve: 0.09,
    _meta: 0.18,
    _reasoning: 0.20,
    _meta_multi: 0.10,
    _reasoning_multi: 0.10,
    _generator: 0.05,
    _verifier: 0.06,
    _refiner: 0.06,
}


def chats(rng: random.Random, habits: Habits = MIXED, plain: bool = False) -> Iterator[Chat]:
    """Yield training chats for ever, of the training side of `wordsums` only; `plain` leaves distractors out."""
    makers, weights = list(MAKERS), list(MAKERS.values())
    while True:
        if rng.random() < DRILLS:
            yield drill(rng)
            continue
        level = rng.choices(LEVELS, PLAIN_WEIGHTS if plain else LEVEL_WEIGHTS)[0]
        task = draw(rng, level, 0 if plain else rng.randint(0, 2))
        yield rng.choices(makers, weights)[0](rng, task, habits)
