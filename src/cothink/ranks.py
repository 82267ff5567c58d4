"""The processes of one run: which one this is, its share of the work, and what they tell one another.

torch.distributed is imported only where there are several. Objects travel by pickle, among processes of one run that
were started together and trust one another.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

T = TypeVar("T")

PATIENCE = timedelta(hours=2)
"""How long a process waits for the others. One that ends is noticed at once; this is for one that hangs."""
BUCKET = 1 << 24
"""Numbers added up in one message."""
BROKEN = re.compile(r"gloo|nccl|connection (closed|reset|refused)|broken pipe|timed out", re.I)


class RanksError(RuntimeError):
    """The processes of a run cannot work together: started wrongly, or one of them has ended."""


@dataclass(frozen=True)
class Ranks:
    """The `count` processes of a run, of which this is `number`; alone, everything stays here and nothing waits.

    Number 0 leads: it alone writes files, prints and evaluates.
    """

    number: int = 0
    count: int = 1

    @property
    def leads(self) -> bool:
        """Whether this is the process that writes."""
        return self.number == 0

    def share(self, items: Sequence[T]) -> list[T]:
        """Every `count`-th item, beginning with `number`."""
        return list(items[self.number :: self.count])

    def gather(self, value: T) -> list[T]:
        """Everybody's value, in the order of their numbers."""
        if self.count == 1:
            return [value]
        import torch.distributed as dist

        found: list[Any] = [None] * self.count
        with self.together():
            dist.all_gather_object(found, value)
        return found

    def first(self, value: T) -> T:
        """The value that number 0 has; what the others give is not looked at."""
        if self.count == 1:
            return value
        import torch.distributed as dist

        box = [value if self.leads else None]
        with self.together():
            dist.broadcast_object_list(box, 0)
        return box[0]  # type: ignore[return-value]

    def wait(self) -> None:
        """Goes on when everybody is here."""
        self.gather(None)

    def add_gradients(self, parameters: Sequence[Any]) -> None:
        """Every gradient becomes the sum of everybody's; one that nobody has stays None."""
        if self.count == 1:
            return
        import torch
        import torch.distributed as dist

        device = parameters[0].device
        there = torch.tensor([p.grad is not None for p in parameters], dtype=torch.int32, device=device)
        with self.together():
            dist.all_reduce(there)
            learned = [p for p, many in zip(parameters, there.tolist(), strict=True) if many]
            for p in learned:
                p.grad = torch.zeros_like(p) if p.grad is None else p.grad
            for bucket in buckets([p.grad for p in learned]):
                flat = torch.cat([g.flatten() for g in bucket])
                dist.all_reduce(flat)
                for gradient, part in zip(bucket, flat.split([g.numel() for g in bucket]), strict=True):
                    gradient.copy_(part.view_as(gradient))

    @contextlib.contextmanager
    def together(self) -> Iterator[None]:
        """Turns what torch says when another process is gone into words."""
        try:
            yield
        except RuntimeError as error:
            if self.count == 1 or not BROKEN.search(str(error)):
                raise
            raise RanksError(
                f"process {self.number} of {self.count} lost the others: one of them has ended or cannot be reached "
                f"(its own message says why, if it could still write one). Start the same command again: it goes on "
                f"from the last checkpoint. torch said: {str(error).splitlines()[0][:200]}"
            ) from error


def buckets(tensors: Sequence[Any], size: int = BUCKET) -> list[list[Any]]:
    """Neighbours of one dtype, together at most `size` numbers; a larger one is alone."""
    found: list[list[Any]] = []
    held = 0
    for tensor in tensors:
        if found and tensor.dtype == found[-1][0].dtype and held + tensor.numel() <= size:
            found[-1].append(tensor)
            held += tensor.numel()
        else:
            found.append([tensor])
            held = tensor.numel()
    return found


def started() -> int:
    """How many processes the launcher says there are; 1 without a launcher."""
    said = os.environ.get("WORLD_SIZE", "1")
    if not said.isdecimal() or int(said) < 1:
        raise RanksError(f"WORLD_SIZE is {said!r}; start with torchrun, which sets it, or unset it")
    return int(said)


@contextlib.contextmanager
def undisturbed() -> Iterator[None]:
    """Signals that would end this process wait for the block and are then forgotten: it is for a process that ends.

    A launcher that has lost one process soon tells the others to stop, perhaps while they save what they have.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, signal.SIG_IGN) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)


@contextlib.contextmanager
def joined() -> Iterator[Ranks]:
    """The processes that torchrun started, for as long as the block lasts."""
    count = started()
    if count == 1:
        yield Ranks()
        return
    names = ("RANK", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
    missing = ", ".join(name for name in names if name not in os.environ)
    if missing:
        raise RanksError(f"WORLD_SIZE is {count}, and {missing} is not set: start with torchrun, or unset WORLD_SIZE")
    import torch
    import torch.distributed as dist

    number, here = int(os.environ["RANK"]), int(os.environ["LOCAL_RANK"])
    cuda = torch.cuda.is_available()
    if cuda and here >= torch.cuda.device_count():
        raise RanksError(
            f"process {number} is number {here} on this machine, which has {torch.cuda.device_count()} GPUs: "
            "write --nproc-per-node with no more than that"
        )
    if cuda:
        torch.cuda.set_device(here)
    ranks = Ranks(number, count)
    with ranks.together():
        dist.init_process_group("cpu:gloo,cuda:nccl" if cuda else "gloo", timeout=PATIENCE)
    try:
        yield ranks
    finally:
        dist.destroy_process_group()
