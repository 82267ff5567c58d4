"""Turns become Samples: consecutive turns of one role merge as long as each prompt extends the last one exactly."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from cothink.types import Episode, Role, Sample, Turn

Advantage = float | Sequence[float] | None


@dataclass(slots=True)
class _Open:
    """A sample being assembled."""

    ids: list[int]
    turns: list[int]
    logprobs: list[float]
    advantages: list[float]
    turn_ids: list[str] = field(default_factory=list)
    version: int = 0
    schema: str | None = None


@dataclass(slots=True)
class Counts:
    """What assembly saw: turns whose prompt did not extend the role's own history, and placeholder turns."""

    breaks: int = 0
    placeholders: int = 0


def samples(
    episodes: Iterable[Episode], advantages: Mapping[tuple[str, str], Advantage], roles: Mapping[str, Role]
) -> tuple[list[Sample], Counts]:
    """Flat training rows from the sampled ids of every turn of a trainable role.

    `advantages` maps (episode id, turn id) to one number for the whole turn or one per token; a turn that is missing
    or None stays context. A turn shared by several branches of a tree is trained in exactly one sample. Samples
    without a trained token are left out.
    """
    done: list[Sample] = []
    counts = Counts()
    for episode in episodes:
        for name, role in roles.items():
            mine = [t for t in episode.turns if t.role == name]
            counts.placeholders += sum(not t.completion.output_ids for t in mine)
            if role.trainable:
                rows = _assemble(mine, episode, advantages, counts)
                done += [_close(row, role, episode) for row in rows if any(t >= 0 for t in row.turns)]
    return done, counts


def _assemble(
    mine: Sequence[Turn], episode: Episode, advantages: Mapping[tuple[str, str], Advantage], counts: Counts
) -> list[_Open]:
    rows: list[_Open] = []
    by_id = {t.id: t for t in episode.turns}
    index = 0
    for turn in mine:
        output, prompt = turn.completion.output_ids, turn.completion.prompt_ids
        if not output:
            continue
        row = next((r for r in reversed(rows) if _extends(prompt, r.ids)), None)
        if row is None:
            before = _own_history(turn, by_id)
            if before is not None and not _extends(
                prompt, (*before.completion.prompt_ids, *before.completion.output_ids)
            ):
                counts.breaks += 1
            row = _Open([], [], [], [])
            rows.append(row)
        _append(row, prompt[len(row.ids) :], -1, None, None)
        advantage = advantages.get((episode.id, turn.id))
        _append(row, output, -1 if advantage is None else index, turn.completion.logprobs, advantage)
        if advantage is not None:
            schema = turn.completion.schema
            if row.turn_ids and schema != row.schema:
                raise ValueError(f"role {turn.role}: turns under different schemas in one row; use one for all")
            row.schema = schema
            row.turn_ids.append(turn.id)
            row.version = turn.completion.version
            index += 1
    return rows


def _extends(prompt: Sequence[int], ids: Sequence[int]) -> bool:
    return len(prompt) >= len(ids) and list(prompt[: len(ids)]) == list(ids)


def _own_history(turn: Turn, by_id: Mapping[str, Turn]) -> Turn | None:
    """The role's nearest earlier turn on the line that leads to this one."""
    line = list(turn.parents)
    while line:
        parent = by_id[line.pop(0)]
        if parent.role == turn.role and parent.completion.output_ids:
            return parent
        line += parent.parents
    return None


def _append(row: _Open, ids: Sequence[int], turn: int, logprobs: Sequence[float] | None, advantage: Advantage) -> None:
    n = len(ids)
    row.ids += ids
    row.turns += [turn] * n
    if turn < 0 or advantage is None:
        row.logprobs += [0.0] * n
        row.advantages += [0.0] * n
        return
    values = [float(advantage)] * n if isinstance(advantage, int | float) else [float(a) for a in advantage]
    if logprobs is None or len(logprobs) != n or len(values) != n:
        got = 0 if logprobs is None else len(logprobs)
        raise ValueError(f"a turn of {n} tokens came with {got} log-probs and {len(values)} advantages")
    row.logprobs += logprobs
    row.advantages += values


def _close(row: _Open, role: Role, episode: Episode) -> Sample:
    return Sample(
        role.policy,
        role.name,
        f"{episode.id}/{role.name}",
        tuple(row.ids),
        tuple(row.turns),
        tuple(row.logprobs),
        tuple(row.advantages),
        episode.task.id,
        episode.id,
        tuple(row.turn_ids),
        row.version,
        role.sampling.temperature,
        episode.finish.reason,
        row.schema,
    )
