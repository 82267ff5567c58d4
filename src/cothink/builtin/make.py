"""Rebuild the built-in model with one command: `python -m cothink.builtin.make OUT --minutes 26`."""

from __future__ import annotations

import argparse
import math
import os
import random
import shutil
import time
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import torch
import torch.distributed
from torch.multiprocessing.spawn import spawn
from transformers import LlamaConfig, LlamaForCausalLM

from cothink.builtin.chats import CLEAN, MIXED, chats
from cothink.builtin.measure import Sampler, measure, table
from cothink.builtin.tokenizer import END, PAD, START, build, render
from cothink.tasks.wordsums import load

ROW_TOKENS = 1536
"""Padded tokens in one training batch."""
PEAK, FLOOR, WARMUP = 1.4e-3, 0.02, 0.015
"""Learning rate at its peak, the share of it kept at the end, the share of the time spent warming up."""
PLAIN = 0.15
"""Share of the time spent on problems without distractors first."""
SKILL = 0.6
"""Share of the time spent on clean chats, before the bad habits are mixed in."""
OTHER_WEIGHT = 0.05
"""Loss weight of a token that no assistant wrote, against 1 for one that an assistant did."""
SAVE_SECONDS, LOG_STEPS = 300, 100
"""Save this often, measure at every second save, log the loss this often."""


def new_model(tokenizer, layers: int = 4, width: int = 128) -> LlamaForCausalLM:
    """Return an untrained Llama with tied embeddings and heads of 32; 4 layers of width 128 are 0.9 million weights."""
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=width,
        intermediate_size=3 * width,
        num_hidden_layers=layers,
        num_attention_heads=width // 32,
        num_key_value_heads=width // 32,
        max_position_embeddings=1024,
        tie_word_embeddings=True,
        initializer_range=0.08,  # about 1/sqrt(width): copying is learnt faster than from the usual 0.02
        bos_token_id=None,
        eos_token_id=tokenizer.convert_tokens_to_ids(END),
        pad_token_id=tokenizer.convert_tokens_to_ids(PAD),
    )
    return LlamaForCausalLM(config)


class Rows:
    """Endless batches of chats of similar length: ids [B, L] right-padded, and the loss weight of each token [B, L].

    Attention needs no mask: padding is on the right and attention is causal. Positions start at 0 in every row;
    a random offset would change nothing, because rotary attention only sees differences of positions.
    """

    def __init__(self, tokenizer, seed: int) -> None:
        self.tokenizer = tokenizer
        self.random = random.Random(f"rows/{seed}")
        self.habits, self.plain = CLEAN, True
        self.pad, self.end, self.start, self.assistant = (
            tokenizer.convert_tokens_to_ids(token) for token in (PAD, END, START, "assistant")
        )

    def __iter__(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        while True:
            texts = [render(chat) for chat in islice(chats(self.random, self.habits, self.plain), 1000)]
            rows = sorted(self.tokenizer(texts)["input_ids"], key=len)
            batches: list[list[list[int]]] = [[]]
            for row in rows:
                if (len(batches[-1]) + 1) * len(row) > ROW_TOKENS:
                    batches.append([])
                batches[-1].append(row)
            self.random.shuffle(batches)
            for batch in batches:
                longest = max(map(len, batch))
                ids = [row + [self.pad] * (longest - len(row)) for row in batch]
                weights = [self._weights(row) + [0.0] * (longest - len(row)) for row in batch]
                yield torch.tensor(ids), torch.tensor(weights)

    def _weights(self, row: list[int]) -> list[float]:
        weights, speaking = [], False
        for at, token in enumerate(row):
            weights.append(1.0 if speaking else OTHER_WEIGHT)
            if token == self.end:
                speaking = False
            elif at >= 2 and row[at - 2] == self.start and row[at - 1] == self.assistant:
                speaking = True
        return weights


def train(model, tokenizer, out: Path, minutes: float, seed: int, rank: int = 0, processes: int = 1) -> int:
    """Train for so many minutes, saving and measuring on the way; return the number of tokens seen by all processes.

    Each process reads rows of its own and all take one step on the mean gradient; the first one's clock counts.
    """
    optimizer = torch.optim.AdamW(model.parameters(), lr=PEAK, betas=(0.9, 0.98), weight_decay=0.05, fused=True)
    rows = Rows(tokenizer, seed * processes + rank)
    began = saved = time.monotonic()
    spent, losses, tokens, saves = 0.0, [], 0, 0
    for step, (ids, weights) in enumerate(rows):
        progress = agreed((time.monotonic() - began - spent) / (60 * minutes), processes)
        if progress >= 1:
            break
        rows.habits = CLEAN if progress < SKILL else MIXED
        rows.plain = progress < PLAIN
        for group in optimizer.param_groups:
            group["lr"] = PEAK * schedule(progress)
        logits = model(input_ids=ids, use_cache=False).logits[:, :-1]
        each = torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten(), reduction="none")
        loss = (each * weights[:, 1:].flatten()).sum() / weights[:, 1:].sum()
        loss.backward()
        average_gradients(model, processes)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        tokens += processes * int((weights > 0).sum())
        if rank:
            continue
        if step % LOG_STEPS == 0:
            mean = sum(losses) / len(losses)
            losses.clear()
            print(f"{progress:6.1%}  step {step}  tokens {tokens:,}  loss {mean:.4f}", flush=True)
        if time.monotonic() - saved > min(SAVE_SECONDS, 15 * minutes):
            pause = time.monotonic()
            save(model, tokenizer, out)
            saves += 1
            if saves % 2 == 0:
                print(report(model, tokenizer, 120), flush=True)
            saved = time.monotonic()
            spent += saved - pause
    return tokens


