"""Processes that may be killed: each item has a wall-clock limit that ends its process and nobody else's."""

from __future__ import annotations

import asyncio
import atexit
import importlib.util
import multiprocessing.context
import multiprocessing.process
import multiprocessing.spawn
import os
import signal
import threading
import time
from collections.abc import Callable
from concurrent.futures import BrokenExecutor, Future
from dataclasses import dataclass
from typing import Any

from pebble import ProcessExpired, ProcessPool

from cothink.verify import worker

WORKERS = max(2, min(8, os.cpu_count() or 2))
"""Two at least: a hostile item must not hold up the others."""
MARGIN = 0.25
"""Seconds before an item's limit at which its process is killed; pebble looks every 0.1 s."""
_GIBIBYTES = {"math_verify": 2.0, "reasoning_gym": 4.0}

_pools: dict[str, ProcessPool] = {}
_lock = threading.Lock()


@dataclass(frozen=True, slots=True)
class Job:
    """A call of a `worker` function, in the pool whose processes have imported `module`."""

    module: str
    function: Callable[..., worker.Reply]
    args: tuple[Any, ...]


def run(job: Job, timeout: float) -> worker.Reply:
    """The job's reply; a job that exceeds `timeout` seconds of its own, or kills its process, is an `error` reply."""
    for attempt in (1, 2):
        began = time.perf_counter()
        try:
            return _submit(job, timeout).result()
        except Exception as error:
            reply = _failed(job, error, timeout, time.perf_counter() - began, last=attempt == 2)
            if reply is not None:
                return reply
    raise AssertionError("unreachable: the second attempt always answers")


async def arun(job: Job, timeout: float) -> worker.Reply:
    """As `run`, without blocking the event loop; cancelling the caller kills the item."""
    for attempt in (1, 2):
        began = time.perf_counter()
        try:
            return await asyncio.wrap_future(await asyncio.to_thread(_submit, job, timeout))
        except Exception as error:
            reply = _failed(job, error, timeout, time.perf_counter() - began, last=attempt == 2)
            if reply is not None:
                return reply
    raise AssertionError("unreachable: the second attempt always answers")


def shut_down() -> None:
    """End every process; the next item starts new ones."""
    with _lock:
        pools = list(_pools.values())
        _pools.clear()
    for pool in pools:
        pool.stop()
        pool.join()


def _submit(job: Job, timeout: float) -> Future[worker.Reply]:
    with _lock:
        pool = _pools.get(job.module)
        if pool is None or not pool.active:
            if pool is not None:
                pool.stop()
                pool.join()
            pool = _pools[job.module] = _start(job.module)
        return pool.schedule(job.function, args=[*job.args, timeout], timeout=_limit(timeout))


def _limit(timeout: float) -> float:
    return max(timeout - MARGIN, timeout / 2)


def _start(module: str) -> ProcessPool:
    if importlib.util.find_spec(module) is None:
        package = {"math_verify": "math-verify", "reasoning_gym": "cothink[gym]"}[module]
        raise ModuleNotFoundError(f"{module} is not installed; write: pip install '{package}'")
    return ProcessPool(
        max_workers=WORKERS, initializer=worker.start, initargs=(module, _GIBIBYTES[module]), context=_Context()
    )


def _failed(job: Job, error: Exception, timeout: float, seconds: float, *, last: bool) -> worker.Reply | None:
    """The reply for a failed job, or None when it deserves a second attempt: its end came from outside."""
    if isinstance(error, ModuleNotFoundError):
        raise error
    if isinstance(error, TimeoutError):
        if not last and seconds < _limit(timeout) - 0.1:  # pebble reads the time of day, which was set forward
            return None
        return "error", None, f"no result within {timeout:g} s", min(seconds, timeout)
    if isinstance(error, ProcessExpired):
        outside = error.exitcode in (-signal.SIGTERM, -signal.SIGINT, -signal.SIGHUP)
        if last or not outside:
            return "error", None, f"its process ended with exit code {error.exitcode}", min(seconds, timeout)
        return None
    if last or not isinstance(error, BrokenExecutor | RuntimeError | OSError):
        return "error", None, f"{type(error).__name__}: {error}"[:300], min(seconds, timeout)
    return None


# Spawned processes normally import the caller's script again, which runs it twice where it lacks a __main__ guard and
# loads torch where it has one. Ours need nothing from it.
_starting = threading.local()
_preparation_data = multiprocessing.spawn.get_preparation_data


def _without_main(name: str) -> dict[str, Any]:
    data = _preparation_data(name)
    if getattr(_starting, "ours", False):
        data.pop("init_main_from_name", None)
        data.pop("init_main_from_path", None)
    return data


multiprocessing.spawn.get_preparation_data = _without_main


class _Process(multiprocessing.context.SpawnProcess):
    """A spawned process that does not import the caller's `__main__`."""

    @staticmethod
    def _Popen(process_obj: Any) -> Any:  # the name is multiprocessing's
        _starting.ours = True
        try:
            return multiprocessing.context.SpawnProcess._Popen(process_obj)  # type: ignore[attr-defined]
        finally:
            _starting.ours = False


class _Context(multiprocessing.context.SpawnContext):
    Process = _Process


def _forget() -> None:
    """In a forked child the parent's processes and threads are out of reach: start afresh."""
    global _lock
    # Else the child, when it ends, would end its parent's workers: pebble stops all "active children" at exit. What
    # multiprocessing's own fork does.
    multiprocessing.process._children.clear()  # type: ignore[attr-defined]
    _lock = threading.Lock()
    _pools.clear()


os.register_at_fork(after_in_child=_forget)
atexit.register(shut_down)
