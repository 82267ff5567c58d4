"""Worked solutions, plans and dialogues of generated word problems, for every role that the built-in model knows."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from typing import Literal

from cothink.builtin.chats import CLEAN, MAKERS, MIXED
from cothink.builtin.prompts import PROMPTS
from cothink.conversations import Conversation, Conversations
from cothink.tasks import DataError
from cothink.tasks.wordsums import MAX_LEVEL
from cothink.tasks.wordsums import load as problems
from cothink.types import Message, Role

SEATS = {maker.__name__.lstrip("_"): maker for maker in MAKERS}
"""Seat (solo, meta, reasoning_multi, ...) -> what writes its chats."""


def load(
    roles: Mapping[str, Role],
    *,
    count: int = 1000,
    levels: int | Sequence[int] = (1, MAX_LEVEL),
    distractors: int | Sequence[int] = (0, 2),
    habits: Literal["clean", "mixed"] = "clean",
    seats: Mapping[str, str] | None = None,
    seed: int = 0,
) -> Conversations:
    """`count` chats for every role, each on its own training problem; no test problem can be among them.

    `clean` chats are all well done, `mixed` ones show every habit of the built-in model. `seats` says what a role does
    (`{planner: meta}`); without it the role's system prompt decides (`Plan.` is meta, `Guide.` is meta_multi).
    """
    made: list[Conversation] = []
    shown = CLEAN if habits == "clean" else MIXED
    tasks = problems("train", levels=levels, count=count, seed=seed, distractors=distractors)
    for role in roles.values():
        maker = SEATS[_seat(role, seats or {})]
        for task in tasks:
            # The same draws for every role: meta and reasoning then tell two sides of one dialogue.
            _, *said = maker(random.Random(f"conversations/{seed}/{task.id}"), task, shown)
            system = [Message("system", role.system)] if role.system else []
            made.append(Conversation(role.name, (*system, *said), task.id, task.question))
    return Conversations(made, {"rows": len(made)})


def _seat(role: Role, seats: Mapping[str, str]) -> str:
    by_prompt = {prompt: seat for seat, prompt in PROMPTS.items()}
    seat = seats.get(role.name) or by_prompt.get(role.system)
    if seat not in SEATS:
        raise DataError(
            f"wordsums: what does the role {role.name!r} do? Write seats: {{{role.name}: SEAT}} with one of "
            f"{', '.join(SEATS)}, or give it one of their system prompts"
        )
    return seat
