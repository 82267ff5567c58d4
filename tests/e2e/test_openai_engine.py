"""A frozen role behind an OpenAI-compatible server on this machine."""

from __future__ import annotations

import asyncio
import json
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from cothink.engines.openai import engine
from cothink.types import Message, PlayError, Sampling

pytest.importorskip("openai")


class Server(BaseHTTPRequestHandler):
    seen: list = []  # noqa: RUF012

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.seen.append((self.path, body))
        choices = [
            {
                "index": k,
                "message": {"role": "assistant", "content": f"plan {k} "},
                "finish_reason": "length" if k else "stop",
                **({} if k else {"stop_reason": "[FINISH]"}),
            }
            for k in range(body["n"])
        ]
        reply = {
            "id": "1", "object": "chat.completion", "created": 0, "model": body["model"], "choices": choices,
            "usage": {"prompt_tokens": 3, "completion_tokens": 7, "total_tokens": 10},
        }  # fmt: skip
        data = json.dumps(reply).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *args):
        pass


@pytest.fixture
def url():
    server = HTTPServer(("127.0.0.1", 0), Server)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    Server.seen.clear()
    yield f"http://127.0.0.1:{server.server_port}/v1"
    server.shutdown()


def ask(outside, sampling, n):
    messages = [Message("system", "S"), Message("user", "q")]
    return asyncio.run(outside.generate("p", messages, outside.codec("p").start(messages), sampling, n, 2**40 + 1))


def test_messages_sampling_and_token_counts(url):
    outside = engine(f"openai:big@{url}")
    done = ask(outside, Sampling(0.5, 0.9, 0, 11, ("[FINISH]",)), 2)
    ((path, body),) = Server.seen
    assert path == "/v1/chat/completions"
    assert body["messages"] == [{"role": "system", "content": "S"}, {"role": "user", "content": "q"}]
    assert (body["model"], body["temperature"], body["top_p"], body["max_tokens"]) == ("big", 0.5, 0.9, 11)
    assert body["stop"] == ["[FINISH]"] and body["seed"] < 2**31
    assert [c.text for c in done] == ["plan 0 [FINISH]", "plan 1 "]
    assert [c.finish_reason for c in done] == ["stop", "length"]
    assert [len(c.output_ids) for c in done] == [4, 3]
    assert ask(outside, Sampling(), 1)[0].text == "plan 0 "  # a second event loop gets its own connections


def test_what_the_protocol_lacks_is_refused(url):
    with pytest.raises(PlayError, match="top_k"):
        ask(engine(f"openai:big@{url}"), Sampling(top_k=5), 1)
    with pytest.raises(ValueError, match="names no model"):
        engine("openai:@http://x")
