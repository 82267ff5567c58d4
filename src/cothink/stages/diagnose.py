"""Who in a team helps: accuracy after each turn, who fixed and who spoilt, copied text, and what checkers say.

Works on the rows of an evaluation, whatever the workflow: a turn counts with the answer that its text states, in a box
or behind a marker; a turn that states none leaves the answer of the turn it answers as it was (of several such turns,
the first that has one).
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from cothink import stats
from cothink.stages.answers import Row
from cothink.stages.summary import figure
from cothink.types import Task
from cothink.verify import averify_task
from cothink.votes import answer_of

COPIED = 5
"""Words in a row that count as copied where they stood in an earlier text."""
CHANGES = ("first_right", "first_wrong", "kept_right", "fixed", "spoilt", "stayed_wrong")
"""What a turn that states an answer did: to none, to a right one, or to a wrong one."""

_WORDS = re.compile(r"\w+|[^\w\s]")
_NOT = r"(?:not|isn't|never|n't)\s+(?:quite\s+|fully\s+)?"
_SAYS = re.compile(rf"(?P<no>{_NOT})?\b(?P<word>correct|right|incorrect|wrong)\b", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class State:
    """The team's answer as it stands after a turn, and whether it is right; `own` if that turn states it."""

    answer: str
    right: bool
    own: bool


States = Mapping[str, State | None]
"""Turn id -> the answer then, None while there is none."""


async def diagnose(rows: Sequence[Row], tasks: Mapping[tuple[str, str], Task]) -> dict[str, Any]:
    """The figures of all plays; `tasks` maps (set, task id) to the task. Plays without turns do not count."""
    plays = [(row, await states(row, tasks[row["set"], row["task"]])) for row in rows if row["turns"]]
    roles = dict.fromkeys(turn["role"] for row, _ in plays for turn in row["turns"] if turn["tokens"])
    total = sum(turn["tokens"] for row, _ in plays for turn in row["turns"])
    return {
        "turns": _after_turns(plays),
        "roles": {role: _role(role, plays, total) for role in roles},
    }


async def states(row: Row, task: Task) -> dict[str, State | None]:
    """The answer after every turn of a play; turns come after those they answer."""
    found: dict[str, State | None] = {}
    for turn in row["turns"]:
        text = _shown(turn)
        verdict = await averify_task(task, text) if turn["tokens"] else None
        if verdict is not None and verdict.verdict in ("right", "wrong"):
            stated = answer_of(task, text) or verdict.answer or ""
            found[turn["id"]] = State(stated, verdict.right, True)
        else:
            before = _before(turn, found)
            found[turn["id"]] = None if before is None else State(before.answer, before.right, False)
    return found


def _before(turn: Row, found: States) -> State | None:
    return next((state for p in turn["parents"] if (state := found.get(p)) is not None), None)


def _shown(turn: Row) -> str:
    return str(turn.get("shown", turn["text"]))


def _after_turns(plays: Sequence[tuple[Row, States]]) -> list[dict[str, Any]]:
    """For every role and round: turns, the share that states an answer, and accuracy if the play ended there."""
    right: dict[tuple[int, str], dict[Any, list[float]]] = defaultdict(lambda: defaultdict(list))
    states: Counter[tuple[int, str]] = Counter()
    for row, known in plays:
        for turn in row["turns"]:
            if not turn["tokens"]:
                continue
            key, state = (turn.get("round") or 0, turn["role"]), known[turn["id"]]
            right[key][row["set"], row["task"]].append(float(state is not None and state.right))
            states[key] += state is not None and state.own
    found = []
    for (round, role), questions in sorted(right.items(), key=lambda item: item[0][0]):
        n = sum(map(len, questions.values()))
        found.append({"role": role, "round": round + 1, "turns": n, "states": states[round, role] / n,
                      "accuracy": figure([sum(v) / len(v) for v in questions.values()])})  # fmt: skip
    return found


