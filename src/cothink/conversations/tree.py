"""What the trees of a `collect` stage teach (MALT): examples of every role for sft, preference pairs for dpo."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from cothink.conversations import Conversations, NotHere
from cothink.tasks import DataError
from cothink.trees import Tree
from cothink.trees.card import card, markdown
from cothink.trees.choice import MAX_ROWS, Balance, choose, difficulties, per_task
from cothink.trees.labels import Duplicates, Group, Pooling, Rules, Value, groups
from cothink.trees.rows import PairPolicy, Row, Source, pair_rows, sft_rows
from cothink.types import Role

PerTask = int | dict[str, int] | None | Literal["default"]
TEST_SPLITS = ("test", "dev", "validation")


class Pairs(list[Row]):
    """Preference rows, with the data card they come from (`facts`) and notes in words."""

    def __init__(self, rows: Sequence[Row], facts: Mapping[str, Any], notes: Sequence[str] = ()) -> None:
        super().__init__(rows)
        self.facts, self.notes = facts, tuple(notes)


def load(
    roles: Mapping[str, Role],
    *,
    store: str | list[str] | None = None,
    earlier: bool = False,
    theta: float = 0.5,
    theta_by_round: list[float] | None = None,
    value: Value = "subtree",
    pooling: Pooling = "global",
    duplicates: Duplicates = "merge",
    min_scored_children: int = 2,
    complete_only: bool = False,
    sft_source: Source = "all_positive",
    max_rows_per_role: int | None = MAX_ROWS,
    max_rows_per_task: PerTask = "default",
    balance: Balance = "round_robin",
    seed: int = 0,
) -> Conversations:
    """The good turns of every role, as they were sampled; see `trees.labels.Rules` for what is good.

    `store` is a folder of collected trees (None: those of the last collect stage before; `earlier` adds all before
    it). `theta_by_round` gives each collection its own threshold. `max_rows_per_task` None lifts the cap, `default` is
    2 for a generator and 4 for others. Raises DataError where a role is left without examples.
    """
    rules = _rules(theta, theta_by_round, value, pooling, duplicates, min_scored_children, complete_only)
    facts = _facts(max_rows_per_role, max_rows_per_task, balance, seed)

    def make(found: Sequence[Group], rule: Rules) -> list[Row]:
        return sft_rows(found, rule, sft_source, facts)

    taken, told = _taken(roles, store, earlier, rules, make, max_rows_per_role, max_rows_per_task, balance, seed)
    rows = [row for mine in taken.values() for row in mine]
    _named(roles, taken, told, "example")
    samples = [sample for row in rows for sample in row.samples()]
    found = Conversations(samples, {f"{role}_good": f["good"] for role, f in told["roles"].items()}, told["warnings"])
    found.lineage = {row.row_id: row.json() for row in rows}
    found.facts = told
    return found


def pairs(
    roles: Mapping[str, Role],
    *,
    store: str | list[str] | None = None,
    earlier: bool = False,
    theta: float = 0.5,
    theta_by_round: list[float] | None = None,
    value: Value = "subtree",
    pooling: Pooling = "global",
    duplicates: Duplicates = "merge",
    min_scored_children: int = 2,
    complete_only: bool = False,
    pair_policy: PairPolicy = "all",
    min_gap: float | None = None,
    max_rows_per_role: int | None = MAX_ROWS,
    max_rows_per_task: PerTask = "default",
    balance: Balance = "round_robin",
    seed: int = 0,
) -> Pairs:
    """Good turns beside bad ones that answer the same prompt; options as those of `load`.

    `pair_policy`: all pairs, one at random or the one of the widest gap per prompt, or those whose values differ by
    `min_gap` at least. Raises DataError where a role is left without pairs.
    """
    rules = _rules(theta, theta_by_round, value, pooling, duplicates, min_scored_children, complete_only)
    _gap(pair_policy, min_gap)
    facts = _facts(max_rows_per_role, max_rows_per_task, balance, seed)

    def make(found: Sequence[Group], rule: Rules) -> list[Row]:
        return pair_rows(found, rule, pair_policy, min_gap=str(min_gap or 0), seed=seed, facts=facts)

    taken, told = _taken(roles, store, earlier, rules, make, max_rows_per_role, max_rows_per_task, balance, seed)
    _named(roles, taken, told, "pair")
    return Pairs([row for mine in taken.values() for row in mine], told, told["warnings"])


def complaint(options: Mapping[str, Any]) -> str | None:
    """What contradicts what among the options of `load` or `pairs`, before there is any tree; None if nothing does."""
    known = {
        "theta": 0.5, "theta_by_round": None, "value": "subtree", "pooling": "global", "duplicates": "merge",
        "min_scored_children": 2, "complete_only": False,
    }  # fmt: skip
    try:
        _rules(*(options.get(name, default) for name, default in known.items()))
        _gap(options.get("pair_policy", "all"), options.get("min_gap"))
    except DataError as error:
        return str(error)
    return None


def _gap(policy: str, gap: float | None) -> None:
    if (gap is None) == (policy == "min_gap"):
        raise DataError("tree: pair_policy min_gap and min_gap: NUMBER go together; write both or none")


def _rules(
    theta: float,
    by_round: Sequence[float] | None,
    value: Value,
    pooling: Pooling,
    duplicates: Duplicates,
    min_scored: int,
    complete_only: bool,
) -> list[Rules]:
    """The rules of every round, the last one for all rounds after it."""
    thetas = [theta] if by_round is None else [*by_round]
    if by_round is not None and theta != 0.5:
        raise DataError("tree: theta does nothing beside theta_by_round; remove one of them")
    if not thetas or not all(0 <= t < 1 for t in thetas):
        raise DataError(f"tree: theta {thetas}: write numbers from 0 to below 1, such as 0.5")
    if min_scored < 1:
        raise DataError(f"tree: min_scored_children {min_scored}; it must be at least 1")
    if value == "own" and (pooling != "global" or min_scored != 2 or complete_only):
        what = "pooling, min_scored_children and complete_only do nothing for value: own"
        raise DataError(f"tree: {what}, which looks at one turn alone; remove them")
    return [Rules(str(t), value, pooling, duplicates, min_scored, complete_only) for t in thetas]


def _facts(most: int | None, each: Any, balance: str, seed: int) -> dict[str, Any]:
    """The settings of the choice, and their hash, for the lineage of the rows."""
    chosen = {"max_rows_per_role": most, "max_rows_per_task": each, "balance": balance, "selection_seed": seed}
    return {**chosen, "selection_hash": hashlib.blake2b(json.dumps(chosen).encode(), digest_size=8).hexdigest()}


def _taken(
    roles: Mapping[str, Role],
    store: str | list[str] | None,
    earlier: bool,
    rules: Sequence[Rules],
    make: Callable[[Sequence[Group], Rules], list[Row]],
    most: int | None,
    each: Any,
    balance: Balance,
    seed: int,
) -> tuple[dict[str, list[Row]], dict[str, Any]]:
    """The rows of every role after caps, and the data card."""
    trees = _trees(store, earlier)
    rule_of = {k: rules[min(k, len(rules) - 1)] for k in {tree.round for tree in trees}}
    parts = {k: [tree for tree in trees if tree.round == k] for k in sorted(rule_of)}
    found = {k: groups(part, rule_of[k]) for k, part in parts.items()}
    rows = [row for k, part in found.items() for row in make(part, rule_of[k])]
    hard = difficulties([g for part in found.values() for g in part])
    taken = {}
    for role in roles:
        mine = [row for row in rows if row.role == role]
        taken[role] = choose(
            mine, most=most, each=per_task(each, role), balance=balance, difficulty=hard, seed=seed
        )  # fmt: skip
    last = max(parts)
    return taken, card(parts[last], rule_of[last], taken=taken)


def _trees(store: str | list[str] | None, earlier: bool) -> list[Tree]:
    from cothink import store as stores

    folders = [store] if isinstance(store, str) else list(store or ())
    if not folders:
        raise NotHere("the trees of the recipe's own collect stage, which has not run yet")
    trees = []
    for folder in folders if earlier else folders[-1:]:
        if not Path(folder).is_dir():
            raise NotHere(f"no trees at {folder}: run the collect stage first, or write store: FOLDER")
        trees += stores.load(folder)
    if not trees:
        raise DataError(f"tree: no tree is complete enough to be used in {folders[-1]}; let the collect stage finish")
    seen = next((tree for tree in trees if tree.split in TEST_SPLITS), None)
    if seen is not None:
        task = seen.episode.task.id
        raise DataError(f"tree: task {task} is of the split {seen.split!r}, which is never trained on; collect on "
                        "the training split")  # fmt: skip
    return trees


def _named(roles: Mapping[str, Role], taken: Mapping[str, Sequence[Row]], told: Mapping[str, Any], what: str) -> None:
    for role in roles:
        if taken.get(role):
            continue
        facts = told["roles"].get(role)
        if facts is None:
            raise DataError(f"tree: the trees hold no turn of {role!r}; they hold {', '.join(told['roles'])}")
        raise DataError(
            f"tree: no {what} for the role {role!r}: of its {facts['turns']} turns {facts['good']} are good, "
            f"{facts['bad']} bad and {facts['unlabelled']} unlabelled, {facts['mixed_parents']} of "
            f"{facts['parents']} prompts have both; collect on more or other tasks, or leave the role out"
        )


def pages(facts: Mapping[str, Any], title: str) -> dict[str, str]:
    """The data card as files: JSON and Markdown, by ending."""
    return {"json": json.dumps(facts, indent=2, ensure_ascii=False), "md": markdown(facts, title)}
