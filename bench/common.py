"""What the benchmarks share: options, prompts, the ceiling of the machine, alternating repeats, the printed table."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import platform
import random
import statistics
import time
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import Any, TypeVar

import torch
from torch import nn

from cothink import models
from cothink.chat import Codec
from cothink.engines.local import LocalEngine, engine
from cothink.loading import load_policies
from cothink.parts import PolicyPart
from cothink.policy import Policy
from cothink.tasks import wordsums
from cothink.types import Completion, Episode, Message, Sampling, Task, Turn

Key = TypeVar("Key")

TINY_SYSTEM = "Solve."
LONG_SYSTEM = (
    "You solve short word problems. Work step by step, one line for each change, and put the final number in a box.\n"
    "Example: Ann counts pens. Ann has 6 pens. Ann buys 5 pens. How many pens does Ann have now?\n"
    "Start: 6. Add 5: 11. \\boxed{11}"
)
"""A prompt of a common length for a model that was not trained on one-line role prompts."""
CEILING_ROWS = {"cpu": 2048, "cuda": 32768}
"""Rows of a matmul: enough for the device's best rate, whatever batch the systems manage to form."""
CEILING_SECONDS = 1.0


def parser(doc: str | None, **sizes: tuple[int, int]) -> argparse.ArgumentParser:
    """The options every benchmark has, and one whole-number option for each of `sizes`.

    A size's pair is its default on the built-in model and on any other: a run stays within three minutes on two cores.
    """
    made = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--model", default="builtin:tiny", help="builtin:tiny, smollm2, a folder or a hub id")
    made.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    made.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    made.add_argument("--seed", type=int, default=0)
    for name, pair in sizes.items():
        known = "default {} on the built-in model, {} on others".format(*pair)
        made.add_argument(f"--{name.replace('_', '-')}", type=int, metavar="N", help=known)
    made.set_defaults(sizes=sizes)
    return made


