"""Policies: a model or an adapter over a shared base, with its optimiser; log-probs, steps, checkpoints."""

from __future__ import annotations

import contextlib
import copy
import math
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from cothink.attention import causal, flat
from cothink.batch import Batch, microbatches, minibatches, pad, shares, weights_for
from cothink.finite import BAD_UPDATES, TrainingError, diagnosis
from cothink.logprobs import allowed_tokens, is_flat, token_logprobs
from cothink.losses import merge
from cothink.offpolicy import ess_fraction
from cothink.oldprobs import with_old
from cothink.ranks import Ranks
from cothink.types import Sample

LossFunction = Callable[..., tuple[Tensor, dict[str, tuple[float, float]]]]
ENGINE_GAP = 1e-2  # engine and trainer are one code path in fp32: a larger gap in log-prob is a bug, not noise
LOOK = "rewards and advantages of the last step's episodes"
CURE = "a lower learning_rate, loss.log_ratio_max or float32 weights"


@dataclass(frozen=True, slots=True)
class Knobs:
    """How samples become optimiser steps; the same for every policy of a stage."""

    loss: LossFunction
    aggregate: str
    turns_ref: float | None = None
    length_ref: float | None = None
    updates: int = 1
    microbatch_tokens: int = 8192
    role_balance: str = "none"
    kl_stop: float | None = None
    needs_reference: bool = False
    entropy_in_loss: bool = False
    planned_units: int | None = None
    offpolicy: bool = False


