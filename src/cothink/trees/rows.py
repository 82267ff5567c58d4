"""Labelled turns become examples and preference pairs, each with the lineage that says where it came from."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from fractions import Fraction
from typing import Any, Literal

from cothink.trees.labels import Group, Labelled, Rules
from cothink.types import Sample, Turn

Source = Literal["all_positive", "chosen_of_pairs"]
PairPolicy = Literal["all", "one_random", "max_margin", "min_gap"]


@dataclass(frozen=True, slots=True)
class Side:
    """One completion of a row: the turn it is, what it is worth, and how it was sampled."""

    turn: str
    text: str
    completion_ids: tuple[int, ...]
    label: bool
    value: tuple[float | int, int]
    scored_leaves: int
    copies_merged: int
    parsed_answer: str | None
    stop_reason: str
    weights_version: int


@dataclass(frozen=True, slots=True)
class Row:
    """An example (one side) or a preference pair (chosen, rejected), which share `prompt_ids`.

    `path` is the way from the question to here: (turn id, role, text) of every turn before. `group` names what the
    sides answer. `lineage` holds the settings that made the row and the facts of its role's origin.
    """

    row_id: str
    kind: Literal["sft", "pair"]
    task_id: str
    role: str
    policy: str
    round: int
    episode_id: str
    split: str
    path: tuple[tuple[str, str, str], ...]
    prompt_ids: tuple[int, ...]
    sides: tuple[Side, ...]
    group: str
    lineage: Mapping[str, Any] = field(default_factory=dict)

    def samples(self, policy: str | None = None) -> list[Sample]:
        """One Sample a side, chosen first; all of its completion is trained, its unit is the row's id."""
        found = []
        for side in self.sides:
            ids = (*self.prompt_ids, *side.completion_ids)
            turns = (-1,) * len(self.prompt_ids) + (0,) * len(side.completion_ids)
            zeros = (0.0,) * len(ids)
            made = Sample(
                policy or self.policy, self.role, self.row_id, ids, turns, zeros, zeros, self.task_id,
                self.episode_id, (side.turn,), side.weights_version,
            )  # fmt: skip
            found.append(made)
        return found

    def json(self) -> dict[str, Any]:
        """The row as plain data: every field of its lineage, flat; what a pair has twice is a list, chosen first."""
        plain = {k: v for k, v in asdict(self).items() if k not in ("sides", "path", "group", "lineage", "prompt_ids")}
        each = [asdict(side) for side in self.sides]
        many = {
            name: [side[key] for side in each] if len(each) > 1 else each[0][key]
            for name, key in (
                ("texts", "text"), ("completion_ids", "completion_ids"), ("labels", "label"), ("values", "value"),
                ("scored_leaves", "scored_leaves"), ("copies_merged", "copies_merged"),
                ("parsed_answers", "parsed_answer"), ("stop_reasons", "stop_reason"),
                ("weights_version", "weights_version"),
            )
        }  # fmt: skip
        masks = [[0] * len(self.prompt_ids) + [1] * len(side.completion_ids) for side in self.sides]
        return {
            **plain,
            "parent_turn_ids": [turn for turn, _, _ in self.path],
            "path": [{"turn": turn, "role": role, "text": text} for turn, role, text in self.path],
            "turn_ids": [side.turn for side in self.sides],
            "prompt_ids": list(self.prompt_ids),
            "loss_mask": masks if len(masks) > 1 else masks[0],
            **many,
            **self.lineage,
        }


def sft_rows(
    groups: Iterable[Group], rules: Rules, source: Source = "all_positive", facts: Mapping[str, Any] | None = None
) -> list[Row]:
    """The good turns (`all_positive`), or those that some sibling is worse than (`chosen_of_pairs`), each text once.

    What stopped on length is never an example. `facts` join the lineage of every row.
    """
    made = []
    for group in groups:
        seen: set[str] = set()
        for member in group.members:
            if not _example(member) or (source == "chosen_of_pairs" and not group.mixed()):
                continue
            text = member.turn.completion.text.strip()
            if source == "chosen_of_pairs" and text in seen:
                continue
            seen.add(text)
            extra = {"sft_source": source, "pair_policy": None, **(facts or {})}
            made.append(_row("sft", [member], group, rules, extra))
    return made


def _example(member: Labelled) -> bool:
    return bool(member.good) and member.turn.completion.finish_reason != "length"


