"""Tokens of a recipe's plays: what each role reads and says in one of them, and what a microbatch of many holds."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from typing import Any

from cothink.footprint import Load
from cothink.parts import DPO, RL, SFT, Evaluate, Stage
from cothink.recipe import Recipe
from cothink.resolve import effective, resolve

CHARACTERS = 4
"""Characters of a token, for estimates: no tokenizer is loaded by a check."""


@dataclass(frozen=True, slots=True)
class Chat:
    """One chat of one play, `times` alike: its tokens, how many all plays of the row begin with, how many it said."""

    policy: str
    length: int
    shared: int
    said: int
    times: int = 1


@dataclass(frozen=True)
class Work:
    """What a team plays: the chats of one play, and the rows of each task set where they are known."""

    chats: Sequence[Chat]
    rows: Mapping[str, int | None] = field(default_factory=dict)

    def cached(self, stage: Stage, policies: Collection[str], processes: int) -> float:
        """The most tokens that a stage's plays by these policies leave in an engine's cache."""
        if isinstance(stage, SFT | DPO):
            return 0.0
        if isinstance(stage, RL):
            again = 1.0 if stage.filter.name == "none" else stage.oversample_max
            rows, plays = stage.tasks_per_step * again / processes, stage.episodes_per_task
        else:
            known = None if isinstance(stage, Evaluate) and stage.suite is not None else self.rows.get(stage.on)
            rows = math.inf if known is None else min(known, stage.limit or known)
            plays = stage.episodes_per_task if isinstance(stage, Evaluate) else 1
        return rows * sum(distinct(c, plays) for c in self.chats if c.policy in policies)


def chats(one: Sequence[Any], other: Sequence[Any], most: float = math.inf) -> list[Chat]:
    """The chats of a play in which every answer is as long as it may be, from its calls and those of another play.

    The two say different things, so what their prompts have in common does not depend on what was said. A call whose
    messages a later one goes on from is a part of that one's chat.
    """
    found = []
    for k, (a, b) in enumerate(zip(one, other, strict=True)):
        mine = _text(a)
        if any(c.policy == a.policy and _text(c).startswith(mine) and _text(c) != mine for c in one[k + 1 :]):
            continue
        limit = a.sampling.max_tokens
        said = sum(len(m.content) for m in a.messages if m.role == "assistant") // CHARACTERS + limit
        length = min(most, math.ceil(len(mine) / CHARACTERS) + limit)
        shared = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(mine, _text(b)))) // CHARACTERS
        found.append(Chat(a.policy, int(length), int(min(shared, length)), int(min(said, length)), a.n))
    return found


def _text(call: Any) -> str:
    return "".join(message.content for message in call.messages)


def longest(recipe: Recipe) -> float:
    """The most tokens of a chat that the workflow allows."""
    block = recipe.team.workflow
    most = effective(resolve("workflow", block.name), block.options).get("max_context")
    return most if isinstance(most, int) and most > 0 else math.inf


def distinct(chat: Chat, plays: int) -> int:
    """Tokens of all plays of one row, their common beginning once."""
    return chat.shared + plays * chat.times * (chat.length - chat.shared)


def step(mine: Iterable[Chat], stage: RL, processes: int) -> tuple[Load, bool]:
    """The fullest microbatch of a policy's update, and whether an update has several."""
    mine, plays = list(mine), stage.episodes_per_task
    tokens = sum(distinct(c, plays) for c in mine)
    read = sum(plays * c.times * c.length for c in mine)
    learned = sum(plays * c.times * c.said for c in mine)
    whole = math.ceil(tokens * stage.tasks_per_step / stage.updates_per_step / processes)
    alone = max(c.times * c.length for c in mine)  # a role's part of one play is never cut
    most = min(whole, max(stage.microbatch_tokens, alone))
    share = most / tokens
    row = max(c.length for c in mine)
    return Load(most, round(share * read), row, min(most, round(share * learned))), whole > most
