"""The data card: what a collection holds and what became of it, per role, as plain data and as Markdown."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from fractions import Fraction
from typing import Any

from cothink.trees import Tree
from cothink.trees.labels import Group, Labelled, Rules, groups, shape
from cothink.trees.rows import Row, pair_rows, sft_rows

MANY_COPIES = 0.3
"""Share of duplicate siblings above which sampling is too cold to compare anything (warned about)."""


def card(
    trees: Sequence[Tree],
    rules: Rules,
    *,
    taken: Mapping[str, Sequence[Row]] | None = None,
    branching: Sequence[int] | None = None,
) -> dict[str, Any]:
    """Facts of every role by name: labels, mixed parents, pairs, duplicates, answers, lengths, noise.

    `taken` are the rows that are trained after caps, by role. Counts of turns and labels are of the sampled turns,
    pairs and examples of what `rules` make of them.
    """
    plan = tuple(branching) if branching is not None else shape(trees)
    sampled = groups(trees, _literal(rules), plan)
    ready = groups(trees, rules, plan)
    tasks = len({tree.episode.task.id for tree in trees})
    roles = {
        role: _role(
            [g for g in sampled if g.role == role],
            [g for g in ready if g.role == role],
            rules,
            tasks,
            None if taken is None else list(taken.get(role, ())),
        )
        for role in dict.fromkeys(g.role for g in sampled)
    }
    leaves = math.prod(plan)
    return {
        "trees": len(trees),
        "tasks": tasks,
        "branching": list(plan),
        "complete_trees": sum(_leaves(tree, len(plan)) == leaves for tree in trees),
        "rules": {slot: getattr(rules, slot) for slot in rules.__slots__},
        "roles": roles,
        "warnings": list(_warnings(roles)),
    }


def _literal(rules: Rules) -> Rules:
    return Rules(rules.theta, rules.value, rules.pooling, "none", rules.min_scored, rules.complete_only)


def _leaves(tree: Tree, levels: int) -> int:
    from cothink.trees.labels import depths

    depth = depths(tree.episode.turns)
    return sum(level == levels - 1 and turn in tree.grades for turn, level in depth.items())


def _role(
    sampled: Sequence[Group], ready: Sequence[Group], rules: Rules, tasks: int, taken: list[Row] | None
) -> dict[str, Any]:
    turns = [m for g in sampled for m in g.members]
    labels = Counter(m.good for m in turns)
    parents = [g for g in ready if sum(m.good is not None for m in g.members) > 1]
    pairs = pair_rows(ready, rules)
    texts = [Counter(m.turn.completion.text.strip() for m in g.members) for g in sampled]
    copies = sum(count - 1 for counter in texts for count in counter.values())
    graded = [m for m in turns if m.turn.id in m.tree.grades]
    verdicts = Counter(m.tree.grades[m.turn.id].verdict for m in graded)
    found: dict[str, Any] = {
        "turns": len(turns),
        "good": labels[True],
        "bad": labels[False],
        "unlabelled": labels[None],
        "good_share": _share(labels[True], labels[True] + labels[False]),
        "stopped_on_length": sum(m.turn.completion.finish_reason == "length" for m in turns),
        "parents": len(parents),
        "mixed_parents": sum(g.mixed() for g in parents),
        "mixed_share": _share(sum(g.mixed() for g in parents), len(parents)),
        "pairs": len(pairs),
        "pairs_per_task": len(pairs) / tasks if tasks else 0.0,
        "examples_all_positive": len(sft_rows(ready, rules, "all_positive")),
        "examples_chosen_of_pairs": len(sft_rows(ready, rules, "chosen_of_pairs")),
        "duplicates": copies,
        "duplicate_share": _share(copies, len(turns)),
        "contradictory_texts": sum(_contradictory(g) for g in sampled),
        "verdicts": dict(verdicts),
        "unparsable_share": _share(verdicts["unparsable"], len(graded)),
        "right_but_bad": _crossed(graded, "right", False),
        "wrong_but_good": _crossed(graded, "wrong", True),
        "tokens": _quantiles([len(m.turn.completion.output_ids) for m in turns]),
        "chosen_minus_rejected_tokens": _quantiles([_longer(row) for row in pairs]),
        "label_noise": _noise(turns, rules),
    }
    if taken is not None:
        found["trained_examples"] = sum(row.kind == "sft" for row in taken)
        found["trained_pairs"] = sum(row.kind == "pair" for row in taken)
        found["trained_tasks"] = len({row.task_id for row in taken})
    return found


def _share(part: int, whole: int) -> float:
    return part / whole if whole else 0.0


def _crossed(graded: Sequence[Labelled], verdict: str, good: bool) -> int:
    return sum(m.good is good and m.tree.grades[m.turn.id].verdict == verdict for m in graded)


def _contradictory(group: Group) -> int:
    seen: dict[str, set[bool]] = {}
    for member in group.members:
        if member.good is not None:
            seen.setdefault(member.turn.completion.text.strip(), set()).add(member.good)
    return sum(len(labels) > 1 for labels in seen.values())


def _longer(row: Row) -> int:
    chosen, rejected = row.sides
    return len(chosen.completion_ids) - len(rejected.completion_ids)


def _quantiles(numbers: Sequence[int]) -> dict[str, float]:
    if not numbers:
        return {}
    ranked = sorted(numbers)
    at = {name: float(ranked[round(q * (len(ranked) - 1))]) for name, q in (("p10", 0.1), ("p50", 0.5), ("p90", 0.9))}
    return {"mean": sum(ranked) / len(ranked), **at}


def good_chance(p: float, leaves: int, theta: str = "0.5") -> float:
    """Chance that a turn is labelled good when each of its leaves is right with probability p, independently."""
    bar = Fraction(theta)
    return math.fsum(
        math.comb(leaves, k) * p**k * (1 - p) ** (leaves - k) for k in range(leaves + 1) if Fraction(k, leaves) > bar
    )


def _noise(turns: Sequence[Labelled], rules: Rules) -> float | None:
    """Mean chance that a label would turn if its leaves were drawn anew at the rate seen (k + 1) / (m + 2).

    None where nothing is drawn below a turn: the grade of a text is a function of it.
    """
    chances = []
    for m in turns:
        if m.good is None or m.leaves < 2:
            continue
        good = good_chance((float(m.right) + 1) / (m.leaves + 2), m.leaves, rules.theta)
        chances.append(1 - good if m.good else good)
    return math.fsum(chances) / len(chances) if chances else None


def _warnings(roles: Mapping[str, Mapping[str, Any]]) -> list[str]:
    found = []
    for role, facts in roles.items():
        if facts["duplicate_share"] > MANY_COPIES:
            share = f"{100 * facts['duplicate_share']:.0f} %"
            found.append(f"{share} of the turns of {role} repeat a sibling: sample at a higher temperature")
        if not facts["good"] or not facts["bad"]:
            word = "good" if facts["bad"] == 0 else "bad"
            found.append(f"every labelled turn of {role} is {word}: nothing to prefer")
    return found


def markdown(facts: Mapping[str, Any], title: str = "Data card") -> str:
    """The card as a page: one column a role."""
    roles = facts["roles"]
    keys = [k for k in next(iter(roles.values()), {}) if k != "verdicts"]
    rules = ", ".join(f"{k} {v}" for k, v in facts["rules"].items())
    lines = [
        f"# {title}", "",
        f"{facts['trees']:,} trees on {facts['tasks']:,} tasks, branching {facts['branching']}, "
        f"{facts['complete_trees']:,} of them complete. Labels: {rules}.", "",
        "| | " + " | ".join(roles) + " |", "|---|" + "---:|" * len(roles),
    ]  # fmt: skip
    words = {role: {**f, **{f"answers {v}": n for v, n in f["verdicts"].items()}} for role, f in roles.items()}
    keys += sorted({k for f in words.values() for k in f if k.startswith("answers ")})
    for key in keys:
        name = key.replace("_", " ")
        lines.append(f"| {name} | " + " | ".join(_cell(key, f.get(key)) for f in words.values()) + " |")
    lines += ["", *(f"- {warning}" for warning in facts["warnings"])]
    return "\n".join(lines).rstrip() + "\n"


def _cell(key: str, value: Any) -> str:
    if value is None or value == {}:
        return ""
    if isinstance(value, Mapping):
        return f"{value['mean']:.1f} ({value['p10']:.0f} to {value['p90']:.0f})"
    if key.endswith("_share") or key == "label_noise":
        return f"{100 * value:.1f} %"
    return f"{value:,}" if isinstance(value, int) else f"{value:.2f}"
