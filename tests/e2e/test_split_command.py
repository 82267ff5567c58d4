"""`cothink split` against a real chat server on this machine, and its dialogues in a recipe."""

from __future__ import annotations

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from cothink import cli

pytest.importorskip("openai")


class Teacher(BaseHTTPRequestHandler):
    """Tags the first sentence as meta's and the rest as reasoning's; refuses what is too long for it."""

    seen: list = []  # noqa: RUF012
    broken_at: int | None = None

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        solution = body["messages"][1]["content"].partition("Solution:\n")[2]
        if self.broken_at is not None and len(self.seen) >= self.broken_at:
            return self.answer(500, {"error": {"message": "the teacher is ill"}})
        self.seen.append(solution)
        if len(solution) > 300:
            return self.answer(400, {"error": {"message": "maximum context length exceeded"}})
        first, _, rest = solution.partition(". ")
        text = f"<meta>{first}. [FINISH]</meta><reasoning>{rest}</reasoning>"
        choice = {"index": 0, "message": {"role": "assistant", "content": text}, "finish_reason": "stop"}
        usage = {"prompt_tokens": 9, "completion_tokens": 9, "total_tokens": 18}
        return self.answer(200, {"id": "1", "object": "chat.completion", "created": 0, "model": body["model"],
                                 "choices": [choice], "usage": usage})  # fmt: skip

    def answer(self, status, reply):
        data = json.dumps(reply).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *args):
        pass


@pytest.fixture
def url():
    server = ThreadingHTTPServer(("127.0.0.1", 0), Teacher)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    Teacher.seen.clear()
    Teacher.broken_at = None
    yield f"http://127.0.0.1:{server.server_port}/v1"
    server.shutdown()


def call(*arguments) -> int:
    with pytest.raises(SystemExit) as left:
        cli.main([str(a) for a in arguments])
    return int(left.value.code or 0)


def test_split_resumes_reports_and_feeds_an_sft_stage(url, tmp_path, capsys, monkeypatch):
    """rema §7 row 35: a teacher behind an OpenAI-compatible server; killed and resumed, no call is repeated."""
    monkeypatch.setenv("OPENAI_API_KEY", "none")
    source, out = tmp_path / "solutions.jsonl", tmp_path / "out"
    texts = [f"Add {k} and 1. That is {k} + 1, so \\boxed{{{k + 1}}}." for k in range(5)]
    texts[3] = "Very long. " + "Very long. " * 40
    texts[4] = "No box. Just words."
    source.write_text("".join(json.dumps({"question": f"{k} + 1?", "solution": t}) + "\n" for k, t in enumerate(texts)))
    command = ("split", source, out, "--teacher", f"big@{url}", "--concurrency", 1)
    Teacher.broken_at = 2
    monkeypatch.setattr("openai._base_client.BaseClient._calculate_retry_timeout", lambda *a, **k: 0.0)
    assert call(*command) == 1
    assert "2 of 5 answers are kept: the same command goes on" in capsys.readouterr().err
    Teacher.broken_at = None
    assert call(*command) == 0
    assert Teacher.seen == [text.strip() for text in texts]  # each once
    told = capsys.readouterr().out
    assert "3 dialogues from 5 solutions, 1.0 rounds each" in told and "dropped 1: the server refuses" in told
    assert "dropped 1: the last reasoning turn has no box" in told
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(f"""
name: taught
team: {{workflow: rema, roles: {{meta: {{policy: p}}, reasoning: {{policy: p}}}}}}
policies: {{p: {{model: "builtin:tiny"}}}}
tasks: {{test: {{name: wordsums, split: test, count: 5}}}}
stages: [{{kind: sft, data: {{name: dialogues, path: {out}}}, epochs: 3, rows_per_step: 2}}]
""")
    assert call("check", recipe) == 0
    assert "policy p: 3 of meta + 3 of reasoning rows, at most 9 steps" in capsys.readouterr().out


def test_split_names_what_is_wrong_with_its_command(tmp_path, capsys):
    source = tmp_path / "s.jsonl"
    source.write_text('{"question": "q", "steps": "s"}\n')
    assert call("split", tmp_path / "none.jsonl", tmp_path / "o", "--teacher", "m@http://x") == 2
    assert "no file" in capsys.readouterr().err
    assert call("split", source, tmp_path / "o", "--teacher", "m@http://x") == 2
    assert "write --solution COLUMN" in capsys.readouterr().err
    assert call("split", source, tmp_path / "o", "--teacher", "@http://x", "--solution", "steps") == 2
    assert "names no model" in capsys.readouterr().err
    assert not (tmp_path / "o").exists()
