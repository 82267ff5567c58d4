"""The ways in for bad input, and what may come of it: loaded, a clear error, or a counted skip; never a traceback.

Each case names its examples and feeds one of them to the program. What it returns is counted; `Lost` is a row that
vanished without a word, and any other exception is a traceback that a user would see.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from hostile import OVERRIDES, RECIPE, File, changed, damaged, files, recipes, texts, trees, values, wounds
from hypothesis import strategies as st

from cothink import actions, splitter, store
from cothink.conversations import dialogues, spans
from cothink.record import RunError
from cothink.resolve import RecipeError, bind, resolve
from cothink.serve import protocol
from cothink.tasks import DataError, Loaded
from cothink.types import Role
from cothink.verify import extract, find_verdict, verify

LOADED, ERROR, SKIPPED = "loaded", "clear error", "counted skip"
LONGEST_MESSAGE = 20_000
"""Characters of an error that a person is expected to look at: no field of a file is told in full."""
CLEAR = (RecipeError, DataError, RunError, splitter.SplitError, protocol.Refusal)


class Lost(AssertionError):
    """Something vanished, or was taken for what it is not, and nobody was told."""


class Case(NamedTuple):
    """One way in: its name, its examples, and what feeds one of them."""

    name: str
    examples: st.SearchStrategy[Any]
    feed: Callable[[Any], str]


def clear(run: Callable[[], str]) -> str:
    """What came of it; an error of our own must be short enough to read, and say something."""
    try:
        return run()
    except CLEAR as error:
        told = str(error)
        if not told.strip() or len(told) > LONGEST_MESSAGE:
            raise Lost(f"a message of {len(told):,} characters: {told[:200]!r}") from error
        return ERROR


@contextlib.contextmanager
def folder() -> Any:
    """A folder that is gone afterwards."""
    made = Path(tempfile.mkdtemp(prefix="fuzz"))
    try:
        yield made
    finally:
        shutil.rmtree(made, ignore_errors=True)


# recipes


def command(*arguments: str) -> tuple[int, str, str]:
    """Exit code, stdout and stderr of `cothink ...`, run in this process."""
    from cothink import cli

    out, said = (io.TextIOWrapper(io.BytesIO(), "utf-8", errors=errors) for errors in ("strict", "backslashreplace"))
    code = 0
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(said):
        try:
            cli.main([*arguments])
        except SystemExit as left:
            code = left.code if isinstance(left.code, int) else 1
    for stream in (out, said):
        stream.seek(0)
    return code, out.read(), said.read()


def told(code: int, out: str, said: str, allowed: tuple[int, ...]) -> str:
    """What a command's end means; a traceback or a strange exit code is none of it."""
    if "Traceback" in said or code not in (0, *allowed):
        raise AssertionError(f"exit code {code}: {said[-1500:]}")
    if code and (not said.strip() or len(said) > LONGEST_MESSAGE):
        raise Lost(f"a message of {len(said):,} characters: {said[:200]!r}")
    bad = {c for c in out + said if (ord(c) < 32 and c not in "\n\t\r") or c == "\x7f"}
    if bad:
        raise Lost(f"control codes reached the terminal: {bad!r}")
    return ERROR if code else LOADED


def check_file(data: bytes) -> str:
    """`cothink check FILE` of some bytes."""
    with folder() as place:
        (place / "r.yaml").write_bytes(data)
        return told(*command("check", str(place / "r.yaml")), allowed=(2,))


def check_tree(tree: Any) -> str:
    """`cothink check` of a mapping, written as JSON, which is YAML."""
    return check_file(json.dumps(tree, ensure_ascii=False).encode("utf-8", "surrogatepass"))


def check_override(text: str) -> str:
    """`cothink check FILE OVERRIDE`."""
    with folder() as place:
        (place / "r.yaml").write_text(json.dumps(RECIPE))
        return told(*command("check", str(place / "r.yaml"), "--", text.replace("\x00", "0")), allowed=(2,))


# tasks

