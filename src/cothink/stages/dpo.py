"""The `dpo` stage: good turns of collected trees are preferred to bad ones, through TRL's DPOTrainer (MALT section 4).

The reference of a policy is its own checkpoint at the start of the stage. Its log-probs are computed once and stored in
the rows with the checkpoint's hash; before the first step every pair must cost ln 2, or the stage stops.
"""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cothink.conversations.tree import Pairs, pairs
from cothink.parts import DPO
from cothink.recipe import Recipe
from cothink.resolve import bind
from cothink.session import Session
from cothink.sft_rules import passes, taught
from cothink.stages import trl_bridge, trl_pairs, trl_skip
from cothink.stages.lessons import DataShort, card, export, log, refuse_test_rows, stores, workplace
from cothink.stages.progress import bar
from cothink.team import stable_seed
from cothink.trees.rows import Row

if TYPE_CHECKING:
    from cothink.policy import Policy

CHECKED = 32
"""Pairs whose loss is looked at before the first step."""
EXACT, COARSE = 2e-3, 0.1
"""How far the loss of an untrained pair may be from ln 2: in float32, and where anything is computed in bfloat16."""
REFERENCE_TOKENS = 8192
FIGURES = {
    "loss": "loss",
    "grad_norm": "gradient_norm",
    "learning_rate": "learning_rate",
    "rewards/margins": "margin",
    "rewards/accuracies": "pair_accuracy",
    "mean_token_accuracy": "token_accuracy",
    "entropy": "entropy",
    "epoch": "epoch",
    "skipped_updates": "skipped_updates",
}
"""What a trainer calls a figure, and what the metrics call it (after the policy's name)."""


class ReferenceLost(RuntimeError):
    """The weights that pairs are measured against are not those that the policy starts from."""


@dataclass
class Contest:
    """What one policy learns in a stage: its pairs with the reference's log-probs of (chosen, rejected), and facts."""

    rows: list[Row] = field(default_factory=list)
    facts: dict[str, float] = field(default_factory=dict)
    reference: list[tuple[float, float]] = field(default_factory=list)
    checkpoint: str = ""


async def dpo(session: Session, stage: DPO, index: int) -> dict[str, float]:
    """Teaches the stage's roles, one policy after the other, and returns the last figures of each.

    Checkpoints, kills and interruptions as in the sft stage. Raises DataShort where a role has no usable pair, and
    ReferenceLost where the policy is not what its reference log-probs were computed with.
    """
    trl_bridge.require_trl()
    state = session.run.state if session.run is not None else {}
    done: dict[str, int] = dict(state.get("progress", {}).get("done", {})) if state.get("stage") == index else {}
    contests = prepare(session, stage, index)
    found: dict[str, float] = {}
    for name, contest in contests.items():
        if name not in done:
            found |= await _learn(session, stage, index, name, contest, sum(done.values()), done)
    return found


def pairs_of(recipe: Recipe, stage: DPO, index: int, folder: Path | None = None) -> Pairs:
    """The pairs of a stage; raises DataError when they are not there or not usable. `folder` is the run's own."""
    names, roles = taught(recipe, stage), recipe.roles()
    options = stores(recipe, index, folder, pairs, stage.data.options)
    return bind(pairs, options, f"stages.{index}.data")({name: roles[name] for name in names})


def prepare(session: Session, stage: DPO, index: int) -> dict[str, Contest]:
    """The pairs of every policy of the stage, in recipe order; raises DataShort when a role is left without any."""
    folder = session.run.folder if session.run is not None else None
    found = pairs_of(session.recipe, stage, index, folder)
    refuse_test_rows({"row_id": r.row_id, "task_id": r.task_id, "split": r.split} for r in found)
    card(session, f"{index:02d}-dpo", found.facts)
    for note in found.notes:
        session.say(f"{stage.data.name}: {note}")
    names = taught(session.recipe, stage)
    used = {session.roles[name].policy for name in names}
    contests = {name: Contest() for name in session.policies if name in used}
    for role in names:
        _add(session, stage, contests, role, [row for row in found if row.role == role])
    return contests


def _add(session: Session, stage: DPO, contests: Mapping[str, Contest], role: str, rows: Sequence[Row]) -> None:
    """Puts one role's pairs into its policy's contest; those with a side that is too long are left out."""
    name = session.roles[role].policy
    policy = session.policies[name]
    if not hasattr(policy, "tokenizer"):
        raise trl_bridge.SetupError(f"policy {name!r} has no language model, and a dpo stage needs one: engine: local")
    limit = min(stage.max_length, getattr(policy.model.config, "max_position_embeddings", None) or stage.max_length)
    kept = [r for r in rows if all(len(r.prompt_ids) + len(side.completion_ids) <= limit for side in r.sides)]
    dropped = len(rows) - len(kept)
    if not kept:
        raise DataShort(f"{stage.data.name}: all {dropped:,} pairs of the role {role!r} are longer than {limit:,} "
                        "tokens; raise max_length, or take a model with a longer context")  # fmt: skip
    chosen, rejected = (sum(len(r.sides[k].completion_ids) for r in kept) / len(kept) for k in (0, 1))
    contests[name].rows += kept
    contests[name].facts |= {
        f"{role}/pairs": float(len(kept)),
        f"{role}/dropped": float(dropped),
        f"{role}/chosen_tokens": chosen,
        f"{role}/rejected_tokens": rejected,
    }
    long = f", {dropped:,} longer than {limit:,} tokens left out" if dropped else ""
    session.say(f"{role}: {len(kept):,} pairs, {chosen:.1f} tokens chosen and {rejected:.1f} rejected on average{long}")