@dataclass
class Policy:
    """One distinct set of weights; serves every role that names it.

    `adapter` is None for full weights, else the name of a LoRA adapter on a base model that other policies may share.
    `mixed` computes in bfloat16 over float32 weights, because small steps round away on bfloat16 weights. The engine
    tells what it did: `coarse` if it samples in a lower precision, `grammars` by the JSON schema it sampled under.
    """

    name: str
    model: Any
    tokenizer: Any
    settings: Any
    adapter: str | None = None
    mixed: bool = False
    total_steps: int = 0
    version: int = 0
    coarse: bool = False
    grammars: dict[str, Any] = field(default_factory=dict)
    ranks: Ranks = field(default_factory=Ranks)
    _optimizer: torch.optim.Optimizer | None = None
    _scheduler: Any = None
    _reference: Any = None
    _bad: int = 0
    _parameters: list[nn.Parameter] = field(default_factory=list)

    @property
    def device(self) -> torch.device:
        """Where the weights live."""
        return next(self.model.parameters()).device

    def activate(self) -> Any:
        """Makes this policy's adapter the active one and returns the model."""
        if self.adapter is not None and self.model.active_adapter != self.adapter:
            self.model.set_adapter(self.adapter)
        return self.model

    def precision(self) -> Any:
        """The context every forward pass of this policy runs in."""
        return torch.autocast(self.device.type, dtype=torch.bfloat16) if self.mixed else contextlib.nullcontext()

    @contextlib.contextmanager
    def computing(self) -> Iterator[None]:
        """The context of a forward and backward pass over samples."""
        with self.precision(), flat(causal(self.model)) if is_flat(self.model) else contextlib.nullcontext():
            yield

    def parameters(self) -> list[nn.Parameter]:
        """The weights this policy trains."""
        if not self._parameters:
            named = self.model.named_parameters()
            if self.adapter is None:
                self._parameters = [p for _, p in named]
            else:
                self._parameters = [p for n, p in named if f".{self.adapter}." in n and "lora_" in n]
            for p in self._parameters:
                p.requires_grad_(True)
        return self._parameters

    def logprobs(self, batch: Batch, *, entropy_in_loss: bool = False) -> tuple[Tensor, Tensor]:
        """Log-probs [B, L] of the trained tokens under the sampling temperature (0 elsewhere), and their entropies."""
        with self.computing():
            return token_logprobs(self.activate(), batch, entropy_in_loss=entropy_in_loss)[:2]

    def reference_logprobs(self, batch: Batch, allowed: Tensor | None = None) -> Tensor:
        """Log-probs [B, L] under the weights this policy started the stage with."""
        with torch.no_grad(), self.computing():
            if self.adapter is not None:
                model = self.activate()
                with model.disable_adapter():
                    return token_logprobs(model, batch, allowed=allowed)[0]
            if self._reference is None:
                raise TrainingError(f"policy {self.name}: keep_reference() was not called before training")
            with flat(self._reference) if is_flat(self._reference) else contextlib.nullcontext():
                return token_logprobs(self._reference, batch, allowed=allowed)[0]

    def keep_reference(self, folder: Path | None = None) -> None:
        """Freezes full weights as the KL reference, kept in `folder` for a resumed run; an adapter's is its base."""
        if self.adapter is not None:
            return
        kept = None if folder is None else folder / self.name
        if kept is not None and (kept / "config.json").exists():
            found = type(self.model).from_pretrained(kept, dtype=self.model.dtype).to(self.device)
        else:
            found = copy.deepcopy(self.model)
            if kept is not None:  # a reference that was half written would be taken for one
                part = kept.with_name(kept.name + ".part")
                shutil.rmtree(part, ignore_errors=True)
                found.save_pretrained(part)
                part.rename(kept)
        self._reference = found.eval().requires_grad_(False)

    def update(self, samples: Sequence[Sample], knobs: Knobs, seed: int = 0) -> dict[str, float]:
        """Runs `knobs.updates` optimiser steps on the samples and returns metrics; an update needs trained tokens."""
        samples = [s for s in samples if s.trained]
        if not samples:
            return {"updates": 0.0}
        model = self.activate()
        model.train()
        sums: dict[str, tuple[float, float]] = {}
        done, norm = 0, 0.0
        count = min(knobs.updates, len({s.unit for s in samples}))
        samples = with_old(self, samples, knobs.microbatch_tokens) if knobs.offpolicy and count > 1 else samples
        try:
            for mini in minibatches(samples, count, seed):
                stats, norm = self._step(mini, knobs, count, check=done == 0)
                merge(sums, stats)
                done += 1
                drift, tokens = stats.get("kl_update", (0.0, 1.0))
                if knobs.kl_stop is not None and tokens and drift / tokens > knobs.kl_stop:
                    break
        finally:
            model.eval()
        self.version += 1
        metrics = {k: v / n for k, (v, n) in sums.items() if n} | {"loss": sums["loss"][0] / max(done, 1)}
        metrics |= {k: sums[k][0] for k in ("tokens_computed", "tokens_skipped")}
        if "rho" in metrics:
            metrics["ess_fraction"] = ess_fraction(metrics.pop("rho"), metrics.pop("rho_square"))
        rate = self._optimizer.param_groups[0]["lr"] if self._optimizer else 0.0
        return {**metrics, "updates": float(done), "gradient_norm": norm, "learning_rate": rate}

    def _step(
        self, mini: Sequence[Sample], knobs: Knobs, parts: int, check: bool
    ) -> tuple[dict[str, tuple[float, float]], float]:
        """One optimiser step on one mini-batch; nothing is applied unless loss and gradient are finite."""
        optimizer = self._ready()
        optimizer.zero_grad(set_to_none=True)
        total: dict[str, tuple[float, float]] = {}
        for found in self.ranks.gather(self.accumulate(mini, knobs, parts, check=check)):
            merge(total, found)
        self.ranks.add_gradients(self.parameters())
        norm = float(nn.utils.clip_grad_norm_(self.parameters(), self.settings.max_grad_norm))
        if math.isfinite(norm) and math.isfinite(total["loss"][0]):
            optimizer.step()
            self._scheduler.step()
            self._bad = 0
        else:
            self._bad += 1
            total["skipped_updates"] = (1.0, 1.0)
            if self._bad >= BAD_UPDATES:
                said = diagnosis(self.parameters(), total["loss"][0], LOOK, CURE)
                raise TrainingError(f"policy {self.name}: {said}")
        optimizer.zero_grad(set_to_none=True)
        return total, norm

    def accumulate(
        self, mini: Sequence[Sample], knobs: Knobs, parts: int = 1, *, check: bool = False
    ) -> dict[str, tuple[float, float]]:
        """Adds the gradient of a mini-batch, however it is cut into microbatches; returns (sum, count) metrics.

        Samples whose advantages are all 0 have no gradient unless the loss has a KL or entropy term: they are counted
        in the weights, and neither computed nor in the other metrics (`tokens_skipped`).

        `parts` is the number of mini-batches that the planned units were dealt to; `check` compares the trainer's
        log-probs with the engine's. Several processes add the gradient and the metrics of their share each.
        """
        mini, masks = self.unforced(mini)
        planned = None if knobs.planned_units is None else knobs.planned_units / parts
        weights = weights_for(
            mini,
            knobs.aggregate,  # type: ignore[arg-type]
            turns_ref=knobs.turns_ref,
            length_ref=knobs.length_ref,
            planned_units=planned,
            role_balance=knobs.role_balance,  # type: ignore[arg-type]
        )
        total: dict[str, tuple[float, float]] = {}
        place = {id(s): i for i, s in enumerate(mini)}
        needed = [s for s in mini if knobs.needs_reference or knobs.entropy_in_loss or any(s.advantages)]
        skipped = sum(s.trained for s in mini) - sum(s.trained for s in needed) if self.ranks.leads else 0
        merge(total, {"loss": (0.0, 0.0), "tokens_computed": (0.0, 0.0), "tokens_skipped": (float(skipped), 0.0)})
        if not needed:  # an optimiser goes on by its momentum where the gradient is zero, not where there is none
            for p in self.parameters():
                p.grad = torch.zeros_like(p) if p.grad is None else p.grad
        mine = shares(needed, self.ranks.count)[self.ranks.number]
        for micro in microbatches(mine, knobs.microbatch_tokens, padded=not is_flat(self.model)):
            batch = pad(micro, [weights[place[id(s)]] for s in micro]).to(self.device)
            allowed = allowed_tokens([masks.get(id(s)) for s in micro], batch)
            if knobs.needs_reference:
                batch.ref_logprobs = self.reference_logprobs(batch, allowed)
            with self.computing():
                logprobs, batch.entropy, computed = token_logprobs(
                    self.model, batch, entropy_in_loss=knobs.entropy_in_loss, allowed=allowed
                )
                if check:
                    merge(total, self._gap(logprobs.detach(), batch, strict=not knobs.offpolicy))
                if knobs.offpolicy and batch.rollout is None:  # the only update: its weights are those that sampled
                    batch.rollout, batch.logprobs = batch.logprobs, logprobs.detach()
                loss, stats = knobs.loss(logprobs, batch)
                loss.backward()
            merge(total, {**stats, "loss": (float(loss.detach()), 0.0), "tokens_computed": (float(computed), 0.0)})
        return total

    def unforced(self, mini: Sequence[Sample]) -> tuple[list[Sample], dict[int, list[np.ndarray]]]:
        """Samples without the tokens that a schema forced, and by sample the masks [V] of the tokens that are left.

        A forced token is no choice (specification of JSON actions): it stays as context.
        """
        from cothink.grammar import replay

        found, masks = [], {}
        for s in mini:
            if s.schema is not None:
                grammar = self.grammars[s.schema]
                at = [j for j, t in enumerate(s.turns) if t >= 0]
                legal = dict(zip(at, replay(grammar, [s.ids[j] for j in at]), strict=True))
                free = {j for j in at if legal[j].sum() > 1}
                blank = {
                    k: tuple(v if j in free or v == w else w for j, v in enumerate(getattr(s, k)))
                    for k, w in (("turns", -1), ("logprobs", 0.0), ("rollout", 0.0), ("advantages", 0.0))
                    if getattr(s, k)
                }
                s = replace(s, **blank)
                masks[id(s)] = [legal[j] for j in sorted(free)]
            found.append(s)
        return found, masks

    def _gap(self, logprobs: Tensor, batch: Batch, strict: bool) -> dict[str, tuple[float, float]]:
        """|log-prob(engine) - log-prob(trainer)|, and k3 and moments of rho = pi(trainer) / pi(engine)."""
        trained = batch.turns >= 0
        log_rho = (logprobs - (batch.logprobs if batch.rollout is None else batch.rollout))[trained]
        gap, rho = log_rho.abs(), log_rho.double().clamp(-20, 20).exp()
        worst = float(gap.max()) if gap.numel() else 0.0
        exact = self.model.dtype == torch.float32 and not self.mixed and not self.coarse
        if strict and exact and not worst <= ENGINE_GAP:
            raise TrainingError(
                f"policy {self.name}: engine and trainer differ by {worst:.3g} in a log-prob (limit {ENGINE_GAP}). "
                "Sampling with top_p or top_k, or dropout, does this: switch them off for training"
            )
        sums = {"engine_gap": gap, "mismatch": rho - 1 - log_rho, "rho": rho, "rho_square": rho**2}
        found = {name: (float(column.sum()), float(len(column))) for name, column in sums.items()}
        return {"engine_gap_max": (worst, 1.0), **found}

    def _ready(self) -> torch.optim.Optimizer:
        if self._optimizer is None:
            s = self.settings
            self._optimizer = torch.optim.AdamW(
                self.parameters(), lr=s.learning_rate, betas=tuple(s.betas), weight_decay=s.weight_decay
            )
            self._scheduler = torch.optim.lr_scheduler.LambdaLR(
                self._optimizer, lambda k: rate(s.scheduler, k, s.warmup_steps, self.total_steps)
            )
        return self._optimizer

    def forget_optimizer(self) -> None:
        """Drops the optimiser; the next step, or a checkpoint that holds one, makes a fresh one."""
        self._optimizer = self._scheduler = None

    def replace_adapter(self, config: Any) -> None:
        """Puts a fresh adapter, perhaps of another rank, in the place of this policy's own; the optimiser goes too."""
        self.model.delete_adapter(self.adapter)
        self.model.add_adapter(self.adapter, config)
        self.model.train(self.model.training)  # a new adapter's dropout is on
        self.model.set_adapter(self.adapter)  # PEFT has activated another one in the layers
        self._parameters = []
        self.forget_optimizer()

    def restart(self, source: str | Path, seed: int) -> None:
        """Forgets everything learned: the weights of `source` again, or a fresh adapter drawn from `seed`."""
        if self.adapter is None:
            fresh = type(self.model).from_pretrained(source, dtype=self.model.dtype)
            self.model.load_state_dict(fresh.state_dict())
            self.forget_optimizer()
            return
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            self.replace_adapter(lora_config(self.settings))

    def scale_rate(self, factor: float) -> None:
        """Multiplies the learning rate from now on; checkpoints keep it."""
        for group in self._ready().param_groups:
            group["lr"] *= factor
            group["initial_lr"] *= factor
        self._scheduler.base_lrs = [known * factor for known in self._scheduler.base_lrs]

    def save(self, folder: Path) -> None:
        """Writes `folder/NAME` with `save_pretrained` (a model, or a PEFT adapter) and the tokenizer."""
        place = folder / self.name
        if self.adapter is None:
            self.model.save_pretrained(place)
        else:
            self.model.save_pretrained(folder, selected_adapters=[self.adapter])
            shutil.rmtree(place, ignore_errors=True)
            (folder / self.adapter).rename(place)
        self.tokenizer.save_pretrained(place)
        for file in place.rglob("*.safetensors"):
            file.chmod(0o644)  # safetensors writes 0600, which locks out whoever serves the model

    def save_state(self, folder: Path) -> None:
        """Writes what a resumed run needs beside the weights: optimiser, schedule, version."""
        folder.mkdir(parents=True, exist_ok=True)
        state = {"version": self.version, "optimizer": None, "scheduler": None}
        if self._optimizer is not None:
            state |= {"optimizer": self._optimizer.state_dict(), "scheduler": self._scheduler.state_dict()}
        torch.save(state, folder / f"{self.name}.pt")

    def load(self, folder: Path, state: Path | None = None) -> None:
        """Reads the weights `save` wrote, and the training state when its folder is given."""
        from safetensors.torch import load_file

        place = folder / self.name
        if self.adapter is None:
            fresh = type(self.model).from_pretrained(place, dtype=self.model.dtype)
            self.model.load_state_dict(fresh.state_dict())
        else:
            from peft import LoraConfig, set_peft_model_state_dict

            saved: Any = LoraConfig.from_pretrained(str(place))
            if saved.r != self.model.peft_config[self.adapter].r:  # adapters were stacked into one of a higher rank
                saved.inference_mode = False
                self.replace_adapter(saved)
            set_peft_model_state_dict(self.model, load_file(place / "adapter_model.safetensors"), self.adapter)
        if state is not None:
            data = torch.load(state / f"{self.name}.pt", weights_only=True)
            self.version = data["version"]
            if data["optimizer"] is not None:
                self._ready().load_state_dict(data["optimizer"])
                self._scheduler.load_state_dict(data["scheduler"])


def rate(name: str, step: int, warmup: int, total: int) -> float:
    """Factor on the learning rate at a 0-based optimiser step."""
    if warmup and step < warmup:
        return (step + 1) / warmup
    if name == "constant" or total <= warmup:
        return 1.0
    left = max(0.0, 1.0 - (step - warmup) / (total - warmup))
    return left if name == "linear" else 0.5 * (1 - math.cos(math.pi * left))


def lora_config(spec: Any) -> Any:
    """The adapter that a policy's settings describe."""
    from peft import LoraConfig

    return LoraConfig(
        r=spec.lora_r,
        lora_alpha=spec.lora_alpha or 2 * spec.lora_r,
        lora_dropout=spec.lora_dropout,
        target_modules=spec.target_modules or "all-linear",
        task_type="CAUSAL_LM",
    )