ROWS: Mapping[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "files": ({"question": "2 + 2?", "answer": "4", "level": 2, "extra_info": {"x": 1}}, {}),
    "gsm8k": ({"question": "2 + 2?", "answer": "two and two <<2+2=4>>\n#### 4"}, {"split": "test"}),
    "csqa": (
        {"id": "q", "answerKey": "A", "question": {"stem": "Which?", "choices": [{"label": "A", "text": "x"}, {"label": "B", "text": "y"}]}},
        {"split": "dev"},
    ),
    "math": ({"problem": "2 + 2?", "answer": "4", "level": "Level 3", "type": "Algebra", "subset": "aime24"}, {"split": "test"}),
    "judge": ({"question": "Which?", "A": "one", "B": "two", "label": "A", "subset": "chat"}, {"test": 1}),
    "judgebench": (
        {"pair_id": "p", "source": "s", "question": "Which?", "response_A": "one", "response_B": "two", "label": "A>B"},
        {"model": "gpt-4o"},
    ),
}  # fmt: skip
FORMS: Mapping[str, tuple[str, ...]] = {"": ("jsonl", "json", "csv", "parquet"), "judgebench": ("jsonl",)}
APART = ("question", "problem", "pair_id")
NAMES = {"judgebench": "gpt-4o-2024-05-13.jsonl"}


def load_tasks(loader: str, file: File) -> str:
    """A loader on a file, by a recipe's own way; every row becomes a task or a counted skip."""

    def run() -> str:
        with folder() as place:
            path = place / NAMES.get(loader, f"rows.{file.ending}")
            path.write_bytes(file.data)
            options = {**ROWS[loader][1], "path": str(place if loader in NAMES else path)}
            found = bind(resolve("tasks", loader), options, "tasks.train")()
            both = [found]
            if loader == "judge":
                both = [found, bind(resolve("tasks", loader), {**options, "split": "test"}, "tasks.test")()]
            return counted(both, file)

    return clear(run)


def counted(sides: Iterable[Any], file: File) -> str:
    """Whether every row is accounted for, and every task can be asked, stored and told apart."""
    sides = [*sides]
    first = sides[0]
    if not isinstance(first, Loaded):
        raise Lost(f"a {type(first).__name__} without counts")
    tasks = [task for side in sides for task in side]
    if len(tasks) + len(first.skipped) != first.total:
        raise Lost(f"{len(tasks)} tasks and {len(first.skipped)} skips of {first.total} rows")
    if file.rows is not None and first.total != file.rows:
        raise Lost(f"{first.total} rows read, {file.rows} written")
    if len({task.id for task in tasks}) != len(tasks):
        raise Lost("two tasks of one id")
    for task in tasks:
        json.dumps([task.question, task.answer, dict(task.meta)], ensure_ascii=False).encode()
        if not task.question.strip() or not task.answer.strip() or task.answer.lower() in ("inf", "nan"):
            raise Lost(f"an empty task {task!r}")
    if first.skipped and f"skipped {len(first.skipped):,} of" not in first.report():
        raise Lost("skips that the report does not tell")
    return SKIPPED if first.skipped else LOADED


# conversations

PAIR = {"meta": Role("meta", "p", "Guide."), "reasoning": Role("reasoning", "p", "Work.")}
CHAT = {"role": "meta", "messages": [{"role": "user", "content": "2 + 2?"}, {"role": "assistant", "content": "Add."}]}
PROMPT = {"role": "reasoning", "prompt": "2 + 2?", "completion": "4", "id": "x", "question": "2 + 2?"}
ASKED = "Question:\n2 + 2?\n\nInstruction:\nAdd. [FINISH]"
VIEWS = (
    {"instruction": "2 + 2?", "output": "Add. [FINISH]", "system": "m", "history": []},
    {"instruction": ASKED, "output": "\\boxed{4}", "system": "r", "history": []},
)


