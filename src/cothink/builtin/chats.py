"""Endless training chats for the built-in model: for every role a good way to act, mixed with worse ways.

The mixture is the point. A model that has only seen good behaviour leaves reinforcement learning nothing to select;
here every bad habit (no plan, a vague plan, a skipped step, a used distractor, a guess) is one more mode to lose.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Iterator, Sequence

from cothink.builtin.prompts import FINISH, INSTRUCT, PROMPTS, REFINE, VERIFY
from cothink.tasks.wordsums import TOP, apply, draw
from cothink.types import Message, Task

Chat = list[Message]

LEVELS = (1, 2, 3, 4, 5, 6, 7, 8)
LEVEL_WEIGHTS = (1, 2, 3, 3, 3, 1.5, 1, 1)
FULL, EMPTY, VAGUE, WRONG, LEAK = "full", "empty", "vague", "wrong", "leak"
PLAN_MODES = {FULL: 0.36, EMPTY: 0.33, VAGUE: 0.20, WRONG: 0.06, LEAK: 0.05}
CAREFUL = {"solo": 0.42, "plan_solve": 0.90, "unplanned": 0.20, "planned": 0.97, "generator": 0.42}
"""Share of careful solutions: alone, after one's own full plan, without or with a full plan to follow, as generator."""


def careful(task: Task) -> list[str]:
    """Return the gold plan."""
    return list(task.meta["steps"])


def sloppy(rng: random.Random, task: Task) -> list[str]:
    """Return a plan with at least one fault: a step skipped or turned round, a distractor used, the end left out."""
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


def plan(rng: random.Random, task: Task, modes: dict[str, float] | None = None) -> tuple[str, str, list[str]]:
    """Write a plan: its mode, its text and the steps that it names (none when it names none)."""
    modes = modes or PLAN_MODES
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


def follow(rng: random.Random, task: Task, written: str, mode: str, steps: list[str]) -> str:
    """Answer a plan: nearly always by doing it, where it names steps; on one's own and mostly badly, where not."""
    if steps and rng.random() < CAREFUL["planned"]:
        text, total = work(steps)
        return f"{text} \\boxed{{{total}}}"
    if mode == LEAK and rng.random() < 0.8:
        return written[written.index("\\boxed") :]
    return solution(rng, task, CAREFUL["unplanned"])[0]


def _chat(role: str, *texts: str) -> Chat:
    speakers = ("user", "assistant")
    turns = [Message(speakers[at % 2], text) for at, text in enumerate(texts)]
    return [Message("system", PROMPTS[role]), *turns]


def _solo(rng: random.Random, task: Task) -> Chat:
    return _chat("solo", task.question, solution(rng, task, CAREFUL["solo"])[0])


def _plan_solve(rng: random.Random, task: Task) -> Chat:
    mode, written, steps = plan(rng, task, {FULL: 0.36, EMPTY: 0.33, VAGUE: 0.20, WRONG: 0.11})
    if steps and rng.random() < CAREFUL["plan_solve"]:
        text, total = work(steps)
        return _chat("plan_solve", task.question, f"{written}\n{text} \\boxed{{{total}}}")
    text = solution(rng, task, CAREFUL["unplanned"])[0]
    return _chat("plan_solve", task.question, f"{written or 'Solve it.'}\n{text}")


def _meta(rng: random.Random, task: Task) -> Chat:
    return _chat("meta", task.question, plan(rng, task)[1])


def _reasoning(rng: random.Random, task: Task) -> Chat:
    mode, written, steps = plan(rng, task)
    user = INSTRUCT.format(question=task.question, plan=written)
    return _chat("reasoning", user, follow(rng, task, written, mode, steps))


def drill(rng: random.Random) -> Chat:
    """A long plan under a short question that it does not fit: copy the numbers, do the sums, trust the plan."""
    asked = draw(rng, rng.randint(1, 2), 0)
    steps = careful(draw(rng, rng.randint(4, 8), 0))
    text, total = work(steps)
    user = INSTRUCT.format(question=asked.question, plan=", ".join(steps))
    return _chat("reasoning", user, f"{text} \\boxed{{{total}}}")