async def _learn(
    session: Session, stage: DPO, index: int, name: str, contest: Contest, offset: int, done: dict[str, int]
) -> dict[str, float]:
    """One policy's training; `offset` is the number of steps that the policies before it took."""
    policy = session.policies[name]
    file = None if session.run is None else session.run.folder / "pairs" / f"{index:02d}-{name}.jsonl"
    refer(policy, contest, file)
    if file is not None:
        export(file, lines(policy, contest))
    pending: dict[str, float] = dict(contest.facts)
    last: dict[str, float] = {}

    def report(step: int, logs: Mapping[str, Any]) -> None:
        if "loss" in logs:
            figures = {f"{name}/{ours}": float(logs[theirs]) for theirs, ours in FIGURES.items() if theirs in logs}
            # TRL logs beta times the change of log-prob since the reference.
            figures |= {
                f"{name}/{side}_change": float(logs[f"rewards/{side}"]) / stage.beta for side in ("chosen", "rejected")
            }
            last.clear()
            last.update(figures)
            log(session, index, offset + step, {**pending, **figures})
            pending.clear()

    seed = stable_seed(session.recipe.seed if stage.seed is None else stage.seed, "dpo", index, name) % 2**31
    with workplace(session, index, name) as folder:
        steps, start = train(policy, stage, contest, folder, seed, report, (session.console, f"dpo of {name}"))
        await asyncio.sleep(0)  # where a Ctrl-C during training takes effect; the trainer has saved its place
        policy.version += 1
        session.engines[name].load(name, None, policy.version)
        done[name] = steps
        if session.run is not None:
            place = {"stage": index, "step": sum(done.values()), "progress": {"done": done}}
            session.run.checkpoint(session.policies, place)
    end = {key.removeprefix(f"{name}/"): value for key, value in last.items()}
    session.say(
        f"{name}: loss {start:.4f} -> {end['loss']:.4f} after {steps:,} steps; in the last one margin "
        f"{end['margin']:+.3f}, {100 * end['pair_accuracy']:.0f} % of pairs in order, log-prob of chosen "
        f"{end['chosen_change']:+.2f} and of rejected {end['rejected_change']:+.2f} nats"
    )
    return {f"{name}/start_loss": start, **last}


def refer(policy: Policy, contest: Contest, file: Path | None) -> None:
    """Gives every pair its reference log-probs: those stored in `file` by an earlier attempt, else the policy's own.

    Raises ReferenceLost where the stored ones are of another checkpoint or of other pairs.
    """
    contest.checkpoint = trl_bridge.fingerprint(policy)
    if file is None or not file.exists():
        contest.reference = reference(policy, contest.rows)
        return
    known = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
    again = f"delete {file} to compute them anew"
    for line in known:
        if line["ref_checkpoint_hash"] != contest.checkpoint:
            raise ReferenceLost(
                f"{file} holds reference log-probs of the checkpoint {line['ref_checkpoint_hash']}, and policy "
                f"{policy.name!r} starts from {contest.checkpoint}: restore its weights, or {again}"
            )
    if [line["row_id"] for line in known] != [row.row_id for row in contest.rows]:
        raise ReferenceLost(f"{file} holds other pairs than the trees give now: restore the trees, or {again}")
    contest.reference = [(line["ref_chosen_logps"], line["ref_rejected_logps"]) for line in known]


def reference(policy: Policy, rows: Sequence[Row]) -> list[tuple[float, float]]:
    """Log-prob, in nats, of the chosen and the rejected completion of every pair under the policy as it stands."""
    import torch

    from cothink.batch import microbatches, pad
    from cothink.logprobs import is_flat

    sides = {sample.ids: sample for row in rows for sample in row.samples(policy.name)}
    known: dict[tuple[int, ...], float] = {}
    with torch.no_grad():
        for micro in microbatches(list(sides.values()), REFERENCE_TOKENS, padded=not is_flat(policy.model)):
            batch = pad(micro, [[0.0] * len(s.ids) for s in micro]).to(policy.device)
            logprobs, _ = policy.logprobs(batch)
            known |= zip((s.ids for s in micro), logprobs.double().sum(dim=1).tolist(), strict=True)
    return [(known[(*r.prompt_ids, *r.sides[0].completion_ids)], known[(*r.prompt_ids, *r.sides[1].completion_ids)])
            for r in rows]  # fmt: skip


