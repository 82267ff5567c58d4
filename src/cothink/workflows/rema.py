"""`rema`: a meta-thinker plans and watches, a reasoner executes; one round or many (arXiv 2503.09501)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from cothink.actions import SCHEMA, read
from cothink.types import CONTEXT_EXCEEDED, FINISHED, MAX_TURNS, TRUNCATED, Finish, Task, TaskTooLong, Turn

if TYPE_CHECKING:
    from cothink.team import Chat, Team

SINGLE = {
    "meta": (
        "You guide a weaker problem solver. Read the question and write a high-level plan the solver can follow: what "
        "to work out, in which order, and what to watch for. Give the plan only. Never state the answer yourself: a "
        "plan that contains an answer in \\boxed{} is penalised."
    ),
    "reasoning": (
        "You are given a question and an instruction on how to solve it. Follow the instruction exactly, show every "
        "step of the work, and finish with the final answer inside \\boxed{}."
    ),
}
ACTIONS = {
    **SINGLE,
    "meta": (
        "You decide how a weaker problem solver approaches a question. Choose one action: DECOMPOSE breaks the "
        "question into smaller ones to answer in turn, REWRITE asks the same question more clearly, EMPTY lets the "
        "solver work on the question as it is. Reply with one JSON object and nothing around it, the action first: "
        '{"action": "DECOMPOSE", "output": "the smaller questions"}, {"action": "REWRITE", "output": "the wording"} '
        'or {"action": "EMPTY", "output": ""}. Never state the answer: an output with \\boxed{} is penalised.'
    ),
}
MULTI = {
    "meta": (
        "You are the thinking side of a discussion with a partner who does the detailed work. In each turn decide what "
        "the partner should do next: choose an angle, set one or more steps, reflect honestly on what came back, go "
        "back when something is wrong, or try a second way. When the work is done and you trust the result, ask for "
        "the final answer and write [FINISH] at the end of that turn."
    ),
    "reasoning": (
        "You are the working side of a discussion. Follow your partner's instruction step by step and report what you "
        "find. When you are told to finalise, give the final answer inside \\boxed{}."
    ),
}


def roles(**options: Any) -> dict[str, str]:
    """Role name -> default system prompt; roles outside the usual pair have none and need their own."""
    _check(**options)
    single = ACTIONS if options.get("actions") else SINGLE
    prompts = single if options.get("max_turns", 30) == 1 else MULTI
    return {name: prompts.get(name, "") for name in options.get("order", ("meta", "reasoning"))}


def turns(*, max_turns: int = 30, **options: object) -> int:
    """The most turns a role can have in one episode; answers to the same plan share one place."""
    return max_turns


def branches(*, n_solutions: int = 1, **options: object) -> bool:
    """Whether the last role answers a plan more than once."""
    return n_solutions > 1


ALONE = {"n_solutions": 1}
"""What an evaluation plays instead: only the first answer to a plan is graded."""


def _check(
    *,
    max_turns: int = 30,
    order: Sequence[str] = ("meta", "reasoning"),
    finisher: str | None = None,
    n_solutions: int = 1,
    actions: bool = False,
    constrain: bool = False,
    **options: object,
) -> None:
    """Raises ValueError for options that contradict one another."""
    if len(order) < 2 or (finisher or order[0]) not in order or max_turns < 1 or n_solutions < 1:
        given = f"order={list(order)}, finisher={finisher!r}, max_turns={max_turns}, n_solutions={n_solutions}"
        raise ValueError(f"rema: {given}: need at least two roles, a finisher among them, one round and one solution")
    single = [name for name, given in (("n_solutions", n_solutions > 1), ("actions", actions)) if given]
    if single and max_turns > 1:
        raise ValueError(f"rema: {single[0]} belongs to the single-turn form; write max_turns: 1, or leave it out")
    if constrain and not actions:
        raise ValueError("rema: constrain holds the planner to a JSON action; write actions: true, or leave it out")


async def run(
    task: Task,
    team: Team,
    *,
    max_turns: int = 30,
    max_context: int = 4096,
    finish_tag: str | None = "[FINISH]",
    stop_on_truncation: bool = True,
    order: Sequence[str] = ("meta", "reasoning"),
    finisher: str | None = None,
    n_solutions: int = 1,
    actions: bool = False,
    constrain: bool = False,
) -> Finish:
    """Roles speak in `order`, round after round, until the finisher's text holds the finish tag.

    The finisher (default: the first in order) decides; the last in order always speaks once more, and its text is
    graded. `max_turns` counts rounds; 1 is the single-turn form, where the tag means nothing. `max_context` is the
    longest prompt, in tokens, a role may have before it speaks. `stop_on_truncation` closes the episode when a turn
    hits its token limit, even one that has just been finished.

    Single-turn only: `n_solutions` answers of the last role to the same plan, siblings of which the first is graded
    (one is sampled at temperature 0, where all would be equal). `actions`: the first role writes a JSON action
    (`cothink.actions`); the others read its output, or the question alone after EMPTY and after what is not a valid
    action, cut ones included. `constrain` lets it write nothing but valid actions.
    """
    _check(max_turns=max_turns, order=order, finisher=finisher, n_solutions=n_solutions, actions=actions,
           constrain=constrain)  # fmt: skip
    table = _Table(task, team, order, finisher or order[0], None if max_turns == 1 else finish_tag)
    if actions:
        table.planner, table.schema = order[0], SCHEMA if constrain else None
    if team.roles[order[-1]].sampling.temperature > 0:
        table.n_solutions = n_solutions
    return await table.discuss(max_turns, max_context, stop_on_truncation)


class _Table:
    """The state of one discussion: who has heard what, and the last turn of the answering role."""

    def __init__(self, task: Task, team: Team, order: Sequence[str], finisher: str, tag: str | None):
        self.task, self.team, self.order, self.finisher, self.tag = task, team, order, finisher, tag
        self.chats: dict[str, Chat] = {name: team.chat(name) for name in order}
        self.unheard: dict[str, list[str]] = {name: [] for name in order}
        self.started: set[str] = set()
        self.answer: Turn | None = None
        self.last: Turn | None = None
        self.planner: str | None = None  # who writes JSON actions
        self.schema: str | None = None
        self.n_solutions = 1

    async def discuss(self, max_turns: int, max_context: int, stop_on_truncation: bool) -> Finish:
        answerer = self.order[-1]
        for round in range(max_turns):
            finishing = False
            for name in self.order:
                text = self._incoming(name)
                if len(self.chats[name].prompt(text)) > max_context:
                    return self._overflow(name, round, max_context)
                turn = await self._speak(name, text, round)
                if name == self.finisher:
                    finishing = self.tag is not None and self.tag in turn.completion.text
                cut = turn.completion.finish_reason == "length" and name != self.planner  # that is EMPTY, see _heard
                if cut and stop_on_truncation:
                    if name != answerer:
                        self._give_up(round)
                    return self._close(TRUNCATED)
            if finishing:
                return self._close(FINISHED)
        return self._close(FINISHED if max_turns == 1 else MAX_TURNS)

    def _incoming(self, name: str) -> str:
        heard = "\n\n".join(self.unheard[name])
        if name in self.started:
            return heard
        return f"Question:\n{self.task.question}\n\nInstruction:\n{heard}" if self.unheard[name] else self.task.question

    async def _speak(self, name: str, text: str, round: int) -> Turn:
        turn, *_ = await self.chats[name].sample(
            text,
            self.n_solutions if name == self.order[-1] else 1,
            after=() if self.last is None else self.last,
            stop=() if self.tag is None else (self.tag,),
            schema=self.schema if name == self.planner else None,
            show=self._show(name),
            round=round,
        )
        self.chats[name] = self.chats[name].at(turn)
        self.started.add(name)
        self.unheard[name] = []
        heard = self._heard(turn)
        for other in self.order:
            if other != name and heard is not None:
                self.unheard[other].append(heard)
        self.last = turn
        if name == self.order[-1]:
            self.answer = turn
        return turn

    def _heard(self, turn: Turn) -> str | None:
        """What the others read of a turn: its text, or an action's output; None after EMPTY and invalid actions."""
        if turn.role != self.planner:
            return turn.text
        action = None if turn.completion.finish_reason == "length" else read(turn.completion.text)
        return action.output or None if action else None

    def _show(self, name: str):
        """Only the finisher's tag means something: anyone else's ends what the others see, as it ends generation."""
        tag = self.tag
        if tag is None or name == self.finisher:
            return None
        return lambda text: text.partition(tag)[0].rstrip() if tag in text else text

    def _overflow(self, name: str, round: int, max_context: int) -> Finish:
        if round == 0 and name == self.order[0]:
            raise TaskTooLong(f"task {self.task.id}: {name}'s first prompt is longer than max_context={max_context}")
        if name != self.order[0]:
            self._give_up(round)
        return self._close(CONTEXT_EXCEEDED)

    def _give_up(self, round: int) -> None:
        """The answering role gets an empty turn in this round, so that its list stays paired and is graded empty."""
        self.answer = self.team.placeholder(self.order[-1], after=self.last, round=round)

    def _close(self, reason: str) -> Finish:
        assert self.answer is not None
        return Finish(reason, self.answer.text, self.answer.id)
