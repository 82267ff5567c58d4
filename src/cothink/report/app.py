"""The local viewer: the pieces of the report over a folder of runs, read while they train; for this machine only.

Whatever a request names (a run, a stage, a step) is looked up in what the folder holds: no path is made of it.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from fastapi import FastAPI, HTTPException, Query, Request
from fastapi.responses import FileResponse, JSONResponse, Response
from starlette.middleware.trustedhost import TrustedHostMiddleware

from cothink.record import RunError
from cothink.report import episodes, pairs, sections
from cothink.report.conversation import TEXT, episode, line
from cothink.report.curves import drawings
from cothink.report.folders import Folder, walk
from cothink.report.markup import text
from cothink.report.page import STATIC, figures
from cothink.resolve import RecipeError

HOSTS = ("127.0.0.1", "localhost")
"""Names a browser may call this server by: a page elsewhere that points its own name here is refused."""
HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src 'self' data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-store",
}
FILES = {"": "view.html", "style.css": "style.css", "view.css": "view.css", "view.js": "view.js", "keys.js": "keys.js"}
PLACE = r"^\d{1,15}:\d{1,15}$"
"""Where a list goes on: file and byte, or a byte in each of two files."""
WHOLE = 2_000_000
"""Characters of a turn that are sent when all of it is asked for."""


class Ascii(JSONResponse):
    """JSON in ASCII: names of folders and roles may hold halves of surrogate pairs, which have no UTF-8."""

    def render(self, content: Any) -> bytes:
        return json.dumps(content, allow_nan=False).encode("ascii")


Evaluated = Callable[[Mapping[str, tuple[Path, Mapping[str, Any]]]], Sequence[sections.Table]]


class Shelf:
    """The runs below one folder, opened once and read as they grow."""

    def __init__(self, root: Path, evaluated: Evaluated):
        self.root = root.resolve()
        self._evaluated = evaluated
        self._open: dict[str, Folder] = {}
        self._tables: dict[tuple[str, ...], tuple[str, str]] = {}

    def runs(self) -> dict[str, Folder]:
        """All runs by name, the path below the folder; the newest written first."""
        found = {}
        for path in walk(self.root):
            name = path.name if path == self.root else path.relative_to(self.root).as_posix()
            found[name] = self._open.get(name) or Folder(path, name)
        self._open = dict(sorted(found.items(), key=lambda item: -item[1].touched))
        return self._open

    def run(self, name: str) -> Folder:
        """One run; 404 for a name the folder does not hold."""
        found = self._open.get(name) or self.runs().get(name)
        if found is None or not found.path.is_dir():
            raise HTTPException(404, f"no run {name!r} in {self.root}")
        return found

    def files(self, name: str, stage: str) -> list[Path]:
        """The episode files of one stage of a run."""
        found = self.run(name).episodes().get(stage)
        if found is None:
            raise HTTPException(404, f"run {name!r} has no episodes {stage!r}")
        return found

    def evaluations(self, runs: Sequence[Folder]) -> str:
        """The tables of evaluations; worked out anew only when the results have changed."""
        results = {run.name: (run.path, run.results) for run in runs if run.results}
        now = version(run.path / "results.json" for run in runs)
        key = tuple(results)
        if self._tables.get(key, ("", ""))[0] != now:
            self._tables[key] = now, sections.tables(self._evaluated(results)) if results else ""
        return self._tables[key][1]


def version(paths: Any) -> str:
    """A word that changes when one of the files does."""
    states = [p.stat() if p.exists() else None for p in paths]
    told = repr([s and (s.st_ino, s.st_size, s.st_mtime_ns) for s in states])
    return hashlib.blake2b(told.encode(), digest_size=8).hexdigest()


def app(root: Path, evaluated: Evaluated) -> FastAPI:
    """The viewer of a folder; `evaluated` makes the tables of evaluations."""
    made = FastAPI(title="cothink view", docs_url=None, redoc_url=None, openapi_url=None, default_response_class=Ascii)
    made.add_middleware(TrustedHostMiddleware, allowed_hosts=[*HOSTS])
    shelf = Shelf(root, evaluated)

    @made.middleware("http")
    async def guarded(request: Request, call_next: Any) -> Response:
        answer = await call_next(request)
        answer.headers.update(HEADERS)
        return answer

    @made.exception_handler(RunError)
    @made.exception_handler(RecipeError)
    async def unreadable(request: Request, error: Exception) -> Response:
        return Ascii({"detail": str(error)}, 400)

    for path, name in FILES.items():
        made.add_api_route(f"/{path}", _sender(STATIC / name), methods=["GET"])
    _runs(made, shelf)
    _episodes(made, shelf)
    _compare(made, shelf)
    return made


def _sender(path: Path) -> Callable[[], FileResponse]:
    return lambda: FileResponse(path)


def _runs(made: FastAPI, shelf: Shelf) -> None:
    """What runs there are, one run, and curves."""

    @made.get("/api/runs")
    def runs() -> dict[str, Any]:
        return {"folder": str(shelf.root), "runs": [_brief(run) for run in shelf.runs().values()]}

    @made.get("/api/run")
    def about(run: str) -> dict[str, Any]:
        found = shelf.run(run)
        html = sections.about(found) + f"<h2>The watch</h2>{sections.watched(found)}" + sections.numbers(found)
        return {"name": found.name, "html": html, "evaluations": shelf.evaluations([found])}

    @made.get("/api/stages")
    def stages(run: str) -> dict[str, Any]:
        found = shelf.run(run)
        return {"stages": {name: [_number(p) for p in files] for name, files in found.episodes().items()},
                "roles": found.roles}  # fmt: skip

    @made.get("/api/curves")
    def curves(run: Annotated[list[str], Query()], seen: str = "") -> dict[str, Any]:
        found = [shelf.run(name) for name in run]
        now = version(one.path / "metrics.jsonl" for one in found)
        if now == seen:
            return {"version": now}
        return {"version": now, "html": figures(drawings({one.name: one.metrics() for one in found}))}


def _brief(run: Folder) -> dict[str, Any]:
    """A run in the list."""
    try:
        status, progress = run.status, run.progress
    except RecipeError as error:
        return {"name": run.name, "status": "unreadable", "progress": str(error), "touched": run.touched}
    rows, results = run.metrics(), run.results
    label, last = next(reversed(results.items()), ("", {}))
    told = f"{label} {100 * last['accuracy']:.1f} %" if last else ""
    alarms = sum(bool(row.get("watch")) for row in rows)
    figure = {k: _finite(rows[-1].get(k)) if rows else None for k in ("reward", "accuracy")}
    return {"name": run.name, "status": status, "progress": progress, "result": told, "alarms": alarms,
            "touched": run.touched, **figure}  # fmt: skip


def _finite(value: Any) -> float | None:
    return value if isinstance(value, int | float) and math.isfinite(value) else None  # JSON knows no others


def _number(path: Path) -> int:
    return int(path.stem) if path.stem.isdigit() else 0


def _episodes(made: FastAPI, shelf: Shelf) -> None:
    """Lists of episodes, and one episode."""

    @made.get("/api/episodes")
    def found(
        run: str,
        stage: str,
        step: int | None = None,
        verdict: str = "",
        truncated: bool = False,
        flip: Literal["", "any", "fixed", "spoilt", "changed"] = "",
        role: str = "",
        low: float | None = None,
        high: float | None = None,
        words: Annotated[str, Query(max_length=500)] = "",
        start: Annotated[str, Query(pattern=PLACE)] = "0:0",
    ) -> dict[str, Any]:
        files = shelf.files(run, stage)
        chosen = [p for p in files if step is None or _number(p) == step]
        wanted = episodes.Filter(verdict, truncated, flip, role, low, high, words)
        page = episodes.scan(chosen, wanted, start=_place(start))
        items = [{"step": _number(chosen[one.file]), "offset": one.offset, "html": line(one.row)} for one in page.found]
        then = None if page.then is None else f"{page.then[0]}:{page.then[1]}"
        return {"items": items, "read": page.read, "then": then, "unreadable": page.unreadable}

    @made.get("/api/episode")
    def one(
        run: str, stage: str, step: int, offset: int, view: Literal["", "chat", "tree"] = "", whole: bool = False
    ) -> dict[str, Any]:
        row = episodes.at(_of_step(shelf.files(run, stage), step), offset)
        return {"html": episode(row, view or None, WHOLE if whole else TEXT)}


def _place(start: str) -> tuple[int, int]:
    one, _, two = start.partition(":")
    return int(one), int(two)


def _of_step(files: Sequence[Path], step: int) -> Path:
    found = next((p for p in files if _number(p) == step), None)
    if found is None:
        raise HTTPException(404, f"there are no episodes of step {step}")
    return found


def _compare(made: FastAPI, shelf: Shelf) -> None:
    """Two runs side by side: tables, and the same questions under both."""

    @made.get("/api/compare")
    def compare(a: str, b: str) -> dict[str, Any]:
        both = [shelf.run(a), shelf.run(b)]
        html = sections.tables([sections.overview(both)])
        html += f"<h3>Where the recipes differ</h3>{sections.differences(both)}"
        labels = [{name.partition("-")[2] for name in run.episodes()} for run in both]
        return {"html": html, "evaluations": shelf.evaluations(both), "labels": sorted(labels[0] & labels[1] - {"rl"})}

    @made.get("/api/pairs")
    def paired(
        a: str,
        b: str,
        label: str,
        differ: bool = True,
        start: Annotated[str, Query(pattern=PLACE)] = "0:0",
    ) -> dict[str, Any]:
        files = [_labelled(shelf.run(name), label) for name in (a, b)]
        items, then = pairs.page(files[0], files[1], differ=differ, start=_place(start))
        return {
            "items": [{"a": p.first, "b": p.second, "html": f"{pairs.verdicts(p)} {text(p.question)}"} for p in items],
            "then": None if then is None else f"{then[0]}:{then[1]}",
        }

    @made.get("/api/pair")
    def pair(a: str, b: str, label: str, first: int, second: int) -> dict[str, Any]:
        rows = [episodes.at(_labelled(shelf.run(name), label), offset) for name, offset in ((a, first), (b, second))]
        return {"a": episode(rows[0]), "b": episode(rows[1])}


def _labelled(run: Folder, label: str) -> Path:
    """The answers of an evaluation of a run."""
    for name, files in run.episodes().items():
        if name.partition("-")[2] == label:
            return files[0]
    raise HTTPException(404, f"run {run.name!r} has no evaluation {label!r}")


def serve(root: Path, evaluated: Evaluated, port: int, said: Callable[[str], Any]) -> None:
    """Serves the viewer on the loopback interface until it is interrupted; port 0 takes a free one."""
    import socket

    import uvicorn

    if not root.is_dir():
        raise RunError(f"there is no folder {root}; name the one that holds your runs")
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind(("127.0.0.1", port))
        listener.listen(128)  # whoever reads the address may ask at once
    except OSError as error:
        raise RunError(
            f"port {port} of 127.0.0.1 cannot be used ({error.strerror}); write --port 0 for a free one"
        ) from None
    said(f"http://127.0.0.1:{listener.getsockname()[1]}/  (Ctrl-C ends it)")
    config = uvicorn.Config(app(root, evaluated), log_level="warning", access_log=False, timeout_graceful_shutdown=2)
    uvicorn.Server(config).run(sockets=[listener])