def _rounds(rng: random.Random, task: Task) -> list[tuple[str, str]]:
    """Play one multi-turn dialogue: (meta's text, reasoning's text) for each round."""
    modes = {"paced": 0.34, "at_once": 0.12, "early": 0.20, "late": 0.10, "vague": 0.18, "wrong": 0.06}
    mode = rng.choices(list(modes), list(modes.values()))[0]
    if mode == "vague":
        asks = rng.choice((["Solve it."], ["go on", "Solve it."], ["find it", "go on", "Solve it."]))
        ends = [f"{ask} {FINISH}" if at == len(asks) - 1 else ask for at, ask in enumerate(asks)]
        boxed = solution(rng, task, CAREFUL["unplanned"])[0]
        partial = boxed[: boxed.index("\\boxed")].rstrip() or "0."
        return [(ask, boxed if FINISH in ask else partial) for ask in ends]
    steps = sloppy(rng, task) if mode == "wrong" else careful(task)
    parts: list[list[str]] = []
    while steps:
        size = len(steps) if mode == "at_once" else rng.randint(1, 2) + (not parts)
        parts.append(steps[:size])
        steps = steps[size:]
    if mode == "early" and len(parts) > 1:
        parts = parts[: rng.randint(1, len(parts) - 1)]
    asks = [", ".join(part) for part in parts]
    if mode == "late":
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


def _meta_multi(rng: random.Random, task: Task) -> Chat:
    rounds = _rounds(rng, task)
    texts = [text for pair in rounds for text in pair][:-1]
    return _chat("meta_multi", task.question, *texts)


def _reasoning_multi(rng: random.Random, task: Task) -> Chat:
    texts = [text for pair in _rounds(rng, task) for text in pair]
    texts[0] = INSTRUCT.format(question=task.question, plan=texts[0])
    return _chat("reasoning_multi", *texts)


def _generated(rng: random.Random, task: Task) -> tuple[str, int]:
    text, total = solution(rng, task, CAREFUL["generator"])
    return f"{text}\nFinal Answer: {total}", total


def _generator(rng: random.Random, task: Task) -> Chat:
    return _chat("generator", task.question, _generated(rng, task)[0])


def _verified(rng: random.Random, task: Task, claimed: int) -> str:
    draw_ = rng.random()
    if draw_ < 0.35:
        return f"right.\nFinal Answer: {claimed}"
    text, total = work(careful(task) if draw_ < 0.75 else sloppy(rng, task))
    return f"{text} {'right' if total == claimed else 'wrong'}.\nFinal Answer: {total}"


def _verifier(rng: random.Random, task: Task) -> Chat:
    answer, claimed = _generated(rng, task)
    user = VERIFY.format(question=task.question, answer=answer)
    return _chat("verifier", user, _verified(rng, task, claimed))


def _refiner(rng: random.Random, task: Task) -> Chat:
    answer, claimed = _generated(rng, task)
    verification = _verified(rng, task, claimed)
    user = REFINE.format(question=task.question, answer=answer, verification=verification)
    draw_ = rng.random()
    sums = re.match(r"(.*\.) (?:right|wrong)\.", verification)
    if draw_ < 0.45 and sums:
        total = verification.rsplit(" ", 1)[1]
        refined = f"{sums[1]} \\boxed{{{total}}}\nFinal Answer: {total}"
    elif draw_ < 0.65:
        refined = answer
    else:
        text, number = solution(rng, task, 0.6)
        refined = f"{text}\nFinal Answer: {number}"
    return _chat("refiner", user, refined)


Maker = Callable[[random.Random, Task], Chat]
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


def chats(rng: random.Random, drills: float = 0.1) -> Iterator[Chat]:
    """Yield training chats for ever, of the training side of `wordsums` only; `drills` is the share of drills."""
    makers, weights = list(MAKERS), list(MAKERS.values())
    while True:
        if rng.random() < drills:
            yield drill(rng)
            continue
        task = draw(rng, rng.choices(LEVELS, LEVEL_WEIGHTS)[0], rng.randint(0, 2))
        yield rng.choices(makers, weights)[0](rng, task)
