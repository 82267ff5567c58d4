"""The `sft` stage: examples become token rows of each policy, and TRL's SFTTrainer learns the replies in them."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from cothink import models
from cothink.conversations import Conversation, Conversations, fault, overlap, token_rows
from cothink.parts import SFT
from cothink.recipe import Recipe
from cothink.resolve import bind, resolve
from cothink.session import Session
from cothink.sft_rules import passes, taught
from cothink.stages import trl_bridge, trl_skip
from cothink.stages.lessons import DataShort, card, export, log, refuse_test_rows, stores, workplace
from cothink.stages.progress import bar
from cothink.team import stable_seed
from cothink.types import Message, Sample

WATCHED = 32
"""Rows of a role on which its loss is measured, when none are held out."""
FIGURES = {
    "loss": "loss",
    "grad_norm": "gradient_norm",
    "learning_rate": "learning_rate",
    "mean_token_accuracy": "token_accuracy",
    "entropy": "entropy",
    "epoch": "epoch",
    "skipped_updates": "skipped_updates",
}
"""What a trainer calls a figure, and what the metrics call it (after the policy's name)."""


@dataclass
class Lesson:
    """What one policy learns in a stage: its rows, the rows its loss is measured on, and facts for the metrics."""

    rows: list[Sample] = field(default_factory=list)
    watched: dict[str, list[Sample]] = field(default_factory=dict)
    texts: dict[str, tuple[Message, ...]] = field(default_factory=dict)
    lineage: dict[str, Mapping[str, Any]] = field(default_factory=dict)
    facts: dict[str, float] = field(default_factory=dict)


async def sft(session: Session, stage: SFT, index: int) -> dict[str, float]:
    """Teaches the stage's roles, one policy after the other, and returns each role's loss before and after.

    A checkpoint follows every policy. Within one, a resumed run goes on from the trainer's own last checkpoint: those
    of `checkpoint_every`, or the one that an interruption (Ctrl-C) leaves.
    """
    trl_bridge.require_trl()
    state = session.run.state if session.run is not None else {}
    done: dict[str, int] = dict(state.get("progress", {}).get("done", {})) if state.get("stage") == index else {}
    lessons = prepare(session, stage, index)
    found: dict[str, float] = {}
    for name, lesson in lessons.items():
        if name in done:
            continue
        found |= await _learn(session, stage, index, name, lesson, sum(done.values()), done)
    return found


def examples_of(recipe: Recipe, stage: SFT, index: int, folder: Path | None = None) -> Conversations:
    """The examples of a stage; raises DataError when they are not there or not usable. `folder` is the run's own."""
    names, roles = taught(recipe, stage), recipe.roles()
    load = resolve("conversations", stage.data.name)
    options = stores(recipe, index, folder, load, stage.data.options)
    return bind(load, options, f"stages.{index}.data")({name: roles[name] for name in names})


def prepare(session: Session, stage: SFT, index: int) -> dict[str, Lesson]:
    """The rows of every policy of the stage, in recipe order; raises DataShort when a role is left without any."""
    names = taught(session.recipe, stage)
    roles = {name: session.roles[name] for name in names}
    folder = session.run.folder if session.run is not None else None
    examples = examples_of(session.recipe, stage, index, folder)
    card(session, f"{index:02d}-sft", getattr(examples, "facts", None))
    for note in getattr(examples, "notes", ()):
        session.say(f"{stage.data.name}: {note}")
    facts = {f"data/{k}": float(v) for k, v in getattr(examples, "counts", {}).items()}
    for set_name, tasks in session.tasks.items():
        shared = len(overlap(examples, tasks))
        facts[f"overlap/{set_name}"] = float(shared)
        if shared:
            session.say(f"{stage.data.name}: {shared:,} of its questions stand in tasks.{set_name} too")
    known = getattr(examples, "lineage", {})
    refuse_test_rows(known.values())
    lessons = {name: Lesson() for name in session.policies if any(r.policy == name for r in roles.values())}
    for name in names:
        lesson = lessons[roles[name].policy]
        lesson.facts |= facts
        _add(session, stage, lesson, name, [example for example in examples if example.role == name])
        lesson.lineage |= {row.unit: known[row.unit] for row in lesson.rows if row.unit in known}
    _hold_out(session, stage, lessons.values())
    return lessons


def _add(session: Session, stage: SFT, lesson: Lesson, role: str, examples: Sequence[Conversation | Sample]) -> None:
    """Puts one role's examples into its policy's lesson."""
    if not examples:
        raise DataShort(f"{stage.data.name} has no example for the role {role!r}; leave it out of the stage's roles, "
                        "or name data that has some")  # fmt: skip
    name = session.roles[role].policy
    policy, codec = session.policies[name], session.engines[name].codec(name)
    if not hasattr(policy, "tokenizer"):
        raise trl_bridge.SetupError(f"policy {name!r} has no language model, and an sft stage needs one: engine: local")
    limit = min(stage.max_length, getattr(policy.model.config, "max_position_embeddings", None) or stage.max_length)
    kept, dropped, breaks = [], 0, 0
    for example in examples:
        if isinstance(example, Conversation):
            wrong = fault(example.messages)
            if wrong:
                raise DataShort(f"{stage.data.name}: example {example.id!r} of {role!r} is no chat to learn: {wrong}")
            rows, broke = token_rows(example, codec, name)
            breaks += broke
        else:
            rows = [replace(example, policy=name)]
        fits = all(len(row.ids) <= limit for row in rows)
        dropped += not fits
        if fits:
            kept += rows
            if isinstance(example, Conversation):
                lesson.texts |= {row.unit: example.messages for row in rows}
    if not kept:
        raise DataShort(f"{stage.data.name}: all {dropped:,} examples of the role {role!r} are longer than {limit:,} "
                        "tokens; raise max_length, or take a model with a longer context")  # fmt: skip
    trained, tokens = sum(row.trained for row in kept), sum(len(row.ids) for row in kept)
    lesson.rows += kept
    lesson.facts |= {
        f"{role}/rows": float(len(kept)),
        f"{role}/dropped": float(dropped),
        f"{role}/breaks": float(breaks),
        f"{role}/tokens": float(tokens),
        f"{role}/trained_tokens": float(trained),
    }
    long = f", {dropped:,} longer than {limit:,} tokens left out" if dropped else ""
    broken = f", history rewritten by the chat template {breaks:,} times" if breaks else ""
    session.say(f"{role}: {len(kept):,} rows, {tokens:,} tokens, {trained:,} of them learned{long}{broken}")


def _hold_out(session: Session, stage: SFT, lessons: Iterable[Lesson]) -> None:
    """Takes the held-out tasks out of every lesson, both sides of a dialogue alike, and picks the watched rows."""
    seed, lessons = _seed(session, stage), list(lessons)
    tasks = sorted({row.task for lesson in lessons for row in lesson.rows}, key=lambda t: stable_seed(seed, "held", t))
    if stage.held_out >= len(tasks):
        raise DataShort(f"held_out {stage.held_out} leaves nothing to learn of {len(tasks)} tasks; write a smaller one")
    held = set(tasks[: stage.held_out])
    for lesson in lessons:
        for role in dict.fromkeys(row.role for row in lesson.rows):
            mine = [row for row in lesson.rows if row.role == role]
            some = sorted(mine, key=lambda row: stable_seed(seed, "watched", row.unit))[:WATCHED]
            lesson.watched[role] = [row for row in mine if row.task in held] or some
        lesson.rows = [row for row in lesson.rows if row.task not in held]
        if not lesson.rows:
            raise DataShort(f"held_out {stage.held_out} leaves a policy nothing to learn; write a smaller one")


def _seed(session: Session, stage: SFT) -> int:
    return session.recipe.seed if stage.seed is None else stage.seed


async def _learn(
    session: Session, stage: SFT, index: int, name: str, lesson: Lesson, offset: int, done: dict[str, int]
) -> dict[str, float]:
    """One policy's training; `offset` is the number of steps that the policies before it took."""
    policy = session.policies[name]
    if stage.start == "base":
        policy.restart(models.where(policy.settings.model), stable_seed(_seed(session, stage), "base", index, name))
    before = {f"{role}/nll_before": trl_bridge.mean_nll(policy, rows) for role, rows in lesson.watched.items()}
    pending: dict[str, float] = {**lesson.facts, **before}
    after: dict[str, float] = {}

    def report(step: int, logs: Mapping[str, Any]) -> None:
        after.update((key, value) for key, value in logs.items() if key.endswith("/nll"))
        pending.update((key, value) for key, value in logs.items() if key.endswith("/nll"))
        if "loss" in logs:
            figures = {f"{name}/{ours}": logs[theirs] for theirs, ours in FIGURES.items() if theirs in logs}
            log(session, index, offset + step, {**pending, **figures})
            pending.clear()

    def measure() -> dict[str, float]:
        return {f"{role}/nll": trl_bridge.mean_nll(policy, rows) for role, rows in lesson.watched.items()}

    with workplace(session, index, name) as folder:
        if session.run is not None:
            export(session.run.folder / "examples" / f"{index:02d}-{name}.jsonl", _lines(lesson))
        seed = stable_seed(_seed(session, stage), "sft", index, name) % 2**31
        steps = _train(session, stage, name, lesson.rows, folder, seed, report, measure)
        await asyncio.sleep(0)  # where a Ctrl-C during training takes effect; the trainer has saved its place
        policy.version += 1
        session.engines[name].load(name, None, policy.version)
        done[name] = steps
        if session.run is not None:
            place = {"stage": index, "step": sum(done.values()), "progress": {"done": done}}
            session.run.checkpoint(session.policies, place)
    for role in lesson.watched:
        words = "held-out" if stage.held_out else "learned"
        change = f"{before[f'{role}/nll_before']:.4f} -> {after[f'{role}/nll']:.4f}"
        session.say(f"{role}: loss {change} on {len(lesson.watched[role])} {words} rows after {steps:,} steps")
    return {**before, **after}


def _train(
    session: Session,
    stage: SFT,
    name: str,
    rows: Sequence[Sample],
    folder: Path,
    seed: int,
    report: trl_bridge.Report,
    measure: Callable[[], Mapping[str, float]],
) -> int:
    """Runs the trainer to its end, or to an interruption, and returns the optimiser steps it has done in all."""
    from transformers import PrinterCallback
    from trl.trainer.sft_config import SFTConfig
    from trl.trainer.sft_trainer import SFTTrainer

    policy, size = session.policies[name], stage.microbatch_rows or stage.rows_per_step
    epochs = passes(stage.epochs, len(rows))
    with trl_bridge.quiet(), trl_bridge.lent(policy) as model:
        config = SFTConfig(
            **trl_bridge.arguments(
                policy,
                folder,
                scheduler=stage.scheduler,
                warmup_steps=stage.warmup_steps,
                learning_rate=stage.learning_rate,
                num_train_epochs=epochs,
                max_steps=stage.max_steps or -1,
                per_device_train_batch_size=size,
                gradient_accumulation_steps=stage.rows_per_step // size,
                save_strategy="steps" if stage.checkpoint_every else "no",
                save_steps=stage.checkpoint_every or 500,
                seed=seed,
                data_seed=seed,
            ),
            max_length=stage.max_length,
            packing=stage.packing,
        )
        trainer = SFTTrainer(
            model, config, train_dataset=trl_bridge.dataset(rows), processing_class=policy.tokenizer
        )  # fmt: skip
        trainer.remove_callback(PrinterCallback)
        each = math.ceil(len(trainer.train_dataset) / stage.rows_per_step)  # type: ignore[arg-type]
        total = stage.max_steps or math.ceil(each * epochs)
        trl_skip.broken_updates(trainer, name, f"the {len(rows):,} rows it learns from")
        trainer.add_callback(trl_bridge.follower(report, measure, each))
        with bar(session.console, f"sft of {name}", total) as advance:
            if advance is not None:
                trainer.add_callback(trl_bridge.ticker(advance))
            last = trl_bridge.last_checkpoint(folder)
            trainer.train(resume_from_checkpoint=None if last is None else str(last))
        return trainer.state.global_step


def _lines(lesson: Lesson) -> Iterator[dict[str, Any]]:
    """What a policy learns from, as TRL reads it: ids and labels, with the chat or the lineage beside them."""
    for row in lesson.rows:
        chat = [{"role": m.role, "content": m.content} for m in lesson.texts.get(row.unit, ())]
        told = {"messages": chat} if chat else {}
        lineage = dict(lesson.lineage.get(row.unit, {}))
        if "labels" in lineage:
            lineage["label"] = lineage.pop("labels")  # TRL calls the trained ids labels
        yield {**lineage, "role": row.role, "id": row.task, **told, **trl_bridge.labelled(row)}
