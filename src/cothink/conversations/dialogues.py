"""Two-role dialogues cut out of worked solutions: the cold start of multi-turn ReMA (arXiv 2503.09501).

Two row-aligned files hold one dialogue in both roles' views. The public ones (804 rows) have known defects: the finish
tag stands with the wrong role, most answers of meta lack it, and their system prompts are not those of training.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from cothink.conversations import Conversation, Conversations, NotHere, chat
from cothink.tasks import DataError, Row, data_root, read_rows
from cothink.types import Role

META, REASONING = "meta_thinking.jsonl", "reasoning.jsonl"
TAG = "[FINISH]"
BOX = "\\boxed"
FIRST = "Question:\n{question}\n\nInstruction:\n{text}"
"""What reasoning is told first, as `rema` says it."""

FACTS = {
    "tag_missing": "the last meta turn lacked the finish tag: added",
    "tag_misplaced": "the tag stood inside the last meta turn: moved to its end",
    "tag_early": "an earlier meta turn held the tag: cut",
    "tag_by_reasoning": "reasoning wrote the tag: cut, only meta may end a discussion",
    "other_prompt": "the stored system prompts are not those of the team: replaced",
    "leak": "meta wrote a box",
    "unboxed": "the last reasoning turn has no box",
    "early_box": "reasoning wrote a box before its last turn",
    "early_box_named": "reasoning spoke of a box, without one, before its last turn",
}
"""What a dialogue can be found to be, in words."""

_BRACKETED_TAG = re.compile(r"\s*\\[(\[]\s*" + re.escape(TAG) + r"\s*\\[)\]]")


@dataclass(frozen=True, slots=True)
class Dialogue:
    """One discussion: the question, and the texts (meta's, reasoning's) of each round."""

    id: str
    question: str
    rounds: tuple[tuple[str, str], ...]


def load(
    roles: Mapping[str, Role],
    *,
    path: str | None = None,
    meta: str = "meta",
    reasoning: str = "reasoning",
    drop: Sequence[Literal["leak", "unboxed", "early_box"]] = (),
) -> Conversations:
    """The views of every dialogue of the folder `path` (default: `cold_start` among the local data files).

    Texts are repaired, system prompts are those of `roles`; dialogues with a fact named in `drop` are left out.
    `meta` and `reasoning` name the team's roles. `counts` has one number for each of `FACTS`.
    """
    if meta not in roles and reasoning not in roles:
        raise DataError(f"dialogues: no role {meta!r} or {reasoning!r} to teach, only {', '.join(roles)}; write meta: "
                        "NAME or reasoning: NAME for the role that guides and the one that works")  # fmt: skip
    pair = [roles.get(meta), roles.get(reasoning)]
    counts: Counter[str] = Counter(dict.fromkeys(("dialogues", "rounds", *FACTS, "dropped"), 0))
    made: list[Conversation] = []
    for dialogue, systems in read(folder_of(path)):
        fixed, facts = repaired(dialogue)
        if any(role is not None and role.system != system for role, system in zip(pair, systems)):
            facts.add("other_prompt")
        counts.update(["dialogues", *facts])
        counts["rounds"] += len(fixed.rounds)
        if facts & set(drop):
            counts["dropped"] += 1
        else:
            made += views(fixed, *pair)
    notes = [f"{counts[fact]:,} of {counts['dialogues']:,} dialogues: {text}" + (", left out" if fact in drop else "")
             for fact, text in FACTS.items() if counts[fact]]  # fmt: skip
    return Conversations(made, counts, notes)


def folder_of(path: str | None) -> Path:
    """The folder of the two files; raises NotHere when one of them is not there."""
    folder = data_root() / "cold_start" if path is None else Path(path).expanduser()
    for name in (META, REASONING):
        if not (folder / name).is_file():
            fix = "set COTHINK_DATA to the data folder, or write path:" if path is None else "write path:"
            raise NotHere(f"no {name} in {folder}; {fix} with a folder that holds {META} and {REASONING}")
    return folder


def read(folder: Path) -> Iterator[tuple[Dialogue, tuple[str, str]]]:
    """Every dialogue as stored, and the system prompts (meta's, reasoning's) stored with it."""
    left, right = (list(read_rows(folder / name)) for name in (META, REASONING))
    if len(left) != len(right):
        raise DataError(f"{folder}: {META} has {len(left):,} rows and {REASONING} {len(right):,}; they belong in pairs")
    for k, (mine, theirs) in enumerate(zip(left, right)):
        heads, answers = _exchanges(mine, f"{META}, row {k}"), _exchanges(theirs, f"{REASONING}, row {k}")
        question = heads[0][0]
        rounds = tuple((said[1], answer[1]) for said, answer in zip(heads, answers))
        told = [FIRST.format(question=question, text=rounds[0][0]), *(m for m, _ in rounds[1:])]
        heard = [question, *(y for _, y in rounds[:-1])]
        if len(heads) != len(answers) or [a[0] for a in answers] != told or [h[0] for h in heads] != heard:
            raise DataError(f"{folder}, row {k}: the two files do not tell the same dialogue; their rows belong in "
                            "pairs, each role's text being what the other role is told next")  # fmt: skip
        yield Dialogue(f"dialogues/{k}", question, rounds), (str(mine.get("system")), str(theirs.get("system")))


def _exchanges(row: Row, where: str) -> list[tuple[str, str]]:
    """(told, answered) of each round of one role's view."""
    try:
        found = [*row["history"], [row["instruction"], row["output"]]]
        pairs = [(told, answer) for told, answer in found]
    except (KeyError, TypeError, ValueError):
        fix = "write history (a list of [user, assistant]), instruction and output"
        raise DataError(f"{where}: not a dialogue; {fix}") from None
    if not all(isinstance(text, str) for pair in pairs for text in pair):
        raise DataError(f"{where}: a text of the dialogue is not text")
    return pairs