def load_chats(file: File) -> str:
    """Rows of chats: each becomes an example or is counted."""

    def run() -> str:
        with folder() as place:
            path = place / f"rows.{file.ending}"
            path.write_bytes(file.data)
            found = bind(resolve("conversations", "files"), {"path": str(path)}, "data")(PAIR)
            if file.rows is not None and found.counts["rows"] + found.counts["refused"] != file.rows:
                raise Lost(f"{found.counts} of {file.rows} rows")
            for chat in found:
                "".join(m.content for m in chat.messages).encode()
                if file.rows is not None and any(m.content in ("None", "[]", "{}") for m in chat.messages[1:]):
                    raise Lost(f"a value was taken for text: {chat!r}")
            return SKIPPED if found.counts["refused"] else LOADED

    return clear(run)


def load_dialogues(both: tuple[File, File]) -> str:
    """The two files of a cold start: pairs of rows, or an error."""

    def run() -> str:
        with folder() as place:
            for name, file in zip((dialogues.META, dialogues.REASONING), both):
                (place / name).write_bytes(file.data)
            found = bind(resolve("conversations", "dialogues"), {"path": str(place)}, "data")(PAIR)
            for chat in found:
                "".join(m.content for m in chat.messages).encode()
            if both[0].rows is not None and found.counts["dialogues"] != both[0].rows:
                raise Lost(f"{found.counts['dialogues']} dialogues of {both[0].rows} rows")
            return LOADED

    return clear(run)


# stored trees and run folders


def tree_lines() -> list[dict[str, Any]]:
    """The lines of a small store: one question, a generator's two answers, their grades."""
    said = [
        {"id": f"g{k}", "text": f"\\boxed{{{k + 3}}}", "output_ids": [1, 2], "finish_reason": "stop", "version": 0}
        for k in range(2)
    ]
    call = {
        "task": "t/1",
        "parents": [],
        "role": "generator",
        "policy": "p",
        "round": 0,
        "place": 0,
        "prompt_ids": [1],
        "turns": said,
    }
    return [
        {"task": "t/1", "question": "2 + 2?", "answer": "4", "meta": {"kind": "number"}},
        call,
        {"task": "t/1", "finish": ["finished", "\\boxed{4}", "1"], "grades": {"0": ["wrong", "3"], "1": ["right", "4"]}, "holes": 0},
    ]  # fmt: skip


HEADER = {"format": 1, "round": 0, "split": "train", "workflow": {"branching": [2]}, "roles": {}}


def open_store(given: tuple[Any, list[Any], list[Any]]) -> str:
    """A store whose header or lines are not what was written: `load`, and `cothink show`."""
    head, lines, hurt = given
    with folder() as place:
        (place / store.HEADER).write_bytes(json.dumps(head).encode())
        data = "".join(json.dumps(line) + "\n" for line in lines).encode()
        (place / store.TREES).write_bytes(damaged(data, hurt))
        came = clear(lambda: (store.load(place, partial=True), LOADED)[1])
        seen = told(*command("show", str(place)), allowed=(1,))
        told(*command("show", str(place), "--task", "t/1"), allowed=(1,))
        if came == LOADED and seen == ERROR and store.load(place, partial=True):
            raise Lost("trees that load and cannot be shown")
        return came


EPISODE = {
    "id": "t#0", "task": "t", "question": "2 + 2?", "gold": "4", "level": 2, "finish": "finished", "graded": "1", "accuracy": 1.0,
    "verdict": "right", "rewards": [{"turn": "1", "name": "answer.correct", "value": 1.0, "to": "team"}],
    "turns": [
        {"id": "0", "parents": [], "role": "meta", "policy": "p", "round": 0, "text": "Add.", "tokens": 2, "finish_reason": "stop",
         "return": 1.0, "advantage": 0.5, "pieces": ["Ad", "d."], "logprobs": [-0.1, -0.2]},
        {"id": "1", "parents": ["0"], "role": "reasoning", "policy": "p", "round": 0, "text": "\\boxed{4}", "tokens": 3,
         "finish_reason": "stop", "return": 1.0, "advantage": [0.5, 0.5, 0.1]},
    ],
}  # fmt: skip
RUN: Mapping[str, Any] = {
    "recipe.yaml": RECIPE,
    "manifest.json": {"seed": 0, "started": "2026-01-02T03:04:05+0000", "command": ["cothink", "run"], "versions": {"python": "3"}},
    "state.json": {"stage": 1, "step": 1},
    "results.json": {"before": {"accuracy": 0.5, "n": 4, "tokens": 9, "on": "test", "per_task": {"t": 0.5}, "interval": [0.1, 0.9]}},
    "metrics.jsonl": [{"stage": 1, "step": 1, "time": 1.0, "reward": 0.5, "accuracy": 0.5, "watch": ["warn flat"]}],
    "episodes/00-before/000000.jsonl": [EPISODE],
    "episodes/01-rl/000001.jsonl": [EPISODE],
}  # fmt: skip


