"""Good or bad: the value of every turn of a tree, and its label (MALT sections 3.2 and 3.3)."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from functools import cache
from numbers import Rational
from typing import Literal

from cothink import credit
from cothink.credit import Number
from cothink.trees import Tree
from cothink.types import Turn

Pooling = Literal["global", "local"]
Duplicates = Literal["merge", "drop_contradictory", "none"]
Value = Literal["subtree", "own"]


@dataclass(frozen=True, slots=True)
class Rules:
    """How turns are valued and labelled.

    A turn is good when its value is above `theta`, strictly. `value` is the mean over what follows (`subtree`), or the
    grade of the turn's own answer (`own`). `pooling` averages values (`global`) or the children's labels (`local`).
    `duplicates`: equal texts after one prompt become one (`merge`), are dropped where their labels differ
    (`drop_contradictory`), or stay (`none`). An inner turn needs `min_scored` scored children for a label, or with
    `complete_only` a whole subtree.
    """

    theta: str = "0.5"
    value: Value = "subtree"
    pooling: Pooling = "global"
    duplicates: Duplicates = "merge"
    min_scored: int = 2
    complete_only: bool = False


@dataclass(frozen=True, slots=True)
class Labelled:
    """A turn of a tree with its exact value and its label (None: not enough below it to say).

    `children` are the scores its value is the mean of, over all `copies` of its text; `leaves` counts the graded
    leaves below them, `right` those that are right. `good` is the label.
    """

    tree: Tree
    turn: Turn
    value: Number | None
    children: tuple[Number, ...]
    right: Number
    leaves: int
    good: bool | None
    copies: int = 1

    @property
    def pair(self) -> tuple[Number, int]:
        """The value as (k, m): right and total leaves, or the reduced fraction where subtrees are unequal."""
        assert self.value is not None
        if not isinstance(self.value, Rational):
            return self.value, 1
        if self.leaves and Fraction(self.right) / self.leaves == self.value:
            return int(self.right), self.leaves
        value = Fraction(self.value)
        return value.numerator, value.denominator


@dataclass(slots=True)
class Group:
    """Turns of one role that answer one prompt: what may be compared with one another."""

    task: str
    role: str
    depth: int
    members: list[Labelled] = field(default_factory=list)

    def mixed(self) -> bool:
        """Whether it holds both labels."""
        return {True, False} <= {m.good for m in self.members}


def depths(turns: Sequence[Turn]) -> dict[str, int]:
    """How many turns lie before each turn on its longest line."""
    found: dict[str, int] = {}
    for turn in turns:
        found[turn.id] = 1 + max((found[p] for p in turn.parents), default=-1)
    return found


def shape(trees: Iterable[Tree]) -> tuple[int, ...]:
    """Branching of each level: the most siblings that any turn of the trees has there."""
    most: dict[int, int] = {}
    for tree in trees:
        depth = depths(tree.episode.turns)
        counts: dict[tuple[tuple[str, ...], int], int] = {}
        for turn in tree.episode.turns:
            key = (turn.parents, depth[turn.id])
            counts[key] = counts.get(key, 0) + 1
            most[key[1]] = max(most.get(key[1], 0), counts[key])
    return tuple(most[level] for level in sorted(most))


def groups(trees: Sequence[Tree], rules: Rules, branching: Sequence[int] | None = None) -> list[Group]:
    """The labelled turns of all trees, by what may be compared; `branching` as planned (None: the most that was seen).

    Under `merge` a group is keyed by the prompt's ids, so that children of identical parents lie in one; its members
    are one representative per text. Otherwise by the parent turn. Trees may belong to several tasks and rounds.
    """
    plan = tuple(branching) if branching is not None else shape(trees)
    found: dict[tuple[object, ...], Group] = {}
    for tree in trees:
        depth = depths(tree.episode.turns)
        for one in _labelled(tree, rules, plan, depth):
            turn, level = one.turn, depth[one.turn.id]
            prompt = turn.completion.prompt_ids
            parent = (tree.episode.id, turn.parents)
            place = prompt if rules.duplicates == "merge" and prompt else parent
            key = (tree.round, tree.episode.task.id, turn.role, level, place)
            found.setdefault(key, Group(tree.episode.task.id, turn.role, level)).members.append(one)
    for group in found.values():
        if rules.duplicates == "merge":
            group.members = [_merged(copies, rules, plan, group.depth) for copies in _by_text(group.members)]
        elif rules.duplicates == "drop_contradictory":
            kept = [c for c in _by_text(group.members) if not {True, False} <= {m.good for m in c}]
            texts = {id(m) for copies in kept for m in copies}
            group.members = [m for m in group.members if id(m) in texts]
    return list(found.values())


def _by_text(members: Sequence[Labelled]) -> list[list[Labelled]]:
    texts: dict[str, list[Labelled]] = {}
    for member in members:
        texts.setdefault(member.turn.completion.text.strip(), []).append(member)
    return list(texts.values())


def _labelled(tree: Tree, rules: Rules, plan: Sequence[int], depth: Mapping[str, int]) -> Iterator[Labelled]:
    """Every turn of one tree with its value and label, copies kept apart."""
    turns, last = tree.episode.turns, len(plan) - 1
    own: dict[str, Number] = {
        t.id: _reward(tree, t) for t in turns if t.id in tree.grades and (rules.value == "own" or depth[t.id] == last)
    }
    if rules.value == "own":
        for turn in turns:
            value = own.get(turn.id)
            scores = () if value is None else (value,)
            yield _close(Labelled(tree, turn, value, scores, value or 0, len(scores), None), rules, plan, last)
        return
    values = credit.returns(turns, own)
    below: dict[str, list[Turn]] = {t.id: [] for t in turns}
    for turn in turns:
        for parent in turn.parents:
            below[parent].append(turn)
    done: dict[str, Labelled] = {}
    share: dict[str, Number | None] = {}  # what a turn counts for its parent: its value, or under local its label
    for turn in reversed(turns):
        children = [c for c in below[turn.id] if values[c.id] is not None]
        value = values[turn.id]
        if children:
            scores = tuple(share[c.id] for c in children)
            right = sum(done[c.id].right for c in children)
            leaves = sum(done[c.id].leaves for c in children)
        else:
            scores, right, leaves = (() if value is None else (value,)), value or 0, int(value is not None)
        one = Labelled(tree, turn, value, scores, right, leaves, None)  # type: ignore[arg-type]
        bit = _above(one.children, rules.theta)
        share[turn.id] = int(bit) if rules.pooling == "local" and bit is not None else value
        done[turn.id] = _close(one, rules, plan, depth[turn.id])
    yield from (done[t.id] for t in turns)


def _reward(tree: Tree, turn: Turn) -> Number:
    """1 for a right answer, else 0; custom scores of the turn stand in where it has some."""
    scores = [s.value for s in tree.episode.rewards if s.turn == turn.id]
    return math.fsum(scores) if scores else int(tree.grades[turn.id].verdict == "right")


def _above(scores: Sequence[Number], theta: str) -> bool | None:
    """Whether the mean of the scores is above theta, exactly for integers and Fractions."""
    mean = _mean(scores)
    return None if mean is None else mean > _bar(theta)


@cache
def _bar(theta: str) -> Fraction:
    return Fraction(theta)


def _mean(scores: Sequence[Number]) -> Number | None:
    if not scores:
        return None
    if all(isinstance(s, Rational) for s in scores):
        return Fraction(sum(scores)) / len(scores)  # type: ignore[arg-type]
    return math.fsum(float(s) for s in scores) / len(scores)


def _close(one: Labelled, rules: Rules, plan: Sequence[int], depth: int) -> Labelled:
    """The turn with its label, if there is enough below it for one."""
    planned = plan[depth + 1] if depth + 1 < len(plan) else 1
    whole = math.prod(plan[depth + 1 :]) * one.copies
    enough = len(one.children) >= min(rules.min_scored, planned)
    if one.value is None or not enough or (rules.complete_only and one.leaves < whole):
        return one
    return replace(one, good=_above(one.children, rules.theta))


def _merged(copies: Sequence[Labelled], rules: Rules, plan: Sequence[int], depth: int) -> Labelled:
    """One representative of equal texts: the first, with the mean over the children of all copies as its value."""
    if len(copies) == 1:
        return copies[0]
    # A copy that ended properly speaks for one that was cut off: the text is the same.
    ended = [c for c in copies if c.turn.completion.finish_reason == "stop"]
    first = (ended or list(copies))[0]
    scores = tuple(s for c in copies for s in c.children)
    weights = [(c.value, len(c.children)) for c in copies if c.value is not None]
    value = None
    if weights:
        total, count = sum(v * n for v, n in weights), sum(n for _, n in weights)
        value = Fraction(total) / count if isinstance(total, Rational) else total / count
    right, leaves = sum(c.right for c in copies), sum(c.leaves for c in copies)
    depth = depth if rules.value == "subtree" else len(plan) - 1
    return _close(Labelled(first.tree, first.turn, value, scores, right, leaves, None, len(copies)), rules, plan, depth)
