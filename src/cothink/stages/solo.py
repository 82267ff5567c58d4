"""The solo arm: the rows of a step once more, with the guide silent, by the weights of this very step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from cothink.counterfactual import with_bonus
from cothink.parts import RL
from cothink.session import Session
from cothink.stages.influence import without
from cothink.stages.playing import generated, play_tasks
from cothink.types import Episode, Task


@dataclass
class Solo:
    """Mean accuracy without the guide by task id, and what it cost."""

    accuracy: dict[str, float] = field(default_factory=dict)
    tokens: int = 0

    async def set_against(
        self, session: Session, stage: RL, rows: Sequence[Task], seed: object, episodes: Sequence[Episode]
    ) -> list[Episode]:
        """Plays the rows without the guide, each call with its old seed; the team's `episodes` with the bonus."""
        guide, strength, bonus = str(stage.credit.guide), stage.credit.strength, stage.credit.bonus
        _check(guide, episodes)
        plays = stage.credit.solo_plays or stage.episodes_per_task
        played = await play_tasks(without(session, guide), rows, plays, seed)
        self.tokens += generated(played.episodes)
        by_task: dict[str, list[float]] = {}
        for e in played.episodes:
            by_task.setdefault(e.task.id, []).append(e.accuracy or 0.0)
        self.accuracy |= {name: sum(values) / len(values) for name, values in by_task.items()}
        return with_bonus(episodes, self.accuracy, guide, strength, bonus)

    def figures(self, episodes: Sequence[Episode]) -> dict[str, float]:
        """Accuracy without the guide, and what the guide adds, over the rows of `episodes` that came through."""
        both = [(e.accuracy or 0.0, self.accuracy[e.task.id]) for e in episodes if e.task.id in self.accuracy]
        if not both:
            return {}
        joint, solo = (sum(column) / len(both) for column in zip(*both, strict=True))
        return {"solo/accuracy": solo, "solo/gain": joint - solo}


def _check(guide: str, episodes: Sequence[Episode]) -> None:
    """Raises ValueError where the guide's own text was graded: without it there is no answer to compare with."""
    for e in episodes:
        if any(t.id == e.finish.turn and t.role == guide for t in e.turns):
            raise ValueError(
                f"credit.guide {guide!r} gave the graded answer of {e.id}: silent, there is none; name another role"
            )