def repaired(dialogue: Dialogue) -> tuple[Dialogue, set[str]]:
    """The dialogue with the tag at the end of meta's last text and nowhere else, and what was found in it."""
    *earlier, (last, final) = dialogue.rounds
    facts = {
        "tag_missing": TAG not in last,
        "tag_misplaced": TAG in last and not last.rstrip().endswith(TAG),
        "tag_early": any(TAG in m for m, _ in earlier),
        "tag_by_reasoning": any(TAG in y for _, y in dialogue.rounds),
        "leak": any(BOX in m for m, _ in dialogue.rounds),
        "unboxed": BOX not in final,
        "early_box": any(BOX in y for _, y in earlier),
        "early_box_named": any("boxed" in y for _, y in earlier) and not any(BOX in y for _, y in earlier),
    }
    kept = last if last.rstrip().endswith(TAG) and last.count(TAG) == 1 else f"{untagged(last)} {TAG}".lstrip()
    rounds = (*((untagged(m), untagged(y)) for m, y in earlier), (kept, untagged(final)))
    return replace(dialogue, rounds=rounds), {name for name, found in facts.items() if found}


def untagged(text: str) -> str:
    """A text without the finish tag and the white space or empty LaTeX bracket it leaves behind."""
    return _BRACKETED_TAG.sub("", text).replace(TAG, "").strip() if TAG in text else text


def views(dialogue: Dialogue, meta: Role | None, reasoning: Role | None) -> list[Conversation]:
    """The chats of the given roles, as `rema` would have built them."""
    told, *rest = [text for pair in dialogue.rounds for text in pair]
    asked = FIRST.format(question=dialogue.question, text=told)
    sides = ((meta, [dialogue.question, told, *rest[:-1]]), (reasoning, [asked, *rest]))
    return [
        Conversation(role.name, chat(role, texts), dialogue.id, dialogue.question)
        for role, texts in sides
        if role is not None
    ]


def stored(conversation: Conversation) -> dict[str, Any]:
    """A conversation as one row of the files that `read` reads."""
    system = conversation.messages[0].content if conversation.messages[0].role == "system" else ""
    texts = [m.content for m in conversation.messages if m.role != "system"]
    pairs = [[told, answer] for told, answer in zip(texts[::2], texts[1::2])]
    told, answer = pairs[-1]
    return {"instruction": told, "input": None, "output": answer, "system": system, "history": pairs[:-1]}
