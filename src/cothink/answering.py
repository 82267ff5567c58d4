"""A loaded team answers one question, for the terminal, the endpoint and Python: options, votes, live turns, usage."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from cothink import models, wiring
from cothink.recipe import Recipe
from cothink.record import episode_row
from cothink.resolve import bind, effective, options_of, resolve
from cothink.session import Session
from cothink.stats import majority
from cothink.team import Failure, Job, Workflow, play, stable_seed
from cothink.types import FINISHED, Episode, Message, NoRoom, PlayError, Role, Task, TaskTooLong, Turn
from cothink.votes import answer_of, classes

EARLIER = "Conversation so far:\n\n{said}\n\nAnswer the last message of this conversation:\n\n{question}"
"""How a question that has a history is put to a team: its roles have chats of their own, it sees one text."""
RULES = "Instructions:\n{rules}\n\n{question}"


class WrongOption(ValueError):
    """An option that this team cannot follow; `option` names it."""

    def __init__(self, option: str, message: str):
        super().__init__(f"{option}: {message}")
        self.option = option


class Late(PlayError):
    """The team did not answer in time."""


@dataclass(frozen=True, slots=True)
class Wish:
    """How one question is to be answered; None leaves what the recipe says.

    `votes` plays it so many times and takes the answer most plays state. `max_tokens` is the most tokens of any turn
    (a role's own limit stays when it is lower), `max_turns` the most turns of workflows that count them.
    """

    votes: int = 1
    max_turns: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    max_tokens: int | None = None
    seed: int | None = None


class Ears(Protocol):
    """Follows an answer live; `play` counts plays from 0, the final message itself is not among what is `said`."""

    def asks(self, play: int, role: str) -> None: ...

    def said(self, play: int, turn: Turn) -> None: ...


@dataclass(frozen=True, slots=True)
class Usage:
    """Tokens of all plays: prompts as each call read them (None: an outside server does not tell), and sampled ones.

    `inner` counts the sampled tokens outside the final message.
    """

    prompt: int | None
    generated: int
    inner: int


@dataclass(frozen=True, slots=True)
class Answer:
    """What a team answered: its plays, which of them gave the answer, and the answer each states (None: none).

    `late` counts plays that brought nothing.
    """

    plays: tuple[Episode, ...]
    chosen: int
    answers: tuple[str | None, ...]
    usage: Usage
    late: int = 0

    @property
    def episode(self) -> Episode:
        """The play that won."""
        return self.plays[self.chosen]

    @property
    def text(self) -> str:
        """The final message."""
        return self.episode.finish.text

    @property
    def answer(self) -> str | None:
        """The answer that the final message states, None where it states none."""
        return self.answers[self.chosen]

    @property
    def whole(self) -> bool:
        """Whether the team ended by itself, and no limit cut its final message."""
        final = last_turn(self.episode)
        cut = final is not None and final.completion.finish_reason == "length"
        return self.episode.finish.reason == FINISHED and not cut

    def trace(self) -> dict[str, Any]:
        """Everything that was said, as plain data: `chosen` is the place of the winning play in `plays`."""
        return {"chosen": self.chosen, "plays": [self._play(k) for k in range(len(self.plays))], "failed": self.late}

    def _play(self, place: int) -> dict[str, Any]:
        row = episode_row(self.plays[place])
        spoken = ("id", "parents", "role", "round", "text", "shown", "tokens", "finish_reason", "version")
        turns = [{k: turn[k] for k in spoken if k in turn} for turn in row["turns"]]
        said = {"finish": row["finish"], "graded": row["graded"], "text": self.plays[place].finish.text}
        return {**said, "answer": self.answers[place], "turns": turns}


def last_turn(episode: Episode) -> Turn | None:
    """The turn whose text is the final message; None when it belongs to no single turn."""
    return next((turn for turn in episode.turns if turn.id == episode.finish.turn), None)


async def answer(
    session: Session, question: str, wish: Wish | None = None, *, seed: object = 0, ears: Ears | None = None
) -> Answer:
    """The team's answer to one question; `seed` decides where the wish names none.

    Raises WrongOption before anything is sampled, TaskTooLong and NoRoom for questions that do not fit the context,
    Late when no play ended within the recipe's deadline, and PlayError when all plays failed.
    """
    wish = Wish() if wish is None else wish
    question = checked(question)
    roles, workflow = fitted(session, wish)
    task = Task("question", question, "")
    start = seed if wish.seed is None else wish.seed
    plays = [_Play(k, ears) for k in range(wish.votes)]
    jobs = [Job(task, f"question#{k}", stable_seed(start, question, k), plays[k]) for k in range(wish.votes)]
    team = session.recipe.team
    try:
        done = await play(jobs, workflow, roles, session.engines, deadline=team.deadline)
    except PlayError as error:
        if isinstance(error.__cause__, NoRoom):
            raise NoRoom(str(error.__cause__)) from error
        raise
    if not done.episodes:
        raise _failed(done.failures[0])
    stated = [answer_of(task, episode.finish.text) for episode in done.episodes]
    chosen = (majority(await classes(task, stated)) or 0) if wish.votes > 1 else 0
    final = last_turn(done.episodes[chosen])
    for one in plays:
        one.end(final)
    return Answer(done.episodes, chosen, tuple(stated), _usage(session, done.episodes, final), len(done.failures))


def checked(question: str) -> str:
    """The question, if it can be asked at all; raises ValueError else."""
    if not question.strip():
        raise ValueError("the question is empty")
    try:
        question.encode()
    except UnicodeEncodeError:
        raise ValueError("the question is not valid Unicode: it holds half of a surrogate pair") from None
    return question


def question_of(messages: Sequence[Message]) -> str:
    """The one text a team is asked: the last message, behind the conversation before it and the caller's instructions.

    A single user message is asked as it is. The last message must be the user's.
    """
    if not messages or messages[-1].role != "user":
        raise ValueError("the last message must be the user's: it is the question the team answers")
    *before, last = messages
    rules = [m.content for m in before if m.role == "system" and m.content.strip()]
    said = [f"{m.role.capitalize()}: {m.content}" for m in before if m.role != "system"]
    question = last.content
    if said:
        question = EARLIER.format(said="\n\n".join(said), question=question)
    return RULES.format(rules="\n\n".join(rules), question=question) if rules else question


def fitted(session: Session, wish: Wish) -> tuple[Mapping[str, Role], Workflow]:
    """The roles and the workflow that a wish makes of a team's; raises WrongOption."""
    if wish.votes < 1:
        raise WrongOption("votes", f"{wish.votes} plays give no answer; write 1 or more")
    if wish.max_tokens is not None and wish.max_tokens < 1:
        raise WrongOption("max_tokens", f"{wish.max_tokens} tokens make no turn; write 1 or more")
    roles = {}
    for name, role in session.roles.items():
        old = role.sampling
        new = replace(
            old,
            temperature=old.temperature if wish.temperature is None else wish.temperature,
            top_p=old.top_p if wish.top_p is None else wish.top_p,
            max_tokens=old.max_tokens if wish.max_tokens is None else min(old.max_tokens, wish.max_tokens),
        )
        roles[name] = replace(role, sampling=new)
    if wish.votes > 1 and not any(role.sampling.temperature for role in roles.values()):
        raise WrongOption("votes", "at temperature 0 every play is the same; ask for a higher temperature, or one vote")
    return roles, session.answering if wish.max_turns is None else _shorter(session.recipe, wish.max_turns)


def _shorter(recipe: Recipe, turns: int) -> Workflow:
    """The recipe's workflow with another `max_turns`, where that makes a shorter play of the same team."""
    block = recipe.team.workflow
    function = resolve("workflow", block.name)
    if "max_turns" not in options_of(function):
        raise WrongOption("max_turns", f"the workflow {block.name} of this team does not count turns; leave it out")
    most = effective(function, block.options)["max_turns"]
    if most == 1:
        raise WrongOption("max_turns", "each role of this team speaks once; leave it out")
    if not 1 <= turns <= most:
        raise WrongOption("max_turns", f"{turns} is not among the 1 to {most} turns that this team can take")
    shorter = block.model_copy(update={"options": {**block.options, "max_turns": turns}})
    changed = recipe.model_copy(update={"team": recipe.team.model_copy(update={"workflow": shorter})})
    if wiring.workflow_roles(changed) != wiring.workflow_roles(recipe):
        what = f"{turns} makes {block.name} another game, with other prompts than this team's"
        raise WrongOption("max_turns", f"{what}; write {turns + 1} to {most}, or leave it out")
    return bind(function, {**shorter.options, **wiring.alone(shorter)}, "team.workflow")


def _failed(failure: Failure) -> PlayError:
    late = f"the team did not answer: {failure.message}"
    return TaskTooLong(failure.message) if failure.kind == "overlong_task" else Late(late)


def _usage(session: Session, episodes: Sequence[Episode], final: Turn | None) -> Usage:
    turns = [turn for episode in episodes for turn in episode.turns]
    outside = any(models.is_outside(session.recipe.policies[t.policy].model) for t in turns)
    generated = sum(len(t.completion.output_ids) for t in turns)
    shown = 0 if final is None else len(final.completion.output_ids)
    prompt = None if outside else sum(len(t.completion.prompt_ids) for t in turns)
    return Usage(prompt, generated, generated - shown)


class _Play:
    """Passes on the turns of one play, each of them once it is sure not to be the final message."""

    def __init__(self, number: int, ears: Ears | None):
        self._number, self._ears = number, ears
        self._held: list[Turn] = []

    def asks(self, role: Role) -> None:
        """Somebody is asked on: what was said before is no final message."""
        self._pass(self._held)
        self._held = []
        if self._ears is not None:
            self._ears.asks(self._number, role.name)

    def said(self, turn: Turn) -> None:
        """Keeps a turn back."""
        self._held.append(turn)

    def end(self, final: Turn | None) -> None:
        """The answer is known: what was kept back and is not it was a part of the inner conversation."""
        self._pass(t for t in self._held if final is None or t.completion is not final.completion)
        self._held = []

    def _pass(self, turns: Any) -> None:
        if self._ears is not None:
            for turn in turns:
                if turn.completion.finish_reason != "void":
                    self._ears.said(self._number, turn)
