"""Updates of a library's trainer that are not finite: left out and counted, and the run ended when they go on."""

from __future__ import annotations

import math
from typing import Any

from cothink.finite import BAD_UPDATES, TrainingError, diagnosis


def broken_updates(trainer: Any, policy: str, source: str) -> None:
    """Lets a trainer apply no update whose loss or gradient is not finite; `source` is what the loss comes from.

    Such a step is logged with the loss that it had and `skipped_updates`; three in a row raise TrainingError. Add it
    before whatever reports the trainer's figures.
    """
    from transformers import TrainerCallback

    losses: list[Any] = []
    run_step = trainer.training_step

    def training_step(*args: Any, **kwargs: Any) -> Any:
        loss = run_step(*args, **kwargs)
        losses.append(loss.detach())
        return loss

    class Skip(TrainerCallback):
        in_a_row, broken = 0, 0.0

        def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
            loss = sum(float(value) for value in losses)
            losses.clear()
            gradients = [p.grad for p in model.parameters() if p.grad is not None]
            self.broken = 0.0
            if math.isfinite(loss) and all(bool(g.isfinite().all()) for g in gradients):
                self.in_a_row = 0
                return
            self.in_a_row, self.broken, self.loss = self.in_a_row + 1, 1.0, loss
            model.zero_grad(set_to_none=True)  # an optimiser leaves alone what has no gradient
            if self.in_a_row >= BAD_UPDATES:
                cure = "a lower learning_rate or float32 weights"
                said = diagnosis((p for p in model.parameters() if p.requires_grad), loss, source, cure)
                raise TrainingError(f"policy {policy}: {said}")

        def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
            if not self.broken or logs is None or "loss" not in logs:
                return
            told = {"skipped_updates": 1.0, "loss": self.loss}  # trainers log the loss before it in its place
            logs.update(told)
            state.log_history[-1].update(told)

    trainer.training_step = training_step
    trainer.add_callback(Skip())
