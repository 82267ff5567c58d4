"""The first half of an rl step: play rows, grade and score them, and keep the groups that are worth a gradient."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from cothink import credit, wiring
from cothink.parts import RL
from cothink.resolve import effective, resolve
from cothink.rewards import RewardError
from cothink.session import Session
from cothink.stages import actions, metrics
from cothink.stages.playing import afresh, generated, play_tasks, prompted
from cothink.stages.progress import bar
from cothink.stages.rows import Progress, eligible, next_rows
from cothink.stages.solo import Solo
from cothink.tasks import DataError
from cothink.team import Played
from cothink.types import Episode, PlayError


@dataclass
class Gathered:
    """One step's episodes: those to learn from, and figures of everything that was played."""

    episodes: list[Episode]
    figures: dict[str, Any]
    tokens: int


async def gather(session: Session, stage: RL, index: int, here: Progress, rewards: Sequence[Any]) -> Gathered:
    """Plays rows until `tasks_per_step` whole groups pass the filter, or `oversample_max` times as many were played.

    The rows of a phase have passed its filter already: they are all kept.
    """
    kept: list[Episode] = []
    figures: dict[str, Any] = {}
    tokens, groups, played_rows, failures = 0, 0, 0, Counter()
    if not session.tasks[stage.on]:
        raise DataError(f"tasks.{stage.on} is empty: nothing to train on; write another tasks.{stage.on}")
    once = stage.filter.name == "none" or stage.schedule.name == "phases"
    there = len(eligible(stage, session.tasks[stage.on], here))
    most = min(max(stage.tasks_per_step, int(stage.oversample_max * stage.tasks_per_step)), there)
    seen: set[int] = set()
    solo = Solo() if stage.credit.name == "ccpo_solo" else None
    afresh(session)
    while groups < stage.tasks_per_step and played_rows < most:
        want = min(stage.tasks_per_step if not groups else stage.tasks_per_step - groups, most - played_rows)
        rows = next_rows(session, stage, index, here, want, seen)
        plays = len(session.ranks.share(rows)) * stage.episodes_per_task
        with bar(session.console, f"step {here.step + 1}/{stage.steps}", plays) as show:
            seed = (session.recipe.seed, "rl", index, here.step, played_rows)
            played = await play_tasks(session, rows, stage.episodes_per_task, seed, on_done=show, rewards=rewards)
        played_rows += len(rows)
        failures.update(f.kind for f in played.failures)
        _tell(session, here, played, len(rows) * stage.episodes_per_task)
        tokens += generated(played.episodes)
        episodes = list(played.episodes)
        _some_reward(episodes, rewards)
        if solo is not None:
            episodes = await solo.set_against(session, stage, rows, seed, episodes)
        if not figures:  # the first round is the unfiltered, on-policy batch
            figures = metrics.of_episodes(episodes, finish_tag(session)) | metrics.of_rewards(episodes)
            figures["prompt_tokens"] = float(prompted(episodes))
            figures |= {} if solo is None else solo.figures(episodes)
            figures |= actions.figures(episodes) if actions.written(session.recipe) else {}
        played_well = credit.drop_void(episodes) if stage.void_filter else episodes
        good = played_well if once else _filtered(stage, played_well)
        groups += len({e.task.id for e in good})
        kept += good
        if once:
            break
    figures |= {
        "rows_played": float(played_rows),
        "rows_kept": float(groups),
        "share_kept": groups / played_rows if played_rows else 0.0,
        **{f"failed/{kind}": float(count) for kind, count in failures.items()},
    }
    return Gathered(kept, figures, tokens + (0 if solo is None else solo.tokens))


def _tell(session: Session, here: Progress, played: Played, asked: int) -> None:
    """Says what was left out; a step whose plays are all late would only be followed by others."""
    if not played.failures:
        return
    late = sum(f.kind == "deadline" for f in played.failures)
    if late == asked:
        limit = session.recipe.team.deadline
        raise PlayError(
            f"none of the {asked} plays of step {here.step + 1} was done within {limit:g} s: write a longer "
            "team.deadline, or a smaller team.concurrency, or look at the engines"
        )
    kinds = ", ".join(f"{n} {kind}" for kind, n in Counter(f.kind for f in played.failures).items())
    first = played.failures[0]
    session.say(
        f"step {here.step + 1}: {len(played.failures)} of {asked} plays left out ({kinds}); "
        f"the first, of task {first.task}: {first.message}"
    )


def finish_tag(session: Session) -> str | None:
    """The text that ends an episode of several rounds; None where the workflow has no such tag."""
    block = session.recipe.team.workflow
    if wiring.expected_turns(session.recipe) < 2:
        return None
    return effective(resolve("workflow", block.name), block.options).get("finish_tag")


def _some_reward(episodes: Sequence[Episode], rewards: Sequence[Any]) -> None:
    if episodes and not any(e.rewards for e in episodes):
        names = ", ".join(r.name + (f" (role {r.role})" if r.role else "") for r in rewards)
        raise RewardError(
            f"no reward applied to any turn of {len(episodes)} episodes: {names}. answer.correct and answer.sparse "
            "score the graded turn only: leave `role` out, and write `to: ROLE` to credit one role"
        )


def _filtered(stage: RL, episodes: Sequence[Episode]) -> list[Episode]:
    """The episodes of the groups that pass; the unshaped accuracy decides, whole groups only."""
    groups: dict[str, list[Episode]] = {}
    for e in episodes:
        groups.setdefault(e.task.id, []).append(e)
    rule = stage.filter
    if rule.name == "spread":
        totals = {k: [sum(s.value for s in e.rewards) for e in v] for k, v in groups.items()}
        names = credit.spread_filter(totals, rule.top_p)
    else:
        right = {k: [e.accuracy or 0.0 for e in v] for k, v in groups.items()}
        keep = credit.accuracy_filter if rule.name == "accuracy" else credit.success_filter
        names = keep(right, rule.low, rule.high)
    return [e for name in names for e in groups[name]]