def _role(role: str, plays: Sequence[tuple[Row, States]], total: int) -> dict[str, Any]:
    """One role's share of the tokens, what it did to answers, what it copied and, if it checks others, how well."""
    changes: Counter[str] = Counter(dict.fromkeys(CHANGES, 0))
    net: dict[Any, list[float]] = defaultdict(list)
    tokens = 0
    for row, known in plays:
        for turn in (t for t in row["turns"] if t["role"] == role and t["tokens"]):
            tokens += turn["tokens"]
            state, before = known[turn["id"]], _before(turn, known)
            if state is not None and state.own:
                changes[_change(before, state)] += 1
            gained = float(state.right) - float(before.right) if before is not None and state is not None else 0.0
            net[row["set"], row["task"]].append(gained)
    gain = [sum(v) / len(v) for v in net.values()]
    return {
        "tokens": tokens / total,
        "changes": dict(changes),
        "net": [*stats.paired_bootstrap(gain)],
        **_copies(role, plays),
        "checks": _checks(role, plays),
    }


def _change(before: State | None, after: State) -> str:
    if before is None:
        return "first_right" if after.right else "first_wrong"
    if before.right:
        return "kept_right" if after.right else "spoilt"
    return "fixed" if after.right else "stayed_wrong"


def _copies(role: str, plays: Sequence[tuple[Row, States]]) -> dict[str, float]:
    """Shares of a role's runs of words that stand in the question, and in earlier turns but not in the question."""
    all_, asked, said = 0, 0, 0
    for row, _ in plays:
        question = _runs(str(row["question"]))
        heard: dict[str, set[tuple[str, ...]]] = {}  # by turn: everything said on the way to it
        for turn in row["turns"]:
            earlier = set().union(*(heard.get(p, set()) for p in turn["parents"]))
            mine = _runs(_shown(turn))
            heard[turn["id"]] = earlier | mine
            if turn["role"] == role:
                all_ += len(mine)
                asked += len(mine & question)
                said += len((mine & earlier) - question)
    return {"copied_question": asked / all_, "copied_turns": said / all_} if all_ else {}


def _runs(text: str) -> set[tuple[str, ...]]:
    words = _WORDS.findall(text.lower())
    return {tuple(words[k : k + COPIED]) for k in range(len(words) - COPIED + 1)}


def _checks(role: str, plays: Sequence[tuple[Row, States]]) -> dict[str, Any] | None:
    """How a role that reads answers and never gives the graded one judges them; None for other roles."""
    if any(turn["role"] == role and turn["id"] == row.get("graded") for row, _ in plays for turn in row["turns"]):
        return None
    counts: Counter[str] = Counter()
    for row, known in plays:
        for turn in (t for t in row["turns"] if t["role"] == role and t["tokens"]):
            before = _before(turn, known)
            if before is not None:
                said = accepts(_shown(turn), before, known[turn["id"]])
                counts[f"{_SAID[said]}_{'right' if before.right else 'wrong'}"] += 1
    if not counts:
        return None
    names = [f"{said}_{grade}" for said in _SAID.values() for grade in ("right", "wrong")]
    judged = sum(counts[name] for name in names if not name.startswith("silent"))
    agreed = counts["accepts_right"] + counts["rejects_wrong"]
    return {**{name: counts[name] for name in names}, "agreement": agreed / judged if judged else None}


_SAID = {True: "accepts", False: "rejects", None: "silent"}


def accepts(text: str, before: State, after: State | None) -> bool | None:
    """Whether a turn takes the answer before it for right.

    A turn that states an answer accepts if it is the same one; of other texts the last of the words correct, right,
    incorrect, wrong decides, turned around behind a `not`. None: it says neither.
    """
    if after is not None and after.own:
        return after.answer == before.answer or (after.right and before.right)
    said = [*_SAYS.finditer(text)]
    if not said:
        return None
    return (said[-1]["word"].lower() in ("correct", "right")) != bool(said[-1]["no"])


def silenced(rows: Iterable[Row]) -> list[str]:
    """The roles whose messages can be left out: all but one whose turn is the graded one in every play."""
    plays = [row for row in rows if row["turns"]]
    roles = dict.fromkeys(turn["role"] for row in plays for turn in row["turns"] if turn["tokens"])

    def always(role: str) -> bool:
        return all(any(t["role"] == role and t["id"] == row.get("graded") for t in row["turns"]) for row in plays)

    return [role for role in roles if not always(role)]
