"""Generation: tokens per second of cothink's local engine beside other ways to sample the same completions.

`python bench/generation.py [--model smollm2] [--dtype bfloat16] [--vllm PYTHON]` samples `--prompts` x `--siblings`
completions, ragged in prompts and lengths, with every system in turn. A vLLM of another environment joins in when its
Python is named here or in COTHINK_VLLM_PYTHON. `share` is 2 x parameters x (distinct prompt tokens + sampled tokens)
per second, as a share of the measured ceiling: what a system wastes, it pays for.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import common
import torch
from common import Measured, Work

from cothink import models
from cothink.policy import Policy

WORKER = Path(__file__).with_name("vllm_worker.py")


class Skipped(Exception):
    """A system that cannot run here; the message says why."""


def sample_local(engine: Any, policy: Policy, work: Work, seed: int) -> int:
    """All completions at once through the engine; as after a training step, nothing is cached from before."""
    policy.version += 1
    return sum(len(c.output_ids) for group in common.sample(engine, work, seed) for c in group)


def sample_generate(policy: Policy, work: Work, rows: int) -> int:
    """`model.generate` in left-padded batches, each until its longest limit; what a row says past its own is waste."""
    pad = policy.tokenizer.pad_token_id
    line = [(p, limit) for p, limit in zip(work.prompts, work.limits) for _ in range(work.siblings)]
    model, device, total = policy.model, policy.device, 0
    for start in range(0, len(line), rows):
        part = line[start : start + rows]
        width = max(len(p) for p, _ in part)
        ids = torch.tensor([[pad] * (width - len(p)) + list(p) for p, _ in part], device=device)
        mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p, _ in part], device=device)
        with torch.inference_mode():
            out = model.generate(
                input_ids=ids, attention_mask=mask, do_sample=True, top_k=0, top_p=1.0, temperature=1.0,
                max_new_tokens=max(limit for _, limit in part), pad_token_id=pad, eos_token_id=list(work.stops),
            )  # fmt: skip
        for row, (_, limit) in zip(out[:, width:].tolist(), part):
            total += _length(row[:limit], work.stops)
    return total


def _length(row: list[int], stops: tuple[int, ...]) -> int:
    return next((k + 1 for k, token in enumerate(row) if token in stops), len(row))


def sample_continuous(model: Any, work: Work, rows: int) -> tuple[int, float]:
    """transformers' continuous batching, one request a completion; returns tokens, and seconds without start-up."""
    from transformers import ContinuousBatchingConfig, GenerationConfig

    longest = max(map(len, work.prompts)) + max(work.limits)
    page = 32
    settings = ContinuousBatchingConfig(
        page_size=page,
        num_blocks=rows * -(-longest // page),
        max_batch_tokens=max(512, rows),
        max_requests_per_batch=rows,
        use_cuda_graph=None if torch.cuda.is_available() else False,
    )
    how = GenerationConfig(
        do_sample=True, top_k=0, top_p=1.0, temperature=1.0, eos_token_id=list(work.stops), max_new_tokens=1
    )
    with model.continuous_batching_context_manager(
        generation_config=how, continuous_batching_config=settings, block=True, timeout=10
    ) as manager:
        manager.add_request(list(work.prompts[0]), max_new_tokens=2)
        _results(manager, 1)
        started = time.perf_counter()
        for prompt, limit in zip(work.prompts, work.limits):
            for _ in range(work.siblings):
                manager.add_request(list(prompt), max_new_tokens=limit)
        done = _results(manager, len(work.prompts) * work.siblings)
        return sum(len(r.generated_tokens) for r in done), time.perf_counter() - started


def _results(manager: Any, count: int) -> list[Any]:
    done: list[Any] = []
    while len(done) < count:
        result = manager.get_result(timeout=1)
        if result is None:
            if not manager.is_running():
                raise Skipped(f"generate_batch stopped after {len(done)} of {count} requests")
        elif result.error is not None:
            raise Skipped(f"generate_batch: {result.error}")
        elif result.is_finished():
            done.append(result)
    return done


class VLLM:
    """A vLLM in its own process and environment."""

    def __init__(self, python: str, options: argparse.Namespace, context: int):
        gpu = torch.cuda.is_available()
        self._log = tempfile.TemporaryFile("w+")  # noqa: SIM115 (it lives as long as the process)
        self._process = subprocess.Popen(
            [python, str(WORKER)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._log, text=True, bufsize=1
        )
        ready = self._ask(
            {
                "model": models.where(options.model),
                "dtype": options.dtype,
                "rows": options.rows,
                "context": context,
                "threads": options.threads,
                "device": "cuda" if gpu else "cpu",
                "memory": 0.3 if gpu else 2,  # a share of the GPU's memory, or GiB
            }
        )
        self.version = ready["ready"]

    def sample(self, work: Work) -> tuple[int, float]:
        """Tokens and seconds of one job."""
        answer = self._ask(
            {"prompts": work.prompts, "limits": work.limits, "siblings": work.siblings, "stops": work.stops}
        )
        return answer["tokens"], answer["seconds"]

    def close(self) -> None:
        """Ends the process."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(timeout=60)

    def _ask(self, what: dict[str, Any]) -> dict[str, Any]:
        assert self._process.stdin is not None and self._process.stdout is not None
        try:
            self._process.stdin.write(json.dumps(what) + "\n")
        except BrokenPipeError:
            pass  # it has ended; the log says why
        line = self._process.stdout.readline()
        if not line:
            self._process.wait()
            self._log.seek(0)
            last = [text.strip() for text in self._log.read().splitlines() if text.strip()][-1:]
            raise Skipped(f"vllm stopped: {last[0] if last else 'no message'}")
        return json.loads(line)


def build() -> argparse.ArgumentParser:
    """The options."""
    made = common.parser(
        __doc__, prompts=(64, 8), siblings=(8, 8), shortest=(16, 16), longest=(64, 64), rows=(256, 64), repeats=(3, 2)
    )
    made.add_argument("--vllm", metavar="PYTHON", default=os.environ.get("COTHINK_VLLM_PYTHON"))
    made.add_argument("--without", nargs="*", default=[], choices=("generate_batch",), help="systems to leave out")
    return made


def measure(options: argparse.Namespace) -> None:
    """Runs every system in turn and prints the table."""
    policy = common.policy(options.model, options.dtype)
    engine = common.local(policy, options.rows)
    work = common.work(
        engine.codec("p"), common.chats(options.model, options.prompts, options.seed),
        options.siblings, options.shortest, options.longest, options.seed,
    )  # fmt: skip
    plain = common.policy(options.model, "float32")
    plain.model.to(getattr(torch, options.dtype))
    notes: list[str] = []
    systems: dict[str, Callable[[Work, int], tuple[int, float]]] = {
        "cothink local": lambda w, k: _timed(lambda: sample_local(engine, policy, w, options.seed + k)),
        "model.generate": lambda w, k: _timed(lambda: sample_generate(plain, w, options.rows)),
    }
    if "generate_batch" not in options.without:
        other = common.policy(options.model, "float32")  # it changes its model's attention for good
        other.model.to(getattr(torch, options.dtype))
        systems["generate_batch"] = lambda w, k: sample_continuous(other.model, w, options.rows)
    served = _vllm(options, work, notes)
    if served is not None:
        systems[f"vllm {served.version}"] = lambda w, k: served.sample(w)
    try:
        _warm_up(systems, work, notes)
        before = replace(engine.counters)
        runs = common.alternate(
            {
                **{name: _runner(run, work) for name, run in systems.items()},
                "ceiling": lambda k: Measured(0.0, {"flops": common.ceiling(plain.model, options.dtype)}),
            },
            options.repeats,
        )
    finally:
        if served is not None:
            served.close()
    _report(options, work, runs, common.parameters(plain.model), notes)
    names = ("prefilled", "reused", "generated", "steps", "restarted")
    each = [(n, (getattr(engine.counters, n) - getattr(before, n)) / options.repeats) for n in names]
    print("local engine, each repeat: " + ", ".join(f"{n} {value:,.0f}" for n, value in each))


def _timed(call: Callable[[], int]) -> tuple[int, float]:
    seconds, tokens = common.timed(call)
    return tokens, seconds


def _runner(run: Callable[[Work, int], tuple[int, float]], work: Work) -> Callable[[int], Measured]:
    def measured(repeat: int) -> Measured:
        torch.manual_seed(repeat)
        tokens, seconds = run(work, repeat)
        return Measured(seconds, {"tokens": tokens, "rate": tokens / seconds})

    return measured


def _vllm(options: argparse.Namespace, work: Work, notes: list[str]) -> VLLM | None:
    if not options.vllm:
        notes.append("vllm: not run; name the Python of an environment that has it with --vllm")
        return None
    try:
        return VLLM(options.vllm, options, max(map(len, work.prompts)) + max(work.limits))
    except (Skipped, OSError) as error:
        notes.append(f"vllm: skipped, {error}")
        return None


def _warm_up(systems: dict[str, Any], work: Work, notes: list[str]) -> None:
    """A small job for everybody; a system of others that cannot do it is left out, with its reason."""
    few = Work(work.messages[:2], work.prompts[:2], [4, 6][: len(work.prompts[:2])], min(2, work.siblings), work.stops)
    for name in list(systems):
        try:
            systems[name](few, 0)
        except Exception as error:
            if name in ("cothink local", "model.generate"):
                raise
            reason = str(error).strip().splitlines() or [type(error).__name__]
            notes.append(f"{name}: skipped, {reason[0][:160]}")
            del systems[name]


def _report(
    options: argparse.Namespace, work: Work, runs: dict[str, list[Measured]], weights: int, notes: list[str]
) -> None:
    prefixes = common.Prefixes()
    for prompt in work.prompts:
        prefixes.add(prompt)
    distinct = prefixes.least
    peak = common.median(runs.pop("ceiling"), "flops")
    lengths = [len(p) for p in work.prompts]
    common.header(
        "Generation", options,
        ceiling=f"{peak / 1e9:,.0f} GFLOP/s", rows=options.rows,
    )  # fmt: skip
    print(
        f"{len(work.prompts)} prompts of {min(lengths)}-{max(lengths)} tokens ({distinct:,} distinct) x "
        f"{work.siblings} siblings of at most {min(work.limits)}-{max(work.limits)} tokens"
    )
    base = runs["model.generate"]
    rows = []
    for name, found in runs.items():
        ratio = common.median(
            [Measured(0.0, {"r": a.figures["rate"] / b.figures["rate"]}) for a, b in zip(found, base)], "r"
        )
        tokens, seconds = common.median(found, "tokens"), common.median(found)
        share = 2.0 * weights * (distinct + tokens) / seconds / peak
        rows.append(
            (name, round(tokens), seconds, common.median(found, "rate"), common.times(ratio), common.percent(share))
        )
    common.table(("system", "tokens", "seconds", "tokens/s", "ratio", "share of ceiling"), rows)
    for note in notes:
        print(note)


def main() -> None:
    """Reads the options and measures."""
    measure(common.parse(build()))


if __name__ == "__main__":
    main()
