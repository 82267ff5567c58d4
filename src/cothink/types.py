"""The nouns every room shares: small frozen records, standard library only."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

UNKNOWN_ID = -1
"""Stands for a token whose id is not known, such as one that a server sampled; nothing can be trained on it."""


class PlayError(Exception):
    """A mistake in a workflow, or an episode that cannot go on."""


class TaskTooLong(PlayError):
    """The task's own first prompt does not fit the context: the task is rejected and the run continues."""


class NoRoom(PlayError):
    """A prompt leaves no room for an answer in the model's context."""


class CallFailed(PlayError):
    """One call of an engine failed while its episode is kept: the workflow may go on without that turn."""


StopReason = Literal["stop", "length", "void", "error"]
"""Why one completion ended: end token or stop string, token limit, no generation at all, a failed call."""

FINISHED, MAX_TURNS, CONTEXT_EXCEEDED, TRUNCATED = "finished", "max_turns", "context_exceeded", "truncated"
FINISH_CODES: Mapping[str, int] = {FINISHED: 0, MAX_TURNS: 1, CONTEXT_EXCEEDED: 2, TRUNCATED: 3}


@dataclass(frozen=True, slots=True)
class Message:
    """One entry of a chat list; `role` is `system`, `user` or `assistant`."""

    role: str
    content: str


@dataclass(frozen=True, slots=True)
class Task:
    """One data row. `answer` is the gold answer and never reaches a prompt."""

    id: str
    question: str
    answer: str
    meta: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Sampling:
    """How one role samples; `max_tokens` counts new tokens, `top_k=0` means off.

    `schema` is a JSON schema as text: only texts that fit it may be sampled.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    max_tokens: int = 256
    stop: tuple[str, ...] = ()
    schema: str | None = None


@dataclass(frozen=True, slots=True)
class Role:
    """A named seat in the team. Two roles that name one policy share its weights."""

    name: str
    policy: str
    system: str = ""
    trainable: bool = True
    sampling: Sampling = Sampling()


@dataclass(frozen=True, slots=True)
class Completion:
    """What an engine returned for one prompt.

    `logprobs` holds one natural-log probability per output token, under the distribution that was sampled from
    (after temperature, top-p and top-k). `version` says which weights spoke. `schema` is the JSON schema that limited
    what could be sampled: the log-probs are then those among the tokens it allowed.
    """

    text: str
    prompt_ids: tuple[int, ...] = ()
    output_ids: tuple[int, ...] = ()
    logprobs: tuple[float, ...] = ()
    finish_reason: StopReason = "stop"
    version: int = 0
    schema: str | None = None


@dataclass(frozen=True, slots=True)
class Turn:
    """One role's contribution at one place of an episode.

    `parents` are the ids of the turns it answers: none (a root), one (a chain or tree), several (a join).
    `text` is what the others see; it may be shorter than `completion.text` (a finish tag cut away).
    `round` is 0-based. A turn without output ids is a placeholder: shown, graded, never trained.
    """

    id: str
    parents: tuple[str, ...]
    role: str
    policy: str
    completion: Completion
    text: str
    round: int = 0


@dataclass(frozen=True, slots=True)
class Finish:
    """How an episode ended (`finished`, `max_turns`, `context_exceeded`, `truncated`) and the text that is graded.

    `turn` is the id of the graded turn, or None when the graded text belongs to no single turn (a judge chose among
    several).
    """

    reason: str
    text: str
    turn: str | None = None


@dataclass(frozen=True, slots=True)
class Score:
    """One reward event on one turn.

    `to` says who it is credited to: `team` (this turn and every turn before it), a role name (only that role's
    turns, this one and before), or `turn` (this turn alone). `value` is already weighted.
    """

    turn: str
    name: str
    value: float
    to: str = "team"


@dataclass(frozen=True, slots=True)
class Episode:
    """One play of the team on one task: a chain, a tree or a join of turns, in the order they were created.

    `accuracy` is the unshaped grade in [0, 1] of `finish.text`, None until graded.
    """

    id: str
    task: Task
    turns: tuple[Turn, ...]
    finish: Finish
    rewards: tuple[Score, ...] = ()
    accuracy: float | None = None
    verdict: str | None = None


@dataclass(frozen=True, slots=True)
class ScoredTurn:
    """A turn with its return and the keys estimators group by.

    `index` counts the role's own earlier turns in the episode, `prefix` names parents and role, `anchor` an optional
    task-defined state, `tokens` the trained tokens, `components` the return of each named reward.
    """

    task: str
    episode: str
    role: str
    policy: str
    index: int
    value: float
    tokens: int
    turn: str = ""
    prefix: str = ""
    anchor: str | None = None
    components: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Sample:
    """A flat training row: the turns of one role in one episode whose prompts extend one another.

    All sequences have the length of `ids`. `turns[j]` is the 0-based place of the trained turn that token j belongs
    to within its unit (episode, role), -1 where nothing is trained. `logprobs` and `advantages` are 0 there.
    `unit` is `episode_id/role`: a role whose prompt history broke has several samples in one unit. `schema` limited
    the one trained turn of the row. `rollout` holds the engine's log-probs where `logprobs` are the trainer's.
    """

    policy: str
    role: str
    unit: str
    ids: tuple[int, ...]
    turns: tuple[int, ...]
    logprobs: tuple[float, ...]
    advantages: tuple[float, ...]
    task: str = ""
    episode: str = ""
    turn_ids: tuple[str, ...] = ()
    version: int = 0
    temperature: float = 1.0
    finish: str = FINISHED
    schema: str | None = None
    rollout: tuple[float, ...] = ()

    @property
    def trained(self) -> int:
        """Number of trained tokens."""
        return sum(t >= 0 for t in self.turns)
