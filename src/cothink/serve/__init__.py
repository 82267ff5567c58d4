"""An OpenAI-compatible endpoint of a whole team: `serve(team)` runs it until it is told to stop."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from cothink.record import RunError

if TYPE_CHECKING:
    from cothink.api import LoadedTeam
    from cothink.serve.desk import Limits

GRACE = 30.0
"""Seconds that running requests get when the server is told to stop."""


def key_of(variable: str | None) -> str | None:
    """The API key in an environment variable; raises RunError where it is not set."""
    if variable is None:
        return None
    key = os.environ.get(variable, "")
    if not key:
        raise RunError(f"serve: the environment variable {variable} holds no key; set it, or leave out --api-key-env")
    return key


def listener(host: str, port: int) -> socket.socket:
    """A socket that listens; port 0 takes a free one."""
    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        return socket.create_server((host, port), family=family, backlog=2048)
    except OSError as error:
        what = error.strerror or error
        raise RunError(f"serve: cannot listen on {host}:{port}: {what}. Name another --port or --host") from None


def limits_of(**given: Any) -> Limits:
    """The limits of a server: the usual ones, but for those given; raises RunError without the extra `serve`."""
    try:
        import uvicorn  # noqa: F401

        from cothink.serve.desk import Limits
    except ImportError as error:
        raise RunError(f"serving needs an extra: pip install 'cothink[serve]' ({error})") from None
    return Limits(**given)


def server(
    team: LoadedTeam,
    *,
    key: str | None = None,
    limits: Limits | None = None,
    grace: float = GRACE,
    on_ready: Callable[[], None] | None = None,
) -> Any:
    """A uvicorn server of the team: `await it.serve([socket])`; `it.should_exit = True` stops it gracefully.

    Raises RunError without the extra `serve`.
    """
    limits = limits or limits_of()
    import uvicorn

    from cothink.serve.app import app
    from cothink.serve.desk import Desk

    desk = Desk(team, limits)

    class Server(uvicorn.Server):
        """Lets running requests finish, up to `grace` seconds."""

        async def startup(self, sockets: list[socket.socket] | None = None) -> None:
            await super().startup(sockets)
            if on_ready is not None:
                on_ready()

        async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
            desk.draining = True
            closing = asyncio.create_task(desk.close(grace))
            await super().shutdown(sockets)
            if cut := await closing:
                logging.getLogger("cothink.serve").warning("%d requests were cut off after %g s", cut, grace)

        @contextlib.contextmanager
        def capture_signals(self) -> Iterator[None]:
            """A signal stops the server and is done with: uvicorn would raise it again afterwards."""
            if threading.current_thread() is not threading.main_thread():
                yield
                return
            before = {s: signal.signal(s, self.handle_exit) for s in (signal.SIGINT, signal.SIGTERM)}
            try:
                yield
            finally:
                for number, handler in before.items():
                    signal.signal(number, handler)

    # The last seconds are for clients that do not read what they are sent.
    config = uvicorn.Config(
        app(desk, key), log_level="warning", access_log=False, timeout_graceful_shutdown=int(grace) + 5, lifespan="off"
    )  # fmt: skip
    made = Server(config)
    made.desk = desk  # type: ignore[attr-defined]
    return made


def serve(
    load: Callable[[], LoadedTeam],
    *,
    host: str = "127.0.0.1",
    port: int = 8000,
    key: str | None = None,
    limits: Limits | None = None,
    grace: float = GRACE,
    say: Callable[[str], None] = print,
) -> None:
    """Serves the team that `load` gives until SIGINT or SIGTERM; a taken port is an error before anything is loaded."""
    limits = limits or limits_of()
    with listener(host, port) as place:
        team = load()
        address = f"http://{f'[{host}]' if ':' in host else host}:{place.getsockname()[1]}"
        notes = [f"{team.name} listens on {address}/v1 (Ctrl-C stops it)"]
        if key is None and not _here(host):
            notes.append("warning: no API key, and other machines can reach this address; see --api-key-env")
        made = server(team, key=key, limits=limits, grace=grace, on_ready=lambda: _each(say, notes))
        asyncio.run(made.serve(sockets=[place]))
    say("stopped")


def _here(host: str) -> bool:
    return host in ("localhost", "::1") or host.startswith("127.")


def _each(say: Callable[[str], None], lines: Sequence[str]) -> None:
    for line in lines:
        say(line)
