"""Plays a team: chats, turns and their parents, bounded concurrency, deadlines; failed episodes are counted."""

from __future__ import annotations

import asyncio
import hashlib
import math
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Protocol

from cothink.types import (
    UNKNOWN_ID,
    CallFailed,
    Completion,
    Episode,
    Finish,
    Message,
    PlayError,
    Role,
    Sampling,
    Task,
    TaskTooLong,
    Turn,
)

if TYPE_CHECKING:
    from cothink.engines import Engine

Workflow = Callable[[Task, "Team"], Awaitable[Finish]]


class Listener(Protocol):
    """Follows one episode while it is played; the ids of its turns are not yet those of the finished episode."""

    def asks(self, role: Role) -> None: ...

    def said(self, turn: Turn) -> None: ...


class Memory(Protocol):
    """Keeps the turns of one episode as they come, and knows those that were played before."""

    def recall(self, ids: Sequence[str], prompt: tuple[int, ...]) -> list[Completion] | None: ...

    def keep(self, turns: Sequence[Turn], place: int) -> None: ...

    def failed(self, parents: Sequence[str], role: str, error: Exception) -> None: ...


LOGPROB_SLACK = 1e-3
"""How far above 0 rounding may lift a log-prob."""

# The turn that comes "before" the next one, per asyncio task: branches under gather each follow their own line.
_line: ContextVar[tuple[str, ...]] = ContextVar("cothink_line", default=())