def pair_rows(
    groups: Iterable[Group],
    rules: Rules,
    policy: PairPolicy = "all",
    *,
    min_gap: str = "0",
    seed: int = 0,
    facts: Mapping[str, Any] | None = None,
) -> list[Row]:
    """Good x bad within every group (`all`), or the seeded one, the one of the widest value gap, or those of `min_gap`.

    What stopped on length is never chosen.
    """
    made = []
    for group in groups:
        pairs = [(c, r) for c in group.members if _example(c) for r in group.members if r.good is False]
        extra = {"sft_source": None, "pair_policy": policy, **(facts or {})}
        made += [_row("pair", both, group, rules, extra) for both in _kept(pairs, group, policy, min_gap, seed)]
    return made


def _kept(
    pairs: list[tuple[Labelled, Labelled]], group: Group, policy: PairPolicy, min_gap: str, seed: int
) -> Sequence[tuple[Labelled, Labelled]]:
    if policy == "all" or not pairs:
        return pairs
    if policy == "one_random":
        return [random.Random(f"{seed}/pair/{_place(group)}").choice(pairs)]
    if policy == "max_margin":
        return [min(pairs, key=lambda p: (-_gap(p), natural(p[0].turn.id), natural(p[1].turn.id)))]
    return [pair for pair in pairs if _gap(pair) >= Fraction(min_gap)]


def _gap(pair: tuple[Labelled, Labelled]) -> Any:
    chosen, rejected = (side.value for side in pair)
    assert chosen is not None and rejected is not None
    return chosen - rejected


def natural(turn: str) -> tuple[int, str]:
    """A sort key of turn ids that puts 9 before 10."""
    return len(turn), turn


def _place(group: Group) -> str:
    first = group.members[0]
    return f"{first.tree.round}/{first.tree.episode.id}/{group.role}/{'+'.join(first.turn.parents)}"


def _row(
    kind: Literal["sft", "pair"], members: Sequence[Labelled], group: Group, rules: Rules, extra: Mapping[str, Any]
) -> Row:
    first = members[0]
    tree, turn = first.tree, first.turn
    episode = tree.episode
    digest = hashlib.blake2b(digest_size=8)
    for part in (kind, tree.round, group.role, *(f"{m.tree.episode.id}/{m.turn.id}" for m in members)):
        digest.update(f"{part}\x1f".encode())
    lineage = {
        "dataset": episode.task.id.partition("/")[0],
        "theta": rules.theta,
        "value_of": rules.value,
        "pooling": rules.pooling,
        "duplicates": rules.duplicates,
        **tree.origin.get(group.role, {}),
        **extra,
    }
    return Row(
        digest.hexdigest(), kind, episode.task.id, group.role, turn.policy, tree.round, episode.id, tree.split,
        tuple((t.id, t.role, t.completion.text) for t in line(turn, episode.turns)), turn.completion.prompt_ids,
        tuple(_side(m) for m in members), _place(group), lineage,
    )  # fmt: skip


def line(turn: Turn, turns: Sequence[Turn]) -> list[Turn]:
    """The turns before one, from the root on; of a join every branch, in the order they were played."""
    by_id = {t.id: t for t in turns}
    found: set[str] = set()
    todo = list(turn.parents)
    while todo:
        name = todo.pop()
        if name not in found:
            found.add(name)
            todo += by_id[name].parents
    return [t for t in turns if t.id in found]


def _side(member: Labelled) -> Side:
    done = member.turn.completion
    grade = member.tree.grades.get(member.turn.id)
    return Side(
        member.turn.id, done.text, done.output_ids, bool(member.good), member.pair, member.leaves, member.copies,  # type: ignore[arg-type]
        None if grade is None else grade.answer, done.finish_reason, done.version,
    )  # fmt: skip


def told(row: Row) -> Iterator[str]:
    """A row in words, line by line: the way to it, and its sides with value and label."""
    yield f"{row.kind} {row.row_id} of {row.role}, task {row.task_id}, round {row.round}, episode {row.episode_id}"
    for turn, role, text in row.path:
        yield f"  {role} ({turn}): {text}"
    for side in row.sides:
        right, total = side.value
        word = "good" if side.label else "bad"
        yield f"  {row.role} ({side.turn}), {word} at {right}/{total}: {side.text}"