def train(
    policy: Policy,
    stage: DPO,
    contest: Contest,
    folder: Path,
    seed: int,
    report: trl_bridge.Report,
    shown: tuple[Any, str] = (None, ""),
) -> tuple[int, float]:
    """Runs the trainer to its end, or to an interruption; returns the optimiser steps in all and the loss before them.

    Raises ReferenceLost unless the policy starts at its reference.
    """
    with trl_bridge.quiet(), trl_pairs.contending(policy, stage.adapter_scale, seed) as seat:
        trainer = trl_pairs.dpo_trainer(policy, seat, _config(policy, stage, contest, folder, seed), dataset(contest))
        each = math.ceil(len(contest.rows) / stage.pairs_per_step)
        total = stage.max_steps or math.ceil(each * passes(stage.epochs, len(contest.rows)))
        start = _start(trainer, policy, contest)
        trl_skip.broken_updates(trainer, policy.name, f"the {len(contest.rows):,} pairs and their reference log-probs")
        trainer.add_callback(trl_bridge.follower(report, dict, each))
        with bar(shown[0], shown[1], total) as advance:
            if advance is not None:
                trainer.add_callback(trl_bridge.ticker(advance))
            last = trl_bridge.last_checkpoint(folder)
            trainer.train(resume_from_checkpoint=None if last is None else str(last))
        return trainer.state.global_step, start


def _config(policy: Policy, stage: DPO, contest: Contest, folder: Path, seed: int) -> Any:
    from trl.trainer.dpo_config import DPOConfig

    size = stage.microbatch_pairs or stage.pairs_per_step
    smooth = stage.label_smoothing
    # TRL's `sigmoid` knows no smoothing. Its `robust` does, and this sum of the two is the conservative loss
    # (1 - e) S(d) + e S(-d) with S(d) = -log sigmoid(beta d): robust is ((1 - e) S(d) - e S(-d)) / (1 - 2 e).
    losses: dict[str, Any] = {"loss_type": ["sigmoid"]}
    if smooth:
        losses = {"loss_type": ["sigmoid", "robust"], "loss_weights": [2 * (1 - smooth), -(1 - 2 * smooth)]}
    return DPOConfig(
        **trl_bridge.arguments(
            policy,
            folder,
            scheduler=stage.scheduler,
            warmup_steps=stage.warmup_steps,
            learning_rate=stage.learning_rate,
            num_train_epochs=passes(stage.epochs, len(contest.rows)),
            max_steps=stage.max_steps or -1,
            per_device_train_batch_size=size,
            gradient_accumulation_steps=stage.pairs_per_step // size,
            save_strategy="steps" if stage.checkpoint_every else "no",
            save_steps=stage.checkpoint_every or 500,
            seed=seed,
            data_seed=seed,
        ),
        max_length=None,  # what is too long was left out
        beta=stage.beta,
        label_smoothing=smooth,
        precompute_ref_log_probs=True,
        **losses,
    )


def dataset(contest: Contest) -> Any:
    """Pairs as TRL's trainer takes them: the ids that were sampled, and the reference's log-probs."""
    from datasets import Dataset

    return Dataset.from_list([_ids(row, ref) for row, ref in zip(contest.rows, contest.reference, strict=True)])


def _ids(row: Row, ref: tuple[float, float]) -> dict[str, Any]:
    chosen, rejected = row.sides
    return {"prompt_ids": list(row.prompt_ids), "chosen_ids": list(chosen.completion_ids),
            "rejected_ids": list(rejected.completion_ids), "ref_chosen_logps": ref[0],
            "ref_rejected_logps": ref[1]}  # fmt: skip


def lines(policy: Policy, contest: Contest) -> Iterator[dict[str, Any]]:
    """What a policy learns from: ids and reference log-probs, the lineage, and the texts that plain TRL reads."""
    say = policy.tokenizer.decode
    for row, ref in zip(contest.rows, contest.reference, strict=True):
        ids = _ids(row, ref)
        words = {key: say(ids[f"{key}_ids"], clean_up_tokenization_spaces=False)
                 for key in ("prompt", "chosen", "rejected")}  # fmt: skip
        yield {**row.json(), **words, **ids, "ref_checkpoint_hash": contest.checkpoint}


def _start(trainer: Any, policy: Policy, contest: Contest) -> float:
    """Mean loss of some pairs before the first step, each of which must be ln 2: nothing has been learned yet."""
    some = [row for row, _ in zip(trainer.train_dataset, range(CHECKED))]
    found = [trl_pairs.loss_of(trainer, row) for row in some]
    worst = max(abs(value - math.log(2)) for value in found)
    exact = str(policy.model.dtype) == "torch.float32" and not policy.mixed
    if worst > (EXACT if exact else COARSE):
        odd = max(found, key=lambda value: abs(value - math.log(2)))
        raise ReferenceLost(
            f"policy {policy.name!r} is not its own reference (checkpoint {contest.checkpoint}): before the first step "
            f"a pair costs ln 2 = 0.693, and one costs {odd:.3f}. The adapter that sft has trained may be missing"
        )
    return sum(found) / len(found)
