"""The `collect` stage: a tree of alternatives on every task, graded and kept as it grows (MALT, arXiv 2412.01928)."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from cothink import collect_rules, seating
from cothink.chat import InternCodec
from cothink.parts import Collect
from cothink.recipe import Recipe
from cothink.resolve import bind, resolve
from cothink.session import Session
from cothink.stages import tree_rows
from cothink.stages.lessons import log
from cothink.stages.progress import bar
from cothink.store import Book, Store, StoreError, header, load
from cothink.team import Job, play, stable_seed
from cothink.trees import Grade
from cothink.trees.labels import depths
from cothink.types import Episode, PlayError, Role, Task
from cothink.verify import averify_task

PATIENCE = 8
"""Trees that may fail before any call succeeds; then the run stops with the first error."""


def place(run_folder: Path, recipe: Recipe, index: int) -> Path:
    """Where the trees of a run's stage lie."""
    return run_folder / "trees" / f"{index:02d}-collect"


async def collect(session: Session, stage: Collect, index: int) -> dict[str, Any]:
    """Plays and grades a tree on every task of the stage and returns its figures.

    Every answered call is kept at once, so that an interrupted stage goes on with the next one; calls that failed
    are holes in their trees, and are tried again if the stage is resumed. Raises PlayError when nothing succeeds.
    """
    assert session.run is not None, "a collect stage writes into a run folder"
    tasks = session.tasks[stage.on][: stage.limit]
    folder = place(session.run.folder, session.recipe, index)
    roles = seating.heated(session.roles, stage.temperature)
    store = Store(folder, facts(session, stage, index, roles), session.say)
    started = time.monotonic()
    try:
        todo = [task for task in tasks if not store.done(task)]
        if len(todo) < len(tasks):
            session.say(f"collect: {len(tasks) - len(todo):,} of {len(tasks):,} trees are there already")
        with bar(session.console, "collect", len(todo)) as advance:
            left_out = await _Grove(session, stage, store, roles).grow(todo, advance)
        store.tidy(tasks)
        session.run.episodes(f"{index:02d}-collect", 0, tree_rows.rows(load(folder), stage.on))
    finally:
        store.close()
    figures = {**_figures(store, folder), "failed_tasks": left_out, "seconds": round(time.monotonic() - started, 2)}
    log(session, index, 0, {f"collect/{k}": v for k, v in figures.items()})
    session.say(sentence(figures))
    if store.counts.failed:
        session.say(f"collect: {store.counts.failed:,} calls failed and are holes; the first: "
                    f"{store.counts.first_error}")  # fmt: skip
    if not figures["graded_leaves"]:
        why = f"; the first error: {store.counts.first_error}" if store.counts.first_error else ""
        raise PlayError(f"collect: no tree has a leaf{why}")
    return figures


def facts(session: Session, stage: Collect, index: int, roles: Mapping[str, Role]) -> dict[str, Any]:
    """What the trees depend on, and for every role where its turns come from."""
    recipe = session.recipe
    block = seating.workflow(recipe, stage)
    seed = recipe.seed if stage.seed is None else stage.seed
    hashes = seating.template_hashes(block, roles)
    weights = _weights(session)
    tree = recipe.model_dump()
    config = seating.digest(
        *(tree[k] for k in ("team", "policies", "tasks", "engine")), block.model_dump(), stage.model_dump(), seed
    )
    origin = {}
    for name, role in roles.items():
        how = role.sampling
        sampling = {"temperature": how.temperature, "top_p": how.top_p, "top_k": how.top_k,
                    "max_tokens": how.max_tokens, "stop": list(how.stop), "seed": seed}  # fmt: skip
        origin[name] = {"base_model": recipe.policies[role.policy].model, "weights": weights[role.policy],
                        "sampling": sampling, "prompt_template_hash": hashes[name], "config_hash": config}  # fmt: skip
    return {
        "recipe": recipe.name,
        "seed": seed,
        "round": collect_rules.round_of(recipe, index),
        "on": stage.on,
        "split": collect_rules.split(recipe, stage),
        "workflow": {"name": block.name, **seating.options(block)},
        "roles": origin,
    }


def _weights(session: Session) -> dict[str, str]:
    """Policy -> which weights speak: the base, or the checkpoint they were loaded from or saved to."""
    assert session.run is not None
    kept = session.run.state.get("checkpoint") or "memory"
    return {
        name: kept if getattr(session.policies.get(name), "version", 0) else "base" for name in session.recipe.policies
    }