def plain(name: str, value: Any) -> bytes:
    """A value as the bytes of one of a run's files."""
    lines = value if name.endswith(".jsonl") and isinstance(value, list) else [value]
    return "".join(json.dumps(line) + "\n" for line in lines).encode()


def look_at_run(given: tuple[str, Any, list[Any]]) -> str:
    """A run folder with one damaged file: `cothink show`, `cothink report`, and every page of the viewer."""
    hurt, value, found = given
    with folder() as place:
        run = place / "run"
        for name, whole in RUN.items():
            (run / name).parent.mkdir(parents=True, exist_ok=True)
            data = damaged(plain(name, value), found) if name == hurt else plain(name, whole)
            (run / name).write_bytes(data)
        told(*command("show", str(run)), allowed=(1,))
        told(*command("show", str(run), "--task", "t"), allowed=(1,))
        page = place / "page.html"
        seen = told(*command("report", str(run), "--out", str(page)), allowed=(1, 2))
        if seen == LOADED and "<script" in page.read_text(encoding="utf-8"):
            raise Lost("a script in a report")
        _view(place)
        return seen


def _view(place: Path) -> None:
    from starlette.testclient import TestClient

    from cothink.report.app import app
    from cothink.stages.comparing import evaluated

    client = TestClient(app(place, evaluated), base_url="http://127.0.0.1")
    client.get("/api/runs")
    for path in (
        "run?run=run", "stages?run=run", "curves?run=run", "episodes?run=run&stage=01-rl", "compare?a=run&b=run",
        "episode?run=run&stage=01-rl&step=1&offset=0", "pairs?a=run&b=run&label=before&differ=false",
    ):  # fmt: skip
        answer = client.get(f"/api/{path}")
        if answer.status_code >= 500:
            raise AssertionError(f"{path}: {answer.text[:300]}")


# texts that people and models write


def serve_body(data: bytes) -> str:
    """The body of a request: understood, or refused with a status and an answer that is JSON."""
    try:
        ask = protocol.parse(data, "pair")
    except protocol.Refusal as error:
        body = protocol.dumps(error.body())
        if error.status not in (400, 404) or len(body) > LONGEST_MESSAGE:
            raise Lost(f"status {error.status}, {len(body):,} bytes") from error
        json.loads(body)
        return ERROR
    ask.question.encode()
    return LOADED


BODY = {
    "model": "pair", "messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "2 + 2?"}], "seed": 1,
    "stream": True, "stream_options": {"include_usage": True}, "temperature": 0.5, "top_p": 1, "max_tokens": 5, "votes": 2, "trace": True,
}  # fmt: skip


def model_text(text: str) -> str:
    """Every reader of what a model writes: it finds something of the kind it looks for, or nothing."""
    action = actions.read(text)
    if action is not None and (
        action.action not in actions.ACTIONS or bool(action.output) != (action.action != "EMPTY")
    ):
        raise Lost(f"an action that is none: {action}")
    if find_verdict(text) not in (None, "A", "B", "tie"):
        raise Lost(f"a verdict that is none: {find_verdict(text)!r}")
    made = spans.dialogue("k", "q", "one two", text)
    if isinstance(made, str) and made not in spans.REASONS:
        raise Lost(f"no reason: {made}")
    for kind in ("auto", "number", "letter", "text", "math", "verdict"):
        for strict in (True, False):
            extract(text, kind, strict)
    for kind, gold in (("letter", "A"), ("text", "zz"), ("verdict", "A")):
        if verify(kind, gold, text).verdict not in ("right", "wrong", "unparsable", "error"):
            raise Lost(kind)
    return LOADED if action is not None or not isinstance(made, str) else SKIPPED


