"""The `rl` stage: play, grade, score, filter, credit, estimate, assemble, update; one step after the other."""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from cothink import credit
from cothink.estimators import group_metrics
from cothink.parts import RL
from cothink.record import episode_row
from cothink.rewards import score
from cothink.samples import samples
from cothink.session import Session, bound_estimator, bound_loss, bound_rewards, learners, learning_order
from cothink.stages import metrics
from cothink.stages.evaluate import measure, sentence
from cothink.stages.playing import generated, play_tasks, prompted
from cothink.stages.progress import bar
from cothink.team import stable_seed
from cothink.types import Episode, ScoredTurn, Task


@dataclass
class Progress:
    """Where an rl stage stands; all of it is saved with every checkpoint."""

    step: int = 0
    cursor: int = 0
    tokens: int = 0
    memory: dict[str, float] = field(default_factory=dict)


async def rl(session: Session, stage: RL, index: int) -> dict[str, Any]:
    """Trains the team for `stage.steps` steps and returns the last step's metrics.

    Resumes at the step of the run's last checkpoint. An interruption while the team plays (Ctrl-C, an engine that
    fails) leaves a checkpoint of the last finished step; one in the middle of an update leaves none, because its
    weights are half done.
    """
    here = Progress(**_saved(session, index))
    rewards, estimator = bound_rewards(stage), bound_estimator(stage, here.memory)
    order = learning_order(session.trainable(), session.roles, stage)
    knobs = {name: _knobs(session, stage, name) for name in order}
    for name in order:
        if getattr(knobs[name], "needs_reference", False):
            kept = None if session.run is None else session.run.folder / "reference" / f"stage{index:02d}"
            session.policies[name].keep_reference(kept)
    last: dict[str, Any] = {}
    while here.step < stage.steps and not _spent(stage, here):
        started = time.monotonic()
        learning = learners(order, stage, here.step)
        mark = here.cursor
        try:
            batch = await _collect(session, stage, index, here, rewards)
        except BaseException:
            here.cursor = mark
            _checkpoint(session, index, here)
            raise
        collected = time.monotonic()
        last = _learn(session, stage, index, here, batch, estimator, learning, knobs)
        here.step += 1
        here.tokens += batch.tokens
        last |= {
            "tokens_total": here.tokens,
            "seconds_collect": round(collected - started, 3),
            "seconds_learn": round(time.monotonic() - collected, 3),
        }
        if stage.evaluate is not None and here.step % stage.evaluate.every == 0:
            try:
                last |= await _evaluate(session, stage, index, here)
            except BaseException:
                _log(session, stage, index, here, last)
                _checkpoint(session, index, here)
                raise
        _log(session, stage, index, here, last)
        if stage.checkpoint_every and here.step % stage.checkpoint_every == 0:
            _checkpoint(session, index, here)
    _checkpoint(session, index, here)
    return last


@dataclass
class Collected:
    """One step's episodes: those to learn from, and figures of everything that was played."""

    episodes: list[Episode]
    figures: dict[str, float]
    tokens: int


async def _collect(session: Session, stage: RL, index: int, here: Progress, rewards: Sequence[Any]) -> Collected:
    """Plays rows until `tasks_per_step` whole groups pass the filter, or `oversample_max` times as many were played."""
    kept: list[Episode] = []
    figures: dict[str, float] = {}
    tokens, groups, played_rows, failures = 0, 0, 0, Counter()
    if not session.tasks[stage.on]:
        raise ValueError(f"tasks.{stage.on} is empty: nothing to train on")
    most = min(
        max(stage.tasks_per_step, int(stage.oversample_max * stage.tasks_per_step)), len(session.tasks[stage.on])
    )
    seen: set[int] = set()
    while groups < stage.tasks_per_step and played_rows < most:
        want = min(stage.tasks_per_step if not groups else stage.tasks_per_step - groups, most - played_rows)
        rows = _next_tasks(session, stage, index, here, want, seen)
        with bar(session.console, f"step {here.step + 1}/{stage.steps}", len(rows) * stage.episodes_per_task) as show:
            seed = (session.recipe.seed, "rl", index, here.step, played_rows)
            played = await play_tasks(session, rows, stage.episodes_per_task, seed, on_done=show)
        played_rows += len(rows)
        failures.update(f.kind for f in played.failures)
        tokens += generated(played.episodes)
        episodes = await score(played.episodes, rewards)
        if episodes and not any(e.rewards for e in episodes):
            names = ", ".join(r.name + (f" (role {r.role})" if r.role else "") for r in rewards)
            raise ValueError(
                f"no reward applied to any turn of {len(episodes)} episodes: {names}. answer.correct and answer.sparse "
                "score the graded turn only: leave `role` out, and write `to: ROLE` to credit one role"
            )
        if not figures:  # the first round is the unfiltered, on-policy batch
            figures = metrics.of_episodes(episodes) | {"prompt_tokens": float(prompted(episodes))}
            figures |= _reward_figures(episodes)
        good = _filtered(stage, credit.drop_void(episodes) if stage.void_filter else episodes)
        groups += len({e.task.id for e in good})
        kept += good
        if stage.filter.name == "none":
            break
    figures |= {
        "rows_played": float(played_rows),
        "rows_kept": float(groups),
        "share_kept": groups / played_rows if played_rows else 0.0,
        **{f"failed/{kind}": float(count) for kind, count in failures.items()},
    }
    return Collected(kept, figures, tokens)