class _Grove:
    """All trees of one stage while they grow."""

    def __init__(self, session: Session, stage: Collect, store: Store, roles: Mapping[str, Role]):
        block = seating.workflow(session.recipe, stage)
        self.session, self.store, self.roles = session, store, roles
        self.workflow = bind(resolve("workflow", block.name), block.options, "team.workflow")
        self.seed = session.recipe.seed if stage.seed is None else stage.seed
        self.left_out = 0

    async def grow(self, tasks: Sequence[Task], on_done: Callable[[int], None] | None) -> int:
        """Plays all tasks; returns how many have no tree."""
        gate = asyncio.Semaphore(self.session.recipe.team.concurrency)
        done = 0

        async def one(task: Task) -> None:
            nonlocal done
            async with gate:
                await self._tree(task)
            done += 1
            if on_done:
                on_done(done)

        try:
            async with asyncio.TaskGroup() as group:
                for task in tasks:
                    group.create_task(one(task))
        except BaseExceptionGroup as several:
            raise several.exceptions[0] from None
        return self.left_out

    async def _tree(self, task: Task) -> None:
        book = self.store.book(task, self._lasting)
        job = Job(task, f"{task.id}#0", stable_seed(self.seed, task.id), memory=book)
        team, counts = self.session.recipe.team, self.store.counts
        try:
            played = await play([job], self.workflow, self.roles, self.session.engines, deadline=team.deadline)
        except PlayError as error:
            if isinstance(error.__cause__, StoreError):
                raise error.__cause__ from None
            self._lost(book, error)
            if not counts.calls and self.left_out >= PATIENCE:
                raise
            return
        for failure in played.failures:  # too long, or too late: what was answered is kept
            self._lost(book, PlayError(failure.message))
        for episode in played.episodes:
            book.close(episode.finish, await grades(episode))

    def _lost(self, book: Book, error: Exception) -> None:
        self.left_out += 1
        counts = self.store.counts
        counts.first_error = counts.first_error or f"task {book.task.id}: {error}"

    def _lasting(self, role: str) -> bool:
        policy = self.roles[role].policy
        return not isinstance(self.session.engines[policy].codec(policy), InternCodec)


async def grades(episode: Episode) -> dict[str, Grade]:
    """The grade of every turn's own answer, by turn id."""
    turns = [turn for turn in episode.turns if turn.completion.output_ids]
    found = await asyncio.gather(*(averify_task(episode.task, turn.text) for turn in turns))
    return {turn.id: Grade(v.verdict, v.answer) for turn, v in zip(turns, found, strict=True)}


def _figures(store: Store, folder: Path) -> dict[str, Any]:
    """Counts of what lies in the folder now, and of the calls that failed in this attempt."""
    trees = load(folder)
    depth = [depths(tree.episode.turns) for tree in trees]
    branching = header(folder)["workflow"].get("branching")
    last = len(branching) - 1 if branching else max((level for found in depth for level in found.values()), default=0)
    leaves = [
        tree.grades[turn].verdict
        for tree, found in zip(trees, depth, strict=True)
        for turn, level in found.items()
        if level == last and turn in tree.grades
    ]
    turns = [turn for tree in trees for turn in tree.episode.turns]
    return {
        "trees": len(trees),
        "completions": len(turns),
        "tokens": sum(len(turn.completion.output_ids) for turn in turns),
        "graded_leaves": len(leaves),
        "right_leaves": leaves.count("right"),
        "unparsable_leaves": leaves.count("unparsable"),
        "grading_errors": leaves.count("error"),
        "calls": store.answered,
        "failed_calls": store.counts.failed,
    }


def sentence(figures: Mapping[str, Any]) -> str:
    """One line for people."""
    leaves = max(figures["graded_leaves"], 1)
    return (
        f"collect: {figures['trees']:,} trees, {figures['completions']:,} turns, {figures['tokens']:,} "
        f"tokens; of {figures['graded_leaves']:,} leaves {100 * figures['right_leaves'] / leaves:.1f} % right, "
        f"{100 * figures['unparsable_leaves'] / leaves:.1f} % unparsable; {figures['calls']:,} calls in "
        f"{figures['seconds']:.0f} s"
    )