def verify_row(given: tuple[Any, Any, Any]) -> str:
    """A row of `cothink verify --file`: graded, or an error that stands in its place."""
    with folder() as place:
        rows = [{"kind": given[0], "gold": given[1], "text": given[2]}, {"kind": "text", "gold": "a", "text": "a"}]
        (place / "in.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        code, out, said = command("verify", "--file", str(place / "in.jsonl"), "--out", str(place / "out.jsonl"))
        told(code, out, said, allowed=())
        graded = [json.loads(line) for line in (place / "out.jsonl").read_text(encoding="utf-8").split("\n") if line]
        if len(graded) != 2 or graded[1]["verdict"] != "right":
            raise Lost(f"{graded}")
        return ERROR if graded[0]["verdict"] == "error" else LOADED


MARKS = (
    "<meta>", "</meta>", "<reasoning>", "</reasoning>", "one", " two", "[FINISH]", "[[A]]", "[[B]]", "[[C]]", '{"action": "EMPTY", "output": ""}',
    '{"action": "REWRITE", "output": "', '"}', "\\boxed{", "}", "Final Answer:", "A", " 7", "$", "\\frac{1}{", "!", "_{2}", "%", "(", ",",
)  # fmt: skip
said = st.lists(st.sampled_from(MARKS) | texts, max_size=8).map("".join)
graded = st.tuples(st.sampled_from(["letter", "text", "verdict"]), st.sampled_from(["A", "B"]), said)
graded |= st.tuples(st.sampled_from(["letter", "text", "verdict", "gym", "Math", ""]) | values, values, said | values)


def damages(trees: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    """A tampered value with whole bytes, or a value with wounded bytes."""
    return st.tuples(trees, st.just([]) | st.lists(wounds, min_size=1, max_size=2))


def _stores() -> st.SearchStrategy[Any]:
    lines = damages(changed(tree_lines()).filter(lambda found: isinstance(found, list)))
    heads = st.just(HEADER) | st.just(HEADER) | changed(HEADER)
    return st.tuples(heads, lines).map(lambda both: (both[0], *both[1]))


def _runs() -> st.SearchStrategy[Any]:
    def of(name: str) -> st.SearchStrategy[Any]:
        return damages(st.just(RUN[name]) | changed(RUN[name])).map(lambda both: (name, *both))

    return st.sampled_from([*RUN]).flatmap(of)


def cases() -> list[Case]:
    """Every way in."""
    found = [
        Case("recipe: bytes of a file", recipes, check_file),
        Case("recipe: values and keys", trees, check_tree),
        Case("recipe: overrides", st.sampled_from(OVERRIDES) | texts.map(lambda t: t[:2000]), check_override),
        *(
            Case(f"tasks: {name}", files(row, FORMS.get(name, FORMS[""]), APART), lambda f, name=name: load_tasks(name, f))
            for name, (row, _) in ROWS.items()
        ),
        Case("conversations: files", files(CHAT) | files(PROMPT), load_chats),
        Case("conversations: dialogues", st.tuples(*(files(v, ["jsonl"]) for v in VIEWS)), load_dialogues),
        Case("trees: a store", _stores(), open_store),
        Case("a run folder: show, report, view", _runs(), look_at_run),
        Case("serve: request bodies", changed(BODY).map(lambda b: json.dumps(b).encode())
             | st.lists(wounds, min_size=1, max_size=2).map(lambda w: damaged(json.dumps(BODY).encode(), w)), serve_body),
        Case("model output: its readers", said, model_text),
        Case("verify: rows of a file", graded, verify_row),
    ]  # fmt: skip
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    return found