def agreed(value: float, processes: int) -> float:
    """Return the first process's value in every process."""
    if processes == 1:
        return value
    shared = torch.tensor([value], dtype=torch.float64)
    torch.distributed.broadcast(shared, 0)
    return shared.item()


def average_gradients(model, processes: int) -> None:
    """Replace every gradient by its mean over the processes."""
    if processes == 1:
        return
    grads = [p.grad for p in model.parameters() if p.grad is not None]
    flat = torch.cat([g.flatten() for g in grads])
    torch.distributed.all_reduce(flat)
    flat /= processes
    for grad, mean in zip(grads, flat.split([g.numel() for g in grads])):
        grad.copy_(mean.view_as(grad))


def schedule(progress: float) -> float:
    """Return the share of the peak learning rate: a linear start, then a cosine down to `FLOOR`."""
    if progress < WARMUP:
        return max(progress / WARMUP, 1e-3)
    return FLOOR + (1 - FLOOR) * 0.5 * (1 + math.cos(math.pi * (progress - WARMUP) / (1 - WARMUP)))


def report(model, tokenizer, count: int, levels: tuple[int, int] = (2, 5)) -> str:
    """Measure on test problems at temperature 1 and show a few texts."""
    model.eval()
    tasks = load("test", levels=levels, count=count, seed=1)
    sampler = Sampler(model, tokenizer)
    answers = measure(sampler, tasks)
    model.train()
    texts = [f"  {name}: {answers[name][at]!r}" for at in range(2) for name in answers]
    lengths = [f"{name} {sum(map(len, tokenizer(said)['input_ids'])) / count:.0f}" for name, said in answers.items()]
    return "\n".join([table(tasks, answers), f"Mean tokens: {', '.join(lengths)}.", *texts])


def save(model, tokenizer, out: Path) -> None:
    """Write model and tokenizer into `out`, as a whole or not at all."""
    fresh = out.with_name(f".{out.name}.new")
    shutil.rmtree(fresh, ignore_errors=True)
    model.save_pretrained(fresh)
    tokenizer.save_pretrained(fresh)
    for file in fresh.iterdir():
        file.chmod(0o644)  # safetensors writes 0600
    shutil.rmtree(out, ignore_errors=True)
    os.replace(fresh, out)


def main() -> None:
    """Parse the command line, build the tokenizer, train, measure and save."""
    parser = argparse.ArgumentParser(description="Rebuild the built-in model and its tokenizer.")
    parser.add_argument("out", type=Path, help="folder to write (an older one is replaced)")
    parser.add_argument("--minutes", type=float, default=26, help="training time (default 26)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--processes", type=int, default=2, help="one thread each (default 2)")
    parser.add_argument("--layers", type=int, default=4, help="(default 4)")
    parser.add_argument("--width", type=int, default=128, help="a multiple of 32 (default 128)")
    args = parser.parse_args()
    if args.width % 32 or min(args.width, args.layers) < 1:
        parser.error("--width is a multiple of 32, such as 64, and --layers at least 1")
    port = 29500 + os.getpid() % 1000
    if args.processes == 1:
        make(0, args, port)
    else:
        spawn(make, (args, port), nprocs=args.processes)


def make(rank: int, args: argparse.Namespace, port: int) -> None:
    """One process's part of the work; the first one saves and measures."""
    torch.set_num_threads(1)
    if args.processes > 1:
        where = f"tcp://127.0.0.1:{port}"
        torch.distributed.init_process_group("gloo", init_method=where, rank=rank, world_size=args.processes)
    torch.manual_seed(args.seed)
    tokenizer = build(args.seed)
    model = new_model(tokenizer, args.layers, args.width)
    if rank == 0:
        print(f"{sum(p.numel() for p in model.parameters()):,} weights, {len(tokenizer)} tokens", flush=True)
    tokens = train(model, tokenizer, args.out, args.minutes, args.seed, rank, args.processes)
    if args.processes > 1:
        torch.distributed.destroy_process_group()
    if rank == 0:
        save(model, tokenizer, args.out)
        print(f"{tokens:,} tokens seen\n{report(model, tokenizer, 800, (1, 8))}", flush=True)


if __name__ == "__main__":
    main()
