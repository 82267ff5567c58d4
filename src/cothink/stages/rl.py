"""The `rl` stage: gather episodes, credit, estimate, assemble, update; one step after the other."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from functools import cache, partial
from typing import Any

from cothink import counterfactual, credit
from cothink.estimators import group_metrics
from cothink.parts import RL
from cothink.ranks import undisturbed
from cothink.record import episode_row
from cothink.samples import samples
from cothink.session import Session, bound_estimator, bound_loss, bound_rewards, learners, learning_order
from cothink.stages import causal, gate, metrics
from cothink.stages.best import Best
from cothink.stages.evaluate import measure, sentence
from cothink.stages.gather import Gathered, gather
from cothink.stages.guard import Guard
from cothink.stages.phases import figures, ready
from cothink.stages.playing import engine_figures
from cothink.stages.rows import Progress, grown
from cothink.team import stable_seed
from cothink.types import Episode, ScoredTurn

TOKENS_KEPT = 16
"""Episodes of a step whose tokens are written one by one, with their log-probs: for all, files would grow fourfold."""


async def rl(session: Session, stage: RL, index: int) -> dict[str, Any]:
    """Trains the team for `stage.steps` steps, or as far as its budget or phases go; returns the last step's metrics.

    Resumes at the step of the run's last checkpoint. An interruption while the team plays (Ctrl-C, an engine that
    fails) leaves a checkpoint of the last finished step; one in the middle of an update leaves none, because its
    weights are half done. Raises NotReady where the team does not pass the
    stage's gate, Collapse when the watch stops the run.
    """
    here = Progress.of(_saved(session, index))
    rewards, estimator = bound_rewards(stage), bound_estimator(stage, here.memory)
    order = learning_order(session.trainable(), session.roles, stage)
    knobs = {name: _knobs(session, stage, name) for name in order}
    _keep_references(session, index, [n for n in order if getattr(knobs[n], "needs_reference", False)])
    save = partial(_checkpoint, session, index, here)
    guard = Guard(session, stage, index, here, order, save)
    best = Best(session, stage, index, here, order, save)
    if stage.gate is not None and here.tokens == 0:  # whoever has passed it has sampled
        await gate.check(session, stage, index, here)
    guard.begin()
    last: dict[str, Any] = {}
    while here.step < stage.steps and not _spent(stage, here):
        if stage.schedule.name == "phases" and not await ready(session, stage, index, here, order, save):
            break
        if grown(stage, session.tasks[stage.on], here):
            here.watch.reset()
        last = await _step(session, stage, index, here, rewards, estimator, order, knobs, save)
        try:
            if stage.evaluate is not None and here.step % stage.evaluate.every == 0:
                last |= await _evaluate(session, stage, index, here)
        except BaseException:
            _log(session, stage, index, here, last | guard.see(last))
            save(together=False)
            raise
        last |= guard.see(last)
        _log(session, stage, index, here, last)
        if not guard.act():
            best.hear(last)
        if stage.checkpoint_every and here.step % stage.checkpoint_every == 0:
            save()
    if here.step == 0:
        session.say(f"stage {index}: token_budget {stage.token_budget} was spent on the filter, before the first step")
    guard.end()
    best.end()
    save()
    return last


async def _step(
    session: Session,
    stage: RL,
    index: int,
    here: Progress,
    rewards: Sequence[Any],
    estimator: Any,
    order: Sequence[str],
    knobs: Mapping[str, Any],
    save: Callable[..., Any],
) -> dict[str, Any]:
    """One step: gather and learn; returns its metrics."""
    started = time.monotonic()
    before = (here.cursor, here.phase.cursor)
    epoch = here.cursor // max(1, len(session.tasks[stage.on]))
    learning = learners(order, stage, here.place, epoch, here.phase.number)
    found = figures(stage, here.phase, len(order)) if stage.schedule.name == "phases" else {}
    try:
        batch = await gather(session, stage, index, here, rewards)
    except BaseException:
        here.cursor, here.phase.cursor = before
        save(together=False)
        raise
    if stage.influence is not None and here.step % stage.influence.every == 0:  # by the weights that sampled
        found |= await causal.figures(session, batch.episodes[: stage.influence.episodes])
    gathered = time.monotonic()
    found |= engine_figures(session)
    found |= _learn(session, stage, index, here, batch, estimator, learning, knobs)
    if here.bound is not None:
        found["curriculum/most"] = here.bound
    here.step += 1
    here.place += 1
    here.tokens += batch.tokens
    return found | {
        "tokens_total": here.tokens,
        "seconds_collect": round(gathered - started, 3),
        "seconds_learn": round(time.monotonic() - gathered, 3),
    }


def _learn(
    session: Session,
    stage: RL,
    index: int,
    here: Progress,
    batch: Gathered,
    estimator: Any,
    learning: Sequence[str],
    knobs: Mapping[str, Any],
) -> dict[str, Any]:
    """Credit, advantages, samples and the optimiser steps of the policies whose turn it is."""
    order = list(range(len(batch.episodes)))
    random.Random(f"{session.recipe.seed}/mask/{index}/{here.step}").shuffle(order)
    settled = credit.settle_unfinished(batch.episodes, stage.unfinished, mask_cap=stage.mask_cap, order=order)
    scored, values = counterfactual.advantages(settled.episodes, stage.credit.name, stage.credit.gamma, estimator)
    advantages = {(t.episode, t.turn): a for t, a in zip(scored, values, strict=True)}
    rows, counts = samples(settled.episodes, advantages, session.roles)
    sampled = sum(len(t.completion.output_ids) for e in batch.episodes for t in e.turns)
    figures: dict[str, Any] = {
        **batch.figures,
        **group_metrics(scored),
        "masked": len(settled.masked),
        "mask_capped": float(settled.capped),
        "breaks": counts.breaks,
        "placeholders": counts.placeholders,
        "samples": len(rows),
        "trained_share": sum(s.trained for s in rows if s.policy in learning) / sampled if sampled else 0.0,
    }
    if scored:
        spoken = {(e.id, t.id): t.completion.logprobs for e in settled.episodes for t in e.turns}
        figures |= metrics.of_advantages(scored, advantages, spoken, stage.loss)
    for name in learning:
        mine = [s for s in rows if s.policy == name]
        if session.ranks.count > 1:  # another process may have sampled under a schema that none was needed for here
            for schema in sorted({s.schema for s in mine if s.schema is not None}):
                session.engines[name].grammar(name, schema)
        done = session.policies[name].update(
            mine, knobs=knobs[name], seed=stable_seed(session.recipe.seed, "update", index, here.step, name)
        )
        session.engines[name].load(name, None, session.policies[name].version)
        figures |= {f"{name}/{k}": v for k, v in done.items()}
    if session.run is not None:
        lines = _episode_lines(session, [*settled.episodes, *settled.masked], scored, advantages)
        session.run.episodes(f"{index:02d}-rl", here.step + 1, lines)
    return figures


def _episode_lines(
    session: Session,
    episodes: Sequence[Episode],
    scored: Sequence[ScoredTurn],
    advantages: Mapping[tuple[str, str], Any],
) -> Iterator[dict[str, Any]]:
    returns: dict[str, dict[str, float | None]] = {}
    for t in scored:
        returns.setdefault(t.episode, {})[t.turn] = t.value

    @cache
    def piece(policy: str, token: int) -> str:
        return session.engines[policy].codec(policy).decode((token,))

    for k, e in enumerate(episodes):
        mine = {t.id: advantages.get((e.id, t.id)) for t in e.turns}
        yield episode_row(e, returns.get(e.id), mine, piece if k < TOKENS_KEPT else None)


def _knobs(session: Session, stage: RL, policy: str) -> Any:
    """How a torch policy turns samples into steps; a table policy has no such knobs."""
    if hasattr(session.policies[policy], "probabilities"):
        return None
    from cothink.policy import Knobs

    options = stage.loss.options
    roles = sum(r.trainable and r.policy == policy for r in session.roles.values())
    return Knobs(
        loss=bound_loss(stage),
        aggregate=stage.loss.aggregate,
        turns_ref=stage.loss.turns_ref,
        length_ref=stage.loss.length_ref,
        updates=stage.updates_per_step,
        microbatch_tokens=stage.microbatch_tokens,
        role_balance=stage.role_balance,
        kl_stop=stage.kl_stop if stage.updates_per_step > 1 else None,
        needs_reference=options.get("kl", "none") != "none",
        entropy_in_loss=bool(options.get("entropy")),
        offpolicy=options.get("offpolicy", "none") != "none",
        planned_units=stage.tasks_per_step * stage.episodes_per_task * roles,
    )


def _spent(stage: RL, here: Progress) -> bool:
    return stage.token_budget is not None and here.tokens >= stage.token_budget


async def _evaluate(session: Session, stage: RL, index: int, here: Progress) -> dict[str, Any]:
    assert stage.evaluate is not None
    found: dict[str, Any] = {}
    if session.ranks.leads:
        values, _ = await measure(
            session,
            stage.evaluate.on,
            limit=stage.evaluate.limit,
            episodes_per_task=1,
            temperature=0.0,
            seed=("during", session.recipe.seed, index),
            title=f"test at step {here.step}",
        )
        session.say(f"  test: {sentence(values)}")
        found = {f"test/{k}": values[k] for k in ("accuracy", "low", "high", "n", "rounds")}
    return session.ranks.first(found)


def _log(session: Session, stage: RL, index: int, here: Progress, values: Mapping[str, Any]) -> None:
    if session.run is not None:
        session.run.metrics(index, here.step, values)
    if session.trackers is not None:
        session.trackers.log(values, here.step)
    seconds = values["seconds_collect"] + values["seconds_learn"]
    gap = max((v for k, v in values.items() if k.endswith("/engine_gap_max")), default=0.0)
    session.say(
        f"step {here.step:>4}/{stage.steps}  reward {values.get('reward', 0):+.3f}  "
        f"accuracy {values.get('accuracy', 0):.3f}  rounds {values.get('rounds', 0):.1f}  "
        f"kept {values['rows_kept']:.0f}/{values['rows_played']:.0f}  tokens {here.tokens:,}  "
        f"gap {gap:.0e}  {seconds:.1f} s"
    )


def _saved(session: Session, index: int) -> dict[str, Any]:
    state = session.run.state if session.run is not None else {}
    return dict(state.get("progress", {})) if state.get("stage") == index else {}


def _keep_references(session: Session, index: int, names: Sequence[str]) -> None:
    """Freezes the weights that KL terms measure from; the leading process writes what the others then read."""
    kept = None if session.run is None else session.run.folder / "reference" / f"stage{index:02d}"
    for turn in (True, False):
        for name in names if session.ranks.leads is turn else ():
            session.policies[name].keep_reference(kept)
        session.ranks.wait()


def _checkpoint(
    session: Session, index: int, here: Progress, name: str | None = None, *, together: bool = True
) -> None:
    """Saves the stage as it stands; before the first step there is nothing to save but what a filter found.

    Several processes save `together`. When something went wrong, the others may be gone: then the leading one saves
    what it has, alone.
    """
    nothing = here.step == 0 and name is None and not here.phase.counts and not here.phase.rates
    if session.run is None or nothing:
        return
    state = {"stage": index, "step": here.step, "progress": here.saved()}
    ranks = session.ranks
    if together:
        session.run.checkpoint(session.policies, state, here.kept, name)
        ranks.wait()
    elif ranks.leads:
        with undisturbed() if ranks.count > 1 else nullcontext():
            session.run.checkpoint(session.policies, state, here.kept, name)
