"""`malt`: a generator answers, a verifier checks, a refiner improves; one line or a tree (arXiv 2412.01928)."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Literal

from cothink.types import CONTEXT_EXCEEDED, FINISHED, TRUNCATED, CallFailed, Finish, Task, TaskTooLong, Turn
from cothink.votes import answer_of

if TYPE_CHECKING:
    from cothink.team import Team

Prompts = Literal["math", "boxed", "choice", "words"]
GENERATOR, VERIFIER, REFINER = "generator", "verifier", "refiner"
TEAM = (GENERATOR, VERIFIER, REFINER)
ALONE = {"branching": None}
"""How it is played for its answer alone: one line."""

LAYOUTS: Mapping[str, str] = {
    GENERATOR: "{question}",
    VERIFIER: "Question:\n{question}\n\nAnswer:\n{answer}",
    REFINER: "Question:\n{question}\n\nAnswer:\n{answer}\n\nVerification:\n{verification}",
}
"""What each role is told; a refiner that nobody checked for gets an empty verification."""

_STAGES = (
    "Work in five visible stages: list what is given, say what is asked, plan the way there, carry the plan out step "
    "by step, and conclude with a check of the result."
)
_REASONS = "Weigh the choices against one another, and give your reasons as a short numbered list."
_CHECK = (
    "Trust nothing in it: work every step out again on your own, point at the first error there is, and say clearly "
    "whether the answer stands."
)
_WEIGH = (
    "Trust nothing in it: test every reason given and every choice left aside, point at the first error there is, and "
    "say clearly whether the answer stands."
)
_USE = (
    "You read a question, a first answer and a verification of it, which may itself be wrong or empty. Take from both "
    "what holds, put right what does not, and write one complete and better solution that stands on its own."
)
_MARK: Mapping[str, str] = {
    "math": "End with one last line: Final Answer: followed by the answer alone.",
    "boxed": "End with one last line: Final Answer: followed by the answer alone inside \\boxed{}.",
    "choice": "End with one last line: Final Answer: followed by the letter of one choice alone.",
}
_ALSO = "Also say which answer you believe in. "
WORDS: Mapping[str, str] = {GENERATOR: "Answer.", VERIFIER: "Check.", REFINER: "Refine."}
"""The lines that the built-in model was trained on."""


def systems(prompts: Prompts = "math", verifier_states_answer: bool = True) -> dict[str, str]:
    """Role name -> system prompt of one kind of questions."""
    if prompts == "words":
        return dict(WORDS)
    choice = prompts == "choice"
    how, mark = (_REASONS if choice else _STAGES), _MARK[prompts]
    topic = "multiple-choice questions of common sense" if choice else "mathematics"
    check = f"You check answers to {topic} with a critical eye. You read a question and an answer to it. "
    check += _WEIGH if choice else _CHECK
    return {
        GENERATOR: f"You are an expert who answers {topic}. {how} {mark}",
        VERIFIER: f"{check} {_ALSO}{mark}" if verifier_states_answer else check,
        REFINER: f"You are an expert who improves answers to {topic}. {_USE} {how} {mark}",
    }


def roles(
    *,
    order: Sequence[str] = TEAM,
    prompts: Prompts = "math",
    verifier_states_answer: bool = True,
    branching: Sequence[int] | None = None,
    carry_forward: bool = False,
    **options: object,
) -> dict[str, str]:
    """Role name -> default system prompt, for the roles that speak."""
    _check(order, prompts, verifier_states_answer, branching, carry_forward)
    every = systems(prompts, verifier_states_answer)
    return {name: every[name] for name in TEAM if name in order}


def layouts(*, order: Sequence[str] = TEAM, **options: object) -> dict[str, str]:
    """Role name -> how what it is told is laid out: with the system prompt, all that a prompt is made of."""
    return {name: LAYOUTS[name] for name in TEAM if name in order}


def answerers(
    *, order: Sequence[str] = TEAM, verifier_states_answer: bool = True, **options: object
) -> tuple[str, ...]:
    """The roles whose turns state an answer."""
    return tuple(name for name in TEAM if name in order and (name != VERIFIER or verifier_states_answer))


def turns(*, order: Sequence[str] = TEAM, **options: object) -> int:
    """The most turns a role can have on one line; alternatives share a place."""
    return max(map(list(order).count, order))


def branches(*, branching: Sequence[int] | None = None, **options: object) -> bool:
    """Whether alternatives are sampled."""
    return any(width > 1 for width in branching or ())


def _check(
    order: Sequence[str], prompts: str, states: bool, branching: Sequence[int] | None, carry_forward: bool
) -> None:
    """Raises ValueError for options that contradict one another."""
    if not order or order[0] != GENERATOR or not set(order[1:]) <= {VERIFIER, REFINER}:
        what = "a generator comes first, verifiers and refiners after it"
        raise ValueError(f"malt: order {list(order)}: {what}, such as order: [generator, verifier, refiner]")
    if (VERIFIER, VERIFIER) in pairwise(order):
        raise ValueError(f"malt: order {list(order)}: a second verifier needs a new answer to check: a refiner between")
    if branching is not None and (len(branching) != len(order) or min(branching) < 1):
        raise ValueError(f"malt: branching {list(branching)}: one number of at least 1 for each of {list(order)}")
    if carry_forward and order[-1] != VERIFIER:
        raise ValueError("malt: carry_forward belongs to a team whose last role is the verifier; leave it out")
    if prompts == "words" and not states:
        raise ValueError("malt: prompts words are fixed lines, whose verifier states an answer; leave "
                         "verifier_states_answer out")  # fmt: skip


async def run(
    task: Task,
    team: Team,
    *,
    order: Sequence[str] = TEAM,
    branching: Sequence[int] | None = None,
    prompts: Prompts = "math",
    verifier_states_answer: bool = True,
    carry_forward: bool = False,
    max_context: int = 4096,
) -> Finish:
    """Each role answers the turn before it: `branching[k]` alternatives of the k-th role after each turn (None: one).

    `order` is the team: `[generator]` alone, `[generator, verifier]`, `[generator, refiner]` (an empty verification),
    or longer, such as G, V, R, V, R, where every verifier checks the last answer. The last role's text is graded; of a
    tree, the first line's. `prompts` chooses the default system prompts: math, boxed (an answer in \\boxed{}), choice,
    or words (the built-in model's). `carry_forward` grades the answer before it where the last verifier states none. A
    branch whose prompt exceeds `max_context` tokens, or whose call failed, ends there; a line then ends in an empty
    turn.
    """
    _check(order, prompts, verifier_states_answer, branching, carry_forward)
    table = _Table(task, team, tuple(order), tuple(branching or (1,) * len(order)), max_context)
    lines = await table.grow(())
    if not lines:
        return Finish(CONTEXT_EXCEEDED if table.short else TRUNCATED, "")
    first = lines[0]
    graded = first[-1]
    if carry_forward and answer_of(task, graded.text) is None:
        graded = first[-2]
    cut = CONTEXT_EXCEEDED if table.short and not branches(branching=branching) else FINISHED
    return Finish(cut, graded.text, graded.id)


class _Table:
    """One task's tree while it grows; `short` is set where a prompt left no room."""

    def __init__(self, task: Task, team: Team, order: Sequence[str], widths: Sequence[int], max_context: int):
        self.task, self.team, self.order, self.widths, self.max_context = task, team, order, widths, max_context
        self.short = False

    async def grow(self, line: tuple[Turn, ...]) -> list[tuple[Turn, ...]]:
        """All complete lines that begin with this one; branches go on as soon as they can, whatever the others do."""
        level = len(line)
        if level == len(self.order):
            return [line]
        name = self.order[level]
        after = line[-1] if line else ()
        chat, text, nth = self.team.chat(name), self._told(name, line), self.order[:level].count(name)
        if len(chat.prompt(text)) > self.max_context:
            if not line:
                what = f"the question is longer than max_context={self.max_context}"
                raise TaskTooLong(f"task {self.task.id}: {what}")
            self.short = True
            return [] if max(self.widths) > 1 else [self._empty(line)]
        try:
            siblings = await chat.sample(text, self.widths[level], after=after, round=nth)
        except CallFailed:  # a hole in the tree: whoever plays it has noted why
            if not line:
                raise
            return []
        grown = await asyncio.gather(*(self.grow((*line, turn)) for turn in siblings))
        return [done for lines in grown for done in lines]

    def _told(self, name: str, line: Sequence[Turn]) -> str:
        answer = next((turn.text for turn in reversed(line) if turn.role != VERIFIER), "")
        checked = line[-1].text if line and line[-1].role == VERIFIER else ""
        return LAYOUTS[name].format(question=self.task.question, answer=answer, verification=checked)

    def _empty(self, line: tuple[Turn, ...]) -> tuple[Turn, ...]:
        """The line, closed by an empty turn of the role whose answer is graded."""
        last = self.order[-1]
        return (*line, self.team.placeholder(last, after=line[-1], round=self.order[:-1].count(last)))
