"""One whole RL step of a single agent: cothink's `rl` stage beside TRL's GRPOTrainer, same model and same work.

`python bench/step.py [--model smollm2] [--dtype bfloat16]` lets both play `--prompts` x `--siblings` completions of at
most `--longest` tokens and train on all of them once: no KL, no gradient checkpointing, the same learning rate, and a
reward that costs nothing and differs between siblings, so that no sample is dropped. Both begin with a step that is
not counted; TRL's steps and ours then alternate.
"""

from __future__ import annotations

import argparse
import asyncio
import tempfile
import time
import warnings
from collections.abc import Callable
from typing import Any

import common
import torch
from common import Measured

from cothink import models
from cothink.parts import RL
from cothink.recipe import Recipe
from cothink.session import assemble
from cothink.stages.rl import rl

RATE = 1e-6


class Ours:
    """The rl stage, one step at a time."""

    def __init__(self, options: argparse.Namespace):
        recipe = Recipe.load(
            {
                "name": "bench",
                "seed": options.seed,
                "team": {
                    "workflow": "solo",
                    "roles": {
                        "solver": {
                            "policy": "p",
                            "system": common.system(options.model),
                            "max_tokens": options.longest,
                        }
                    },
                },
                "policies": {"p": {"model": options.model, "learning_rate": RATE, "dtype": options.dtype}},
                "tasks": {
                    "train": {"name": "wordsums", "levels": [1, 8], "count": options.prompts, "seed": options.seed}
                },
                "stages": [
                    {
                        "kind": "rl",
                        "steps": 1,
                        "tasks_per_step": options.prompts,
                        "episodes_per_task": options.siblings,
                        "rewards": [{"name": "common:checksum"}],
                        "estimator": "grpo",
                        "loss": {"aggregate": "token_mean", "clip": "ppo"},
                        "unfinished": "keep",
                        "filter": "none",
                    }
                ],
            }
        )
        self._session = assemble(recipe)
        stage = recipe.stages[0]
        assert isinstance(stage, RL)
        self._stage = stage
        self.model = self._session.policies["p"].model

    def step(self) -> Measured:
        """One step from the first row on, so that every step has the same prompts."""
        seconds, last = common.timed(lambda: asyncio.run(rl(self._session, self._stage, 0)))
        generation = last["seconds_collect"]
        figures = {"tokens": last["tokens"], "generation": generation, "rest": seconds - generation}
        assert last["samples"] == self._stage.tasks_per_step * self._stage.episodes_per_task
        return Measured(seconds, figures)


def theirs(options: argparse.Namespace, folder: str, between: Callable[[], None]) -> list[Measured]:
    """TRL's steps; `between` is called after each of them, on nobody's clock."""
    from datasets import Dataset
    from transformers import PrinterCallback, TrainerCallback
    from trl.trainer.grpo_config import GRPOConfig
    from trl.trainer.grpo_trainer import GRPOTrainer

    found: list[Measured] = []
    generation: list[float] = []

    class Clock(TrainerCallback):
        def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            generation.clear()
            self.started = time.perf_counter()

        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            seconds = common.timed(lambda: None)[0] + time.perf_counter() - self.started
            spent = sum(generation)
            tokens = trainer._metrics["train"]["completions/mean_length"][-1] * options.prompts * options.siblings
            found.append(Measured(seconds, {"tokens": tokens, "generation": spent, "rest": seconds - spent}))
            between()

    rows = [
        {"prompt": [{"role": m.role, "content": m.content} for m in chat]}
        for chat in common.chats(options.model, options.prompts, options.seed)
    ]
    policy = common.policy(options.model)
    trainer = GRPOTrainer(
        policy.model,
        _reward,
        args=_settings(GRPOConfig, options, folder),
        train_dataset=Dataset.from_list(rows),
        processing_class=policy.tokenizer,
        callbacks=[Clock()],
    )
    trainer.remove_callback(PrinterCallback)
    inner = trainer._generate

    def generate(*args: Any, **kwargs: Any) -> Any:
        seconds, result = common.timed(lambda: inner(*args, **kwargs))
        generation.append(seconds)
        return result

    trainer._generate = generate
    trainer.train()
    return found


def _settings(config: Any, options: argparse.Namespace, folder: str) -> Any:
    # transformers 5.24 renames gradient_checkpointing, TRL's own name for it
    warnings.filterwarnings("ignore", category=FutureWarning, module="transformers")
    return config(
        folder,
        use_cpu=not torch.cuda.is_available(),
        bf16=options.dtype == "bfloat16",
        gradient_checkpointing=False,
        per_device_train_batch_size=options.prompts * options.siblings // options.accumulate,
        gradient_accumulation_steps=options.accumulate,
        num_generations=options.siblings,
        num_iterations=1,
        max_completion_length=options.longest,
        max_steps=options.repeats + 1,
        learning_rate=RATE,
        lr_scheduler_type="constant",
        beta=0.0,
        temperature=1.0,
        logging_strategy="no",
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        seed=options.seed,
    )


def _reward(completions: list[Any], **_: Any) -> list[float | None]:
    return [common.grade(k, c[0]["content"]) for k, c in enumerate(completions)]


def build() -> argparse.ArgumentParser:
    """The options."""
    made = common.parser(__doc__, prompts=(16, 2), siblings=(8, 8), longest=(64, 64), accumulate=(1, 1), repeats=(3, 2))
    made.epilog = "--accumulate cuts TRL's batch into that many parts, where its memory does not suffice"
    return made


def measure(options: argparse.Namespace) -> None:
    """Alternates TRL's steps with ours and prints the table."""
    mine: list[Measured] = []
    peaks: list[float] = []
    ours = Ours(options)

    def between() -> None:
        mine.append(ours.step())
        peaks.append(common.ceiling(ours.model, options.dtype))

    with tempfile.TemporaryDirectory() as folder:
        other = theirs(options, folder, between)
    if len(other) != options.repeats + 1:
        raise RuntimeError(f"TRL made {len(other)} steps, expected {options.repeats + 1}")
    runs = {"cothink rl": mine[1:], f"trl {common.installed('trl')}": other[1:]}
    peak = common.median([Measured(p, {}) for p in peaks])
    common.header("One RL step", options, ceiling=f"{peak / 1e9:,.0f} GFLOP/s")
    print(f"{options.prompts} prompts x {options.siblings} completions of at most {options.longest} tokens")
    rows = []
    for name, found in runs.items():
        part = [common.median(found, key) for key in ("tokens", "generation", "rest")]
        ratio = common.median([Measured(b.seconds / a.seconds, {}) for a, b in zip(found, other[1:])])
        rows.append((name, round(part[0]), common.median(found), *part[1:], common.times(ratio)))
    common.table(("system", "tokens", "seconds/step", "generation", "scoring and update", "ratio"), rows)
    print("ratio: TRL's seconds over the system's; our generation includes grading every answer with the verifier")


def main() -> None:
    """Reads the options and measures."""
    made = build()
    options = common.parse(made)
    if common.installed("trl") == "-":
        made.error("TRL is not installed here: pip install 'cothink[dev]'")
    models.where(options.model)  # fetched before anything is timed
    measure(options)


if __name__ == "__main__":
    main()
