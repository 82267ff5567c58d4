"""Causal influence of a message: how much likelier it makes the turns that answer it (spec/credit.md 6.11)."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from cothink.counterfactual import influence
from cothink.session import Session
from cothink.team import Team, stable_seed
from cothink.types import Completion, Episode, PlayError, Turn


class _End(PlayError):
    """The record ends here: without the message the workflow asks for a turn that was never played."""


@dataclass
class _Without:
    """A memory in which every turn says what it said, but one says nothing; notes the prompts that follow."""

    turns: dict[str, Turn]
    silent: str
    heard: dict[str, tuple[int, ...]] = field(default_factory=dict)

    def recall(self, ids: Sequence[str], prompt: tuple[int, ...]) -> list[Completion]:
        """The completions of the record, as answers to this prompt."""
        said = [self.turns.get(name) for name in ids]
        if any(t is None for t in said):
            raise _End
        found = []
        for name, turn in zip(ids, said, strict=True):
            assert turn is not None
            self.heard[turn.id] = prompt
            quiet = Completion("", prompt, finish_reason="void")
            found.append(quiet if name == self.silent else replace(turn.completion, prompt_ids=prompt))
        return found

    def keep(self, turns: Sequence[Turn], place: int) -> None:
        """Everything is kept already."""

    def failed(self, parents: Sequence[str], role: str, error: Exception) -> None:
        """Nothing is asked of an engine."""


def _names(turns: Sequence[Turn]) -> dict[str, str]:
    """Turn id of a finished episode -> the id it had while it was played."""
    names: dict[str, str] = {}
    places: dict[tuple[Any, ...], int] = {}
    for t in turns:
        parents = tuple(names[p] for p in t.parents)
        place = places.get((parents, t.role), 0)
        places[parents, t.role] = place + 1
        names[t.id] = f"{stable_seed(*parents, t.role, place):016x}"
    return names


async def unheard(session: Session, episode: Episode, turn: str) -> dict[str, tuple[int, ...]]:
    """The prompts, by turn id, of an episode in which one turn said nothing and all others what they said."""
    names = _names(episode.turns)
    memory = _Without({names[t.id]: t for t in episode.turns}, names[turn])
    team = Team(session.roles, session.engines, memory=memory)
    with contextlib.suppress(PlayError):
        await session.workflow(episode.task, team)
    return memory.heard


async def figures(session: Session, episodes: Sequence[Episode]) -> dict[str, float]:
    """`ROLE/influence`: mean over the role's turns of log p(next turn) - log p(next turn without this one), in nats.

    Next turns are those that answer it, by the weights that sampled them; turns under a JSON schema and those of
    outside models are left out. One forward pass per turn.
    """
    rows: dict[str, list[tuple[Turn, Turn, str, tuple[int, ...]]]] = {}
    for e in episodes:
        for t in (t for t in e.turns if t.completion.output_ids):
            after = [n for n in e.turns if t.id in n.parents and _readable(session, n)]
            heard = await unheard(session, e, t.id) if after else {}
            for n in after:
                if n.id in heard:
                    rows.setdefault(n.policy, []).append((t, n, e.task.id, heard[n.id]))
    full: list[float] = []
    masked: list[float] = []
    said: list[Turn] = []
    steps: list[str] = []
    for policy, found in rows.items():
        masked += _logprobs(session, policy, [(n, prompt) for _, n, _, prompt in found])
        full += [sum(n.completion.logprobs) for _, n, _, _ in found]
        said += [t for t, _, _, _ in found]
        steps += [f"{task}/{t.role}/{t.round}" for t, _, task, _ in found]
    values = influence(full, masked, steps)[1]
    by_role: dict[str, list[float]] = {}
    for t, value in zip(said, values, strict=True):
        by_role.setdefault(t.role, []).append(value)
    return {f"{role}/influence": sum(v) / len(v) for role, v in by_role.items()}


def _readable(session: Session, turn: Turn) -> bool:
    known = hasattr(session.policies.get(turn.policy), "computing")
    return known and bool(turn.completion.output_ids) and turn.completion.schema is None


def _logprobs(session: Session, policy: str, rows: Sequence[tuple[Turn, tuple[int, ...]]]) -> list[float]:
    """Log-prob of each turn's tokens after another prompt."""
    import torch

    from cothink.batch import pad
    from cothink.types import Sample

    learner = session.policies[policy]
    learner.activate()
    found = []
    for turn, prompt in rows:  # one by one: prompts differ, and a metric must not need the memory of a batch
        ids = (*prompt, *turn.completion.output_ids)
        n, m = len(prompt), len(turn.completion.output_ids)
        zeros = (0.0,) * len(ids)
        heat = session.roles[turn.role].sampling.temperature
        row = Sample(policy, turn.role, "x", ids, (-1,) * n + (0,) * m, zeros, zeros, temperature=heat)
        with torch.no_grad():
            found.append(float(learner.logprobs(pad([row], [list(zeros)]).to(learner.device))[0].sum()))
    return found
