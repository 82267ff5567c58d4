"""A stand-in for Ray, with the names that the engine uses: actors live in this process, arguments are copied.

`Actor.end` kills one: what it is asked from then on, and what it was doing, fails as in Ray.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import pickle
import sys
import threading
from concurrent.futures import Future, wait
from types import ModuleType
from types import SimpleNamespace as NS
from typing import Any, ClassVar


class RayActorError(Exception):
    pass


class RayTaskError(Exception):
    def __init__(self, cause: Exception):
        super().__init__(f"a long trace\n{cause}")
        self.cause = cause


class Ref:
    def __init__(self, future: Future):
        self.future = future

    def __await__(self):
        return asyncio.wrap_future(self.future).__await__()


class Method:
    def __init__(self, actor: Actor, name: str):
        self.actor, self.name = actor, name

    def remote(self, *given: Any) -> Ref:
        return self.actor.call(self.name, pickle.dumps([get(g) if isinstance(g, Ref) else g for g in given]))


class Actor:
    made: ClassVar[list[Actor]] = []

    def __init__(self, kind: type, options: dict):
        self.inside, self.options, self.alive, self.open = kind(), options, True, []
        Actor.made.append(self)

    def __getattr__(self, name: str) -> Method:
        return Method(self, name)

    def call(self, name: str, given: bytes) -> Ref:
        told: Future = Future()
        if not self.alive:
            told.set_exception(RayActorError("pid: 4\nWorker exit detail: it is dead. Some common causes"))
            return Ref(told)
        self.open.append(told)

        async def run() -> None:
            try:
                found = getattr(self.inside, name)(*pickle.loads(given))
                found = pickle.dumps(await found if asyncio.iscoroutine(found) else found)
                _tell(told, lambda: told.set_result(pickle.loads(found)))
            except Exception as error:
                cause = error
                _tell(told, lambda: told.set_exception(RayTaskError(cause)))

        asyncio.run_coroutine_threadsafe(run(), _loop())
        return Ref(told)

    def end(self) -> None:
        """Its process is killed."""
        self.alive = False
        for told in self.open:
            _tell(told, lambda told=told: told.set_exception(RayActorError("pid: 4\nWorker exit detail: killed")))


@functools.cache
def _loop() -> asyncio.AbstractEventLoop:
    """One thread for all actors: transformers cannot load two models at once in one process."""
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, daemon=True).start()
    return loop


def _tell(told: Future, say: Any) -> None:
    with contextlib.suppress(Exception):  # it was told already: killed, or cancelled
        say()


def get(what: Any) -> Any:
    return [get(w) for w in what] if isinstance(what, list) else what.future.result(timeout=60)


def _put(what: Any) -> Ref:
    told: Future = Future()
    told.set_result(pickle.loads(pickle.dumps(what)))
    return Ref(told)


def _wait(refs: list[Ref], num_returns: int = 1, timeout: float | None = None) -> tuple[list[Ref], list[Ref]]:
    wait([r.future for r in refs], timeout=timeout)
    return [r for r in refs if r.future.done()], [r for r in refs if not r.future.done()]


def _remote(kind: type) -> Any:
    return NS(options=lambda **options: NS(remote=lambda: Actor(kind, options)))


@contextlib.contextmanager
def installed():
    """`import ray` finds this one."""
    fake: Any = ModuleType("ray")
    fake.given = {}
    fake.get, fake.put, fake.wait, fake.remote = get, _put, _wait, _remote
    fake.init = lambda **given: fake.given.update(given)
    fake.is_initialized = lambda: bool(fake.given)
    fake.kill, fake.cancel = (lambda actor: actor.end()), (lambda ref: None)
    fake.get_runtime_context = lambda: NS(namespace=fake.given.get("namespace"))
    fake.available_resources = lambda: {"CPU": 1.0, "memory": 5.0}
    fake.exceptions = NS(RayActorError=RayActorError, RayTaskError=RayTaskError)
    kept = sys.modules.get("ray")
    sys.modules["ray"] = fake
    try:
        yield fake
    finally:
        if kept is None:
            del sys.modules["ray"]
        else:
            sys.modules["ray"] = kept
