"""Your own examples: JSON lines (or JSON, CSV, parquet) of chats, in TRL's shapes."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from cothink.conversations import Conversation, Conversations, NotHere, fault
from cothink.tasks import DataError, Refused, Row, find, read_rows, short
from cothink.types import Message, Role


def load(
    roles: Mapping[str, Role], *, path: str | dict[str, str], system: Literal["role", "file"] = "role"
) -> Conversations:
    """Examples of one file, or of one file for each role (`path: {meta: a.jsonl, reasoning: b.jsonl}`).

    A row has `messages` (every assistant message is learned), or `prompt` and `completion` (the completion's are), as
    chat lists or plain texts; in a file for several roles also `role`, and optionally `id` and `question`.
    `system: role` gives each chat its role's own system prompt, `file` keeps the one that is written. Rows that are no
    such chat are left out and counted.
    """
    files = [*path.items()] if isinstance(path, dict) else [(next(iter(roles)) if len(roles) == 1 else None, path)]
    for name, _ in files:
        if name is not None and name not in roles:
            raise DataError(f"files: path names the role {name!r}; the team has {', '.join(roles)}")
    made: list[Conversation] = []
    refused: Counter[str] = Counter()
    for name, text in files:
        if not Path(text).expanduser().exists():
            raise NotHere(f"no file {text}; write path: with a file of chats")
        file = find(text, "")
        for number, row in enumerate(read_rows(file)):
            try:
                made.append(_conversation(row, _role(row, name, roles), system, f"{file.stem}/{number}"))
            except Refused as error:
                refused[str(error)] += 1
    notes = [f"{count:,} rows left out: {why}" for why, count in refused.items()]
    if not made:
        raise DataError(f"files: no usable row in {', '.join(t for _, t in files)}" + "".join(f"; {n}" for n in notes))
    return Conversations(made, {"rows": len(made), "refused": refused.total()}, notes)


def _role(row: Row, name: str | None, roles: Mapping[str, Role]) -> Role:
    name = name or row.get("role")
    if name is None:
        raise Refused(f"no role: write a column role, or path: {{{next(iter(roles))}: FILE}} with one file a role")
    if not isinstance(name, str) or name not in roles:
        raise Refused(f"role {short(repr(name))} is not in the team, which has {', '.join(roles)}")
    return roles[name]


def _conversation(row: Row, role: Role, system: str, default: str) -> Conversation:
    if row.get("messages") is not None:
        context, learned = [], _messages(row["messages"], "user")
    elif row.get("prompt") is not None and row.get("completion") is not None:
        context, learned = _messages(row["prompt"], "user"), _messages(row["completion"], "assistant")
    else:
        raise Refused("neither messages nor prompt and completion")
    messages = [*context, *learned]
    written = messages[0].role == "system" if messages else False
    if system == "role":
        own = [Message("system", role.system)] if role.system else []
        messages = [*own, *messages[written:]]
        moved = len(own) - written
    else:
        moved = 0
    wrong = fault(messages) or (None if all(m.content.strip() for m in messages) else "an empty message")
    if wrong:
        raise Refused(wrong)
    try:
        "".join(m.content for m in messages).encode()
    except UnicodeEncodeError:
        raise Refused("not valid Unicode: half of a surrogate pair") from None
    first = len(context) + moved if context else 0
    question = str(row.get("question") or "")
    return Conversation(role.name, tuple(messages), str(row.get("id") or default), question, first)


def _messages(value: Any, speaker: str) -> list[Message]:
    """A chat list (also one written as JSON text), or one plain text said by `speaker`."""
    if isinstance(value, str):
        if not value.lstrip().startswith("[{"):
            return [Message(speaker, value)]
        try:
            value = json.loads(value)
        except (ValueError, RecursionError):
            return [Message(speaker, value)]  # a text that only begins like a list
    try:
        said = [(turn["role"], turn["content"]) for turn in value]
    except (KeyError, TypeError):
        raise Refused("messages that are not {role, content} objects") from None
    if not all(isinstance(text, str) for pair in said for text in pair):
        raise Refused("a message whose role or content is not text")
    return [Message(*pair) for pair in said]
