"""Does a judge mean what it says? Verdicts on the same pair in both orders."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

ORDERS = ("given", "swapped")


def pair_of(meta: Mapping[str, Any]) -> dict[str, str]:
    """What a row says of a task that is one order of a pair: `pair` and `order`; nothing of any other task."""
    return {key: meta[key] for key in ("pair", "order")} if "pair" in meta and "order" in meta else {}


def swap_consistency(rows: Iterable[Mapping[str, Any]]) -> dict[str, float | None] | None:
    """How verdicts hold when a pair's answers change places: rows of tasks loaded with `swap: both`; None without any.

    `pairs` counts pairs of plays, one in each order (the k-th play of one with the k-th of the other). Shares of
    them: `consistent` (both verdicts valid, for the same answer), `right` (both for the better one), `invalid` (one
    has no valid verdict). `first` is the share of valid verdicts for the answer that was shown first: .5 is unbiased,
    and None where there is no valid verdict.
    """
    plays: dict[tuple[str, str], dict[str, list[Mapping[str, Any]]]] = defaultdict(lambda: defaultdict(list))
    for row in rows:
        if "pair" in row:
            plays[row["set"], row["pair"]][row["order"]].append(row)
    both = [pair for orders in plays.values() for pair in zip(*(orders[order] for order in ORDERS))]
    if not both:
        return None
    said = [(one["answer"], two["answer"], one["gold"], two["gold"]) for one, two in both]
    valid = [v for one, two, *_ in said for v in (one, two) if v is not None]
    return {
        "pairs": len(said),
        "consistent": _share([None not in (one, two) and one != two for one, two, *_ in said]),
        "right": _share([(one, two) == (a, b) for one, two, a, b in said]),
        "invalid": _share([None in (one, two) for one, two, *_ in said]),
        "first": _share([v == "A" for v in valid]),
    }


def _share(values: Sequence[bool]) -> float | None:
    return sum(values) / len(values) if values else None
