"""Each role's influence: its messages are replaced by empty ones, and the team plays on from there."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from cothink.session import Session
from cothink.stages.answers import Answers, Row
from cothink.stages.diagnose import diagnose, silenced
from cothink.stages.evaluate import Sets, difference, measure_sets
from cothink.stages.summary import summarise
from cothink.types import Completion, Message, Sampling


class Silent:
    """Says nothing in a policy's place; prompts are read as that policy reads them."""

    def __init__(self, engine: Any, policy: str):
        self._engine, self._policy = engine, policy

    def codec(self, policy: str) -> Any:
        """The codec of the policy that is silent."""
        return self._engine.codec(self._policy)

    def load(self, policy: str, weights: Any, version: int) -> None:
        """Silence has no weights."""

    async def generate(
        self,
        policy: str,
        messages: Sequence[Message],
        prompt_ids: tuple[int, ...],
        sampling: Sampling,
        n: int,
        seed: int,
    ) -> list[Completion]:
        """`n` empty completions, as placeholders are: no tokens, never trained."""
        return [Completion("", tuple(prompt_ids), finish_reason="void")] * n


def without(session: Session, role: str) -> Session:
    """The session with one role silent; everyone else, and every seed, stays as it is."""
    seat, name = session.roles[role], f"silent {role}"
    engines = session.engines
    if seat.policy in engines:  # a session that only reads answers back has none
        engines = {**engines, name: Silent(engines[seat.policy], seat.policy)}
    return replace(session, roles={**session.roles, role: replace(seat, policy=name)}, engines=engines)


async def team(
    session: Session,
    sets: Sets,
    rows: Sequence[Row],
    *,
    k: int,
    temperature: float | None,
    seed: object,
    title: str,
    kept: Callable[[str], Answers],
) -> dict[str, Any]:
    """`diagnose` of the rows, and for each role what the same `k` plays come to without its messages (`silent`).

    Every call has the seed it had, so that the plays differ only by what the role said. `kept` holds the answers
    without a role.
    """
    tasks = {(name, task.id): task for name, found in sets.items() for task in found}
    found = await diagnose(rows, tasks)
    whole = summarise(rows)
    for role in silenced(rows):
        quiet, _ = await measure_sets(
            without(session, role), sets, episodes_per_task=k, temperature=temperature, seed=seed,
            title=f"{title} without {role}", answers=kept(role),
        )  # fmt: skip
        value = [quiet[name] for name in ("accuracy", "low", "high")]
        found["roles"][role]["silent"] = {"accuracy": value, "influence": difference(whole, quiet)}
    return found