def _filtered(stage: RL, episodes: Sequence[Episode]) -> list[Episode]:
    """The episodes of the groups that pass; the unshaped accuracy decides, whole groups only."""
    groups: dict[str, list[Episode]] = {}
    for e in episodes:
        groups.setdefault(e.task.id, []).append(e)
    rule = stage.filter
    if rule.name == "none":
        return list(episodes)
    if rule.name == "spread":
        totals = {k: [sum(s.value for s in e.rewards) for e in v] for k, v in groups.items()}
        names = credit.spread_filter(totals, rule.top_p)
    else:
        right = {k: [e.accuracy or 0.0 for e in v] for k, v in groups.items()}
        keep = credit.accuracy_filter if rule.name == "accuracy" else credit.success_filter
        names = keep(right, rule.low, rule.high)
    return [e for name in names for e in groups[name]]


def _learn(
    session: Session,
    stage: RL,
    index: int,
    here: Progress,
    batch: Collected,
    estimator: Any,
    learning: Sequence[str],
    knobs: Mapping[str, Any],
) -> dict[str, Any]:
    """Credit, advantages, samples and the optimiser steps of the policies whose turn it is."""
    order = list(range(len(batch.episodes)))
    random.Random(f"{session.recipe.seed}/mask/{index}/{here.step}").shuffle(order)
    settled = credit.settle_unfinished(batch.episodes, stage.unfinished, mask_cap=stage.mask_cap, order=order)
    scored = credit.scored(settled.episodes, credit=stage.credit.name, gamma=stage.credit.gamma)
    values = estimator(scored)
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
    for name in learning:
        mine = [s for s in rows if s.policy == name]
        done = session.policies[name].update(
            mine, knobs=knobs[name], seed=stable_seed(session.recipe.seed, "update", index, here.step, name)
        )
        session.engines[name].load(name, None, session.policies[name].version)
        figures |= {f"{name}/{k}": v for k, v in done.items()}
    if session.run is not None:
        lines = _episode_lines(settled.episodes, scored, advantages)
        session.run.episodes(f"{index:02d}-rl", here.step + 1, lines)
    return figures


def _episode_lines(
    episodes: Sequence[Episode], scored: Sequence[ScoredTurn], advantages: Mapping[tuple[str, str], Any]
) -> Iterator[dict[str, Any]]:
    returns: dict[str, dict[str, float | None]] = {}
    for t in scored:
        returns.setdefault(t.episode, {})[t.turn] = t.value
    for e in episodes:
        yield episode_row(e, returns.get(e.id), {t.id: advantages.get((e.id, t.id)) for t in e.turns})


def _reward_figures(episodes: Sequence[Episode]) -> dict[str, float]:
    """Mean reward per episode by name, and the mean of their sum."""
    n = len(episodes)
    total: Counter[str] = Counter()
    for e in episodes:
        for s in e.rewards:
            total[s.name] += s.value  # type: ignore[assignment]
    return {"reward": sum(total.values()) / n, **{f"reward/{k}": v / n for k, v in total.items()}} if n else {}


def _next_tasks(session: Session, stage: RL, index: int, here: Progress, count: int, seen: set[int]) -> list[Task]:
    """The next rows of the endless, seeded sequence of epochs that are not in `seen`, the rows of this step so far."""
    tasks = session.tasks[stage.on]
    found: list[Task] = []
    while len(found) < count:
        epoch, place = divmod(here.cursor, len(tasks))
        order = list(range(len(tasks)))
        random.Random(f"{session.recipe.seed}/order/{index}/{epoch}").shuffle(order)
        while place < len(order) and len(found) < count:
            if order[place] not in seen:
                seen.add(order[place])
                found.append(tasks[order[place]])
            place += 1
            here.cursor += 1
    return found


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
        planned_units=stage.tasks_per_step * stage.episodes_per_task * roles,
    )


def _spent(stage: RL, here: Progress) -> bool:
    return stage.token_budget is not None and here.tokens >= stage.token_budget


async def _evaluate(session: Session, stage: RL, index: int, here: Progress) -> dict[str, Any]:
    assert stage.evaluate is not None
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
    return {f"test/{k}": values[k] for k in ("accuracy", "low", "high", "n", "rounds")}


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


def _checkpoint(session: Session, index: int, here: Progress) -> None:
    if session.run is None or here.step == 0:
        return
    progress = {"step": here.step, "cursor": here.cursor, "tokens": here.tokens, "memory": here.memory}
    trained = {name: session.policies[name] for name in session.policies}
    session.run.checkpoint(trained, {"stage": index, "step": here.step, "progress": progress})