def stable_seed(*parts: object) -> int:
    """A 63-bit seed from any printable parts, equal on every machine and in every process."""
    digest = hashlib.blake2b("\x1f".join(map(str, parts)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


class Chat:
    """One role's own message list: the role is `assistant` in it, everyone else is `user`.

    The prompt of each call is the exact ids of the call before, the exact sampled ids, and the template's glue.
    """

    def __init__(self, team: Team, role: Role, messages: Sequence[Message] = (), ids: tuple[int, ...] | None = None):
        self._team, self.role = team, role
        self.messages = list(messages)
        if not messages and role.system:
            self.messages.append(Message("system", role.system))
        self._ids = ids
        self._next: tuple[str, tuple[int, ...]] | None = None  # the last prompt asked for: workflows measure, then say

    def fork(self) -> Chat:
        """An independent copy of this chat."""
        return Chat(self._team, self.role, self.messages, self._ids) if self.messages else Chat(self._team, self.role)

    def at(self, turn: Turn) -> Chat:
        """The chat as it stood right after one of this role's own turns."""
        return self._team._chat_after(turn)

    def prompt(self, text: str) -> tuple[int, ...]:
        """The ids this role would be given if `text` were said to it now."""
        if self._next is None or self._next[0] != text:
            messages = [*self.messages, Message("user", text)]
            codec = self._team.engine(self.role).codec(self.role.policy)
            ids = codec.start(messages) if self._ids is None else codec.grow(messages, self._ids).ids
            self._next = (text, tuple(ids))
        return self._next[1]

    async def say(
        self,
        text: str,
        *,
        after: Turn | Sequence[Turn] | None = None,
        stop: Sequence[str] = (),
        schema: str | None = None,
        show: Callable[[str], str] | None = None,
        round: int = 0,
    ) -> Turn:
        """Says `text` to this role and returns its answer; this chat then holds both.

        `after` names the turns that are answered (default: the last turn of this line of play), `stop` adds stop
        strings, `schema` is a JSON schema that the answer must fit, `show` maps the role's text to what others see.
        """
        (turn,) = await self._ask(text, 1, after, stop, schema, show, round)
        grown = self.at(turn)
        self.messages, self._ids, self._next = grown.messages, grown._ids, None
        return turn

    async def sample(
        self,
        text: str,
        n: int,
        *,
        after: Turn | Sequence[Turn] | None = None,
        stop: Sequence[str] = (),
        schema: str | None = None,
        show: Callable[[str], str] | None = None,
        round: int = 0,
    ) -> list[Turn]:
        """Returns n sibling turns; this chat stays as it is, `chat.at(turn)` is the fork that goes on from one."""
        if n < 1:
            raise PlayError(f"{self.role.name}: sample(n={n}); n must be at least 1")
        return await self._ask(text, n, after, stop, schema, show, round)

    async def _ask(self, text, n, after, stop, schema, show, round) -> list[Turn]:
        team, role = self._team, self.role
        parents = team._parents(after, role)
        first = team._place(parents, role, n)
        prompt = self.prompt(text)
        messages = [*self.messages, Message("user", text)]
        sampling = role.sampling
        if stop:
            sampling = replace(sampling, stop=tuple(dict.fromkeys((*sampling.stop, *stop))))
        if schema is not None:
            sampling = replace(sampling, schema=schema)
        seed = stable_seed(team.seed, *parents, role.name, first)
        if team.listener is not None:
            team.listener.asks(role)
        ids = [_id(parents, role, first + k) for k in range(n)]
        known = None if team.memory is None else team.memory.recall(ids, prompt)
        done = known
        if done is None:
            done = await team._generate(role, messages, prompt, sampling, n, seed, parents)
        if len(done) != n:
            raise PlayError(f"the engine of policy {role.policy!r} returned {len(done)} completions, asked for {n}")
        limit = getattr(team.engine(role).codec(role.policy), "vocabulary", None)
        for completion in done if known is None else ():
            _sound(completion, role, prompt, limit)
        turns = []
        for k, completion in enumerate(done):
            shown = show(completion.text) if show else completion.text
            turn = team._add(parents, role, completion, shown, round, first + k)
            after_ids = (*completion.prompt_ids, *completion.output_ids)
            team._chats[turn.id] = Chat(team, role, [*messages, Message("assistant", completion.text)], after_ids)
            turns.append(turn)
        if team.memory is not None and known is None:
            team.memory.keep(turns, first)
        _line.set(tuple(t.id for t in turns))
        return turns


class Team:
    """The roles of one episode at the table; records every turn with its parents."""

    def __init__(
        self,
        roles: Mapping[str, Role],
        engines: Mapping[str, Engine],
        seed: int = 0,
        listener: Listener | None = None,
        memory: Memory | None = None,
    ):
        self.roles, self.seed, self.listener, self.memory = dict(roles), seed, listener, memory
        self._engines = engines
        self._turns: dict[str, Turn] = {}
        self._place_of: dict[str, int] = {}  # turn id -> its place among the turns of one role under the same parents
        self._places: Counter[tuple] = Counter()
        self._chats: dict[str, Chat] = {}

    def chat(self, role: str) -> Chat:
        """A fresh chat of one role, holding only its system prompt."""
        if role not in self.roles:
            raise PlayError(f"the workflow asks for role {role!r}; the team has {', '.join(self.roles)}")
        return Chat(self, self.roles[role])

    def engine(self, role: Role) -> Engine:
        """The engine that speaks for a role."""
        return self._engines[role.policy]

    def placeholder(self, role: str, *, after: Turn | None = None, round: int = 0) -> Turn:
        """An empty turn without tokens: it keeps lists paired, is graded as empty text and never trained."""
        seat = self.roles[role]
        parents = self._parents(after, seat)
        place = self._place(parents, seat, 1)
        turn = self._add(parents, seat, Completion("", finish_reason="void"), "", round, place)
        _line.set((turn.id,))
        return turn

    def turns(self, finish: Finish) -> tuple[tuple[Turn, ...], Finish]:
        """All turns in an order that does not depend on who answered first, renumbered `0`, `1`, ... and the finish."""
        return numbered(self._turns.values(), self._place_of, finish)

    async def _generate(
        self,
        role: Role,
        messages: Sequence[Message],
        prompt: tuple[int, ...],
        sampling: Sampling,
        n: int,
        seed: int,
        parents: tuple[str, ...],
    ) -> list[Completion]:
        try:
            return await self.engine(role).generate(role.policy, messages, prompt, sampling, n, seed)
        except Exception as error:
            if self.memory is None:
                raise
            self.memory.failed(parents, role.name, error)
            raise CallFailed(f"{role.name}: {type(error).__name__}: {error}") from error

    def _parents(self, after: Turn | Sequence[Turn] | None, role: Role) -> tuple[str, ...]:
        if after is None:
            line = tuple(i for i in _line.get() if i in self._turns)
            if len(line) > 1:
                raise PlayError(f"{role.name} speaks after {len(line)} sibling turns: pass after= the turn it answers")
            return line
        return (after.id,) if isinstance(after, Turn) else tuple(t.id for t in after)

    def _place(self, parents: tuple[str, ...], role: Role, n: int) -> int:
        """Books n places for this role under these parents and returns the first."""
        first = self._places[parents, role.name]
        self._places[parents, role.name] += n
        return first

    def _add(
        self, parents: tuple[str, ...], role: Role, completion: Completion, text: str, round: int, place: int
    ) -> Turn:
        turn = Turn(_id(parents, role, place), parents, role.name, role.policy, completion, text, round)
        self._turns[turn.id] = turn
        self._place_of[turn.id] = place
        if self.listener is not None:
            self.listener.said(turn)
        return turn

    def _chat_after(self, turn: Turn) -> Chat:
        if turn.id not in self._chats:
            raise PlayError(f"turn {turn.id} has no chat: it is a placeholder or belongs to another episode")
        return self._chats[turn.id].fork()


def _sound(completion: Completion, role: Role, prompt: tuple[int, ...], limit: int | None) -> None:
    """Raises PlayError for what no engine may return: training on it would fail later, or not fail.

    `limit` is the first id beyond the policy's vocabulary, where that is known.
    """
    if not isinstance(completion, Completion):
        raise PlayError(f"the engine of policy {role.policy!r} answered {role.name} with a {type(completion).__name__}")
    ids, logprobs = completion.output_ids, completion.logprobs
    if completion.prompt_ids not in ((), prompt):
        wrong = "another prompt than it was given"
    elif len(logprobs) not in (0, len(ids)):
        wrong = f"{len(ids)} token ids and {len(logprobs)} log-probs"
    elif any(not value <= LOGPROB_SLACK for value in logprobs):  # not a number is not <= anything
        wrong = f"the log-prob {next(v for v in logprobs if not v <= LOGPROB_SLACK)}"
    elif -math.inf in logprobs:
        wrong = "a token of probability 0"
    elif ids and min(ids) < (0 if role.trainable else UNKNOWN_ID):
        wrong = f"the token id {min(ids)}"
    elif ids and limit is not None and max(ids) >= limit:
        wrong = f"the token id {max(ids)}, and its vocabulary ends at {limit - 1}"
    else:
        return
    raise PlayError(f"the engine of policy {role.policy!r} answered {role.name} with {wrong}; see docs/adding.md")


def _id(parents: Sequence[str], role: Role, place: int) -> str:
    """The id of a turn while it is played: a digest of its way from the root, whatever is said there."""
    return f"{stable_seed(*parents, role.name, place):016x}"


def in_order(turns: Iterable[Turn], place_of: Mapping[str, int]) -> list[str]:
    """Ids of turns, parents before those who answer them, in an order that does not depend on who answered first.

    `turns` come in any order that has parents first; `place_of` gives each one's place among the turns of its role
    under the same parents.
    """
    depth: dict[str, int] = {}
    levels: dict[int, list[Turn]] = {}
    for turn in turns:
        depth[turn.id] = 1 + max((depth[p] for p in turn.parents), default=-1)
        levels.setdefault(depth[turn.id], []).append(turn)
    number: dict[str, int] = {}
    for level in sorted(levels):  # parents are numbered before their children are compared
        key = {t.id: ([number[p] for p in t.parents], t.role, place_of[t.id]) for t in levels[level]}
        for turn in sorted(levels[level], key=lambda t: key[t.id]):
            number[turn.id] = len(number)
    return list(number)


def numbered(turns: Iterable[Turn], place_of: Mapping[str, int], finish: Finish) -> tuple[tuple[Turn, ...], Finish]:
    """The turns `in_order`, renumbered `0`, `1`, ..., and the finish that names one of them."""
    by_id = {turn.id: turn for turn in turns}
    name = {old: str(k) for k, old in enumerate(in_order(by_id.values(), place_of))}
    done = tuple(replace(by_id[i], id=name[i], parents=tuple(name[p] for p in by_id[i].parents)) for i in name)
    return done, replace(finish, turn=name.get(finish.turn) if finish.turn else None)


@dataclass(frozen=True, slots=True)
class Job:
    """One episode to play: the task, the episode's id and its seed.

    `listener` hears it as it is played, `memory` keeps its turns and knows those of an earlier attempt.
    """

    task: Task
    id: str
    seed: int
    listener: Listener | None = None
    memory: Memory | None = None


@dataclass(frozen=True, slots=True)
class Failure:
    """An episode that was left out: `kind` is `deadline`, `overlong_task` or `error`."""

    task: str
    episode: str
    kind: str
    message: str


@dataclass(frozen=True, slots=True)
class Played:
    """Finished episodes in the order of the jobs, and what was left out."""

    episodes: tuple[Episode, ...]
    failures: tuple[Failure, ...] = ()


async def play(
    jobs: Iterable[Job],
    workflow: Workflow,
    roles: Mapping[str, Role],
    engines: Mapping[str, Engine],
    *,
    concurrency: int = 256,
    deadline: float | None = None,
    on_done: Callable[[int], None] | None = None,
    share: bool = False,
) -> Played:
    """Plays all jobs, at most `concurrency` at once, each within `deadline` seconds of its own start.

    A failed or late episode is left out and counted; when every episode fails by an error, the first error is raised,
    unless the jobs are only a `share` of all.
    """
    jobs = list(jobs)
    gate = asyncio.Semaphore(concurrency)
    errors: list[BaseException] = []
    done = 0

    async def one(job: Job) -> Episode | Failure:
        nonlocal done
        async with gate:
            _line.set(())
            team = Team(roles, engines, job.seed, job.listener, job.memory)
            try:
                async with asyncio.timeout(deadline):
                    finish = await workflow(job.task, team)
                if not isinstance(finish, Finish):
                    raise PlayError(f"the workflow returned {type(finish).__name__}, it must return a Finish")
                turns, finish = team.turns(finish)
                result: Episode | Failure = Episode(job.id, job.task, turns, finish)
            except TimeoutError as error:
                errors.append(error)
                result = Failure(job.task.id, job.id, "deadline", f"not done after {deadline} s")
            except TaskTooLong as error:
                result = Failure(job.task.id, job.id, "overlong_task", str(error))
            except Exception as error:
                errors.append(error)
                result = Failure(job.task.id, job.id, "error", f"{type(error).__name__}: {error}")
        done += 1
        if on_done:
            on_done(done)
        return result

    results = await asyncio.gather(*(one(job) for job in jobs))
    episodes = tuple(r for r in results if isinstance(r, Episode))
    failures = tuple(r for r in results if isinstance(r, Failure))
    hard = [e for e in errors if not isinstance(e, TimeoutError)]
    if jobs and not episodes and hard and not share:
        raise PlayError(f"all {len(jobs)} episodes failed; the first error: {hard[0]}") from hard[0]
    return Played(episodes, failures)
