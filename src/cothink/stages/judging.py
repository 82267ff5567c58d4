"""Does a judge mean what it says? Verdicts on the same pair in both orders."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence

from cothink.types import Episode
from cothink.verify import find_verdict


def swap_consistency(episodes: Iterable[Episode]) -> dict[str, float | None]:
    """How verdicts hold when a pair's answers change places: tasks loaded with `swap: both`.

    `pairs` counts pairs of plays, one in each order (the k-th play of one with the k-th of the other). Shares of
    them: `consistent` (both verdicts valid, for the same answer), `right` (both for the better one), `invalid` (one
    has no valid verdict). `first` is the share of valid verdicts for the answer that was shown first: .5 is unbiased.
    A share of nothing is None.
    """
    plays: dict[str, dict[str, list[Episode]]] = defaultdict(lambda: defaultdict(list))
    for episode in episodes:
        meta = episode.task.meta
        if "pair" in meta and "order" in meta:
            plays[meta["pair"]][meta["order"]].append(episode)
    said = [
        (find_verdict(one.finish.text), find_verdict(two.finish.text), one.task.answer, two.task.answer)
        for orders in plays.values()
        for one, two in zip(orders["given"], orders["swapped"])
    ]
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