def parse(made: argparse.ArgumentParser, argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Reads the options, refuses sizes that measure nothing, and sets the number of threads."""
    options = made.parse_args(argv)
    for name, (tiny, other) in options.sizes.items():
        if getattr(options, name) is None:
            setattr(options, name, tiny if is_tiny(options.model) else other)
    for name, value in vars(options).items():
        if isinstance(value, int) and not isinstance(value, bool) and name != "seed" and value < 1:
            made.error(f"--{name.replace('_', '-')} {value}: it must be at least 1")
    options.load = os.getloadavg()[0]
    os.environ["OMP_NUM_THREADS"] = str(options.threads)  # for child processes
    torch.set_num_threads(options.threads)
    return options


def is_tiny(model: str) -> bool:
    """Whether it is the built-in model, which knows one-line system prompts only."""
    return model.startswith("builtin:")


def policy(model: str, dtype: str = "float32", learning_rate: float = 1e-9) -> Policy:
    """One policy over full weights; the rate is so small that repeats train the same weights."""
    part = PolicyPart(model=model, dtype=dtype, learning_rate=learning_rate)  # type: ignore[arg-type]
    return load_policies({"p": part}, models.where)["p"]


def local(policy: Policy, rows: int) -> LocalEngine:
    """A local engine in the policy's own precision, with nothing in its cache."""
    return engine({"p": policy}, max_rows=rows)


def sample(speaker: LocalEngine, work: Work, seed: int) -> list[list[Completion]]:
    """All completions of a work at once, prompt by prompt."""

    async def everyone() -> list[list[Completion]]:
        calls = [
            speaker.generate("p", messages, prompt, Sampling(max_tokens=limit), work.siblings, seed * 1000 + k)
            for k, (messages, prompt, limit) in enumerate(zip(work.messages, work.prompts, work.limits))
        ]
        return list(await asyncio.gather(*calls))

    return asyncio.run(everyone())


def tasks(count: int, seed: int = 0) -> list[Task]:
    """Word problems of all levels, so that prompts are ragged."""
    return wordsums.load(levels=(1, 8), count=count, seed=seed)


def system(model: str) -> str:
    """The system prompt of the single agent."""
    return TINY_SYSTEM if is_tiny(model) else LONG_SYSTEM


def chats(model: str, count: int, seed: int = 0) -> list[list[Message]]:
    """One chat for each task."""
    return [[Message("system", system(model)), Message("user", t.question)] for t in tasks(count, seed)]


@dataclass(frozen=True)
class Work:
    """What every system is asked for: `siblings` completions of each prompt, of at most `limits` tokens each."""

    messages: list[list[Message]]
    prompts: list[tuple[int, ...]]
    limits: list[int]
    siblings: int
    stops: tuple[int, ...]


def work(codec: Codec, messages: list[list[Message]], siblings: int, shortest: int, longest: int, seed: int) -> Work:
    """The same prompts and ragged limits for everybody."""
    rng = random.Random(seed)
    limits = [rng.randint(min(shortest, longest), longest) for _ in messages]
    return Work(messages, [codec.start(m) for m in messages], limits, siblings, tuple(codec.stop_ids))


# numbers


class Prefixes:
    """Distinct beginnings of token sequences: what must be computed at least once."""

    def __init__(self) -> None:
        self._next: dict[tuple[int, int], int] = {}
        self._prompted: set[int] = set()
        self._said: set[int] = set()

    def add(self, prompt: Iterable[int], output: Iterable[int] = ()) -> None:
        """Adds a prompt and what was sampled after it; the last sampled token was never read."""
        node = -1
        for ids, seen in ((prompt, self._prompted), (list(output)[:-1], self._said)):
            for token in ids:
                node = self._next.setdefault((node, token), len(self._next))
                seen.add(node)

    @property
    def least(self) -> int:
        """Prompt tokens to compute when nothing is computed twice, sampled tokens included."""
        return len(self._prompted - self._said)


def parameters(model: nn.Module) -> int:
    """Weights of a model, tied ones once."""
    return sum(p.numel() for p in model.parameters())


def ceiling(model: nn.Module, dtype: str, seconds: float = CEILING_SECONDS) -> float:
    """FLOP/s of the model's own matrix products in one dtype, alone and with plenty of rows.

    Every linear layer's shape counts with its share of the FLOPs of a whole pass.
    """
    shapes: dict[tuple[int, int], int] = {}
    for module in model.modules():
        if isinstance(module, nn.Linear):
            key = (module.in_features, module.out_features)
            shapes[key] = shapes.get(key, 0) + 1
    device = next(model.parameters()).device
    kind, rows = getattr(torch, dtype), CEILING_ROWS[device.type]
    flops = cost = 0.0
    with torch.inference_mode():
        for (size, out), count in shapes.items():
            x = torch.randn(rows, size, device=device, dtype=kind)
            w = torch.randn(out, size, device=device, dtype=kind)
            nn.functional.linear(x, w)
            best, ends = float("inf"), time.perf_counter() + seconds / len(shapes)
            while time.perf_counter() < ends or best == float("inf"):
                best = min(best, timed(lambda x=x, w=w: nn.functional.linear(x, w))[0])
            flops += 2.0 * rows * size * out * count
            cost += best * count
    return flops / cost


def timed(call: Callable[[], Any]) -> tuple[float, Any]:
    """Seconds of one call, and what it returned; waits for a GPU."""
    _settle()
    started = time.perf_counter()
    result = call()
    _settle()
    return time.perf_counter() - started, result


def _settle() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


@dataclass(frozen=True)
class Measured:
    """One run of one system: seconds, and figures to take medians of."""

    seconds: float
    figures: Mapping[str, float]


def alternate(systems: Mapping[Key, Callable[[int], Measured]], repeats: int) -> dict[Key, list[Measured]]:
    """Runs every system once in each repeat, in turn, so that a slow minute of the machine hits all of them."""
    found: dict[Key, list[Measured]] = {name: [] for name in systems}
    for repeat in range(repeats):
        for name, run in systems.items():
            found[name].append(run(repeat))
    return found


def median(runs: Sequence[Measured], figure: str | None = None) -> float:
    """The median of one figure, of the seconds if none is named; nan if no run has it."""
    values = [r.seconds if figure is None else r.figures[figure] for r in runs if figure is None or figure in r.figures]
    return statistics.median(values) if values else float("nan")


def checksum(task: Task, turn: Turn, episode: Episode) -> float:
    """A reward that costs nothing and differs between siblings, even if they say the same: all samples are trained."""
    return grade(episode.id, turn.completion.text)


def grade(place: object, text: str) -> float:
    """The same for an answer known by its place."""
    return zlib.crc32(f"{place} {text}".encode()) % 1000 / 1000


# what is printed


def header(title: str, options: argparse.Namespace, **more: Any) -> None:
    """One line on what is measured, one on what it is measured with."""
    print(f"\n{title}: {options.model}, {options.dtype}")
    names = ("cothink", "torch", "transformers")
    machine = f"{_processor()}, {options.threads} threads"
    if torch.cuda.is_available():
        machine += f", {torch.cuda.get_device_name()}"
    line = [*(f"{n} {installed(n)}" for n in names), f"Python {platform.python_version()}", machine]
    others = f"load at the start {options.load:.1f}"  # near 0 on an idle machine: a busy one's ratios mean little
    print(", ".join([*line, others, f"medians of {options.repeats}", *(f"{k} {v}" for k, v in more.items())]))


def installed(package: str) -> str:
    """The version of a package, `-` if it is not there."""
    try:
        return version(package)
    except PackageNotFoundError:
        return "-"


def _processor() -> str:
    with contextlib.suppress(OSError), open("/proc/cpuinfo") as file:
        for line in file:
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


def table(columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
    """Prints a table: the first column left, the others right; numbers with three digits that mean something."""
    cells = [list(columns), *([cell(v) for v in row] for row in rows)]
    widths = [max(len(row[k]) for row in cells) for k in range(len(columns))]
    for row in cells:
        first, *others = (f"{v:<{w}}" if k == 0 else f"{v:>{w}}" for k, (v, w) in enumerate(zip(row, widths)))
        print("  ".join([first, *others]).rstrip())


def cell(value: Any) -> str:
    """A value as text: nan is `-`, big numbers whole, small ones with three digits."""
    if not isinstance(value, float):
        return f"{value:,}" if isinstance(value, int) else str(value)
    if value != value:
        return "-"
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def times(value: float) -> str:
    """A ratio."""
    return "-" if value != value else f"{value:.2f}x"


def percent(value: float) -> str:
    """A share."""
    return "-" if value != value else f"{100 * value:.0f} %"
