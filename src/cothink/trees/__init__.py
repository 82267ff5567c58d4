"""Trees of alternatives become training data (MALT, arXiv 2412.01928): values, labels, rows, pairs and a data card.

Plain Python over Episodes: `labels` says which turns are good, `rows` makes examples and preference pairs of them,
`choice` caps and balances, `card` describes what came out.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from cothink.types import Episode


@dataclass(frozen=True, slots=True)
class Grade:
    """What the verifier said of one turn's own answer (right, wrong, unparsable, error), and the answer it read."""

    verdict: str
    answer: str | None = None


@dataclass(frozen=True, slots=True)
class Tree:
    """One played tree: an episode, the grade of every turn that has one, and where it comes from.

    `split` is the data split of its task, `round` counts collections from 0. `origin` holds facts of each role for the
    lineage of its rows (base model, sampling, hash of the prompt template, ...).
    """

    episode: Episode
    grades: Mapping[str, Grade]
    split: str = "train"
    round: int = 0
    origin: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
