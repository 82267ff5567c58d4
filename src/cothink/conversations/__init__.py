"""Chats to learn from: each module has `load(roles, **options)`; this one holds the record and its token rows."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Protocol

from cothink.tasks import DataError, question_key
from cothink.types import Message, Role, Sample, Task

if TYPE_CHECKING:
    from cothink.chat import Codec

    class Replies(Codec, Protocol):
        """A codec that can also say which ids a role should sample."""

        def reply(self, text: str) -> tuple[int, ...]: ...


class NotHere(DataError):
    """A source whose files are not on this machine: they may come from a stage, a download or another machine."""


@dataclass(frozen=True, slots=True)
class Conversation:
    """One role's own chat: it is `assistant` in it, and its messages from place `first` on are to be learned.

    `question` is the bare question of the task, by which overlap with task sets is found; empty when unknown.
    """

    role: str
    messages: tuple[Message, ...]
    id: str = ""
    question: str = ""
    first: int = 0


class Conversations(list["Conversation | Sample"]):
    """The examples of one source, with what was repaired, counted or left out.

    A source that has the sampled ids already gives Samples, which are trained as they are. `counts` are facts by name,
    `notes` the same in words, a line each. `lineage` says by a Sample's unit where it came from, `facts` is a data
    card.
    """

    lineage: Mapping[str, Mapping[str, Any]] = MappingProxyType({})
    facts: Mapping[str, Any] | None = None

    def __init__(
        self,
        examples: Iterable[Conversation | Sample] = (),
        counts: Mapping[str, int] | None = None,
        notes: Iterable[str] = (),
    ) -> None:
        super().__init__(examples)
        self.counts = dict(counts or {})
        self.notes = tuple(notes)


def chat(role: Role, turns: Sequence[str]) -> tuple[Message, ...]:
    """A role's message list from texts that are said to it and by it in turn; an empty system prompt is left out."""
    speakers = ("user", "assistant")
    said = tuple(Message(speakers[k % 2], text) for k, text in enumerate(turns))
    return (Message("system", role.system), *said) if role.system else said


def fault(messages: Sequence[Message]) -> str | None:
    """Why a message list is no conversation to learn from; None when it is one."""
    said = messages[1:] if messages and messages[0].role == "system" else messages
    if [m.role for m in said] != [("user", "assistant")[k % 2] for k in range(len(said))]:
        return "not user and assistant in turn after at most one system message"
    if len(said) < 2 or len(said) % 2:
        return "does not end in an assistant message"
    return None


def token_rows(conversation: Conversation, codec: Replies, policy: str) -> tuple[list[Sample], int]:
    """A conversation as the role would have been prompted and would have sampled it, and how often history broke.

    Trained are the role's own replies, each with the token that ends it; what the template prints between them is
    context. A template that rewrites history (drops earlier thinking, say) starts a new Sample, as in play.
    """
    rows: list[tuple[list[int], list[int]]] = []
    turn, breaks = 0, 0
    for place, message in enumerate(conversation.messages):
        if message.role != "assistant":
            continue
        before = conversation.messages[:place]
        ids, broke = codec.grow(before, rows[-1][0]) if rows else (codec.start(before), True)
        breaks += broke and bool(rows)
        if broke:
            rows.append(([], []))
        row, turns = rows[-1]
        row += ids[len(row) :]
        turns += [-1] * (len(row) - len(turns))
        row += codec.reply(message.content)
        turns += [turn if place >= conversation.first else -1] * (len(row) - len(turns))
        turn += place >= conversation.first
    unit = f"{conversation.id}/{conversation.role}"
    zeros = [(0.0,) * len(ids) for ids, _ in rows]
    made = [
        Sample(policy, conversation.role, unit, tuple(ids), tuple(turns), z, z, conversation.id)
        for (ids, turns), z in zip(rows, zeros)
    ]
    return [sample for sample in made if sample.trained], breaks


def overlap(examples: Iterable[Conversation | Sample], tasks: Iterable[Task]) -> list[str]:
    """Ids of the examples whose question stands in a task set too, each once."""
    known = {question_key(task.question) for task in tasks}
    found = [c.id for c in examples if isinstance(c, Conversation) and c.question and question_key(c.question) in known]
    return list(dict.fromkeys(found))
