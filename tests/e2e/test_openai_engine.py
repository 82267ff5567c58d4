"""A frozen role behind an OpenAI-compatible server on this machine."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from cothink.engines.openai import engine
from cothink.types import Message, PlayError, Sampling

pytest.importorskip("openai")


class Server(BaseHTTPRequestHandler):
    seen: list = []  # noqa: RUF012
    refuse: list = []  # noqa: RUF012

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.seen.append((self.path, body))
        if self.refuse:
            self.send_response(self.refuse.pop())
            self.send_header("Retry-After-Ms", "20")
            self.send_header("Content-Length", "0")
            self.end_headers()
            return
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
    Server.refuse.clear()
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


def test_a_schema_becomes_the_response_format(url):
    ask(engine(f"openai:big@{url}"), Sampling(schema='{"type": "object"}'), 1)
    ((_, body),) = Server.seen
    wanted = {"name": "answer", "strict": True, "schema": {"type": "object"}}
    assert body["response_format"] == {"type": "json_schema", "json_schema": wanted}


def test_what_the_protocol_lacks_is_refused(url):
    with pytest.raises(PlayError, match="top_k"):
        ask(engine(f"openai:big@{url}"), Sampling(top_k=5), 1)
    with pytest.raises(ValueError, match="names no model"):
        engine("openai:@http://x")


def test_a_server_that_is_not_there_is_named():
    with pytest.raises(PlayError, match=r"policy p: big at http://127\.0\.0\.1:9/v1: Connection error"):
        ask(engine("openai:big@http://127.0.0.1:9/v1", retries=0), Sampling(), 1)


def test_a_frozen_outside_role_beside_a_trained_one(url, tiny_folder, tmp_path):
    import cothink

    recipe = {
        "name": "mixed",
        "output": str(tmp_path),
        "team": {
            "workflow": {"name": "rema", "max_turns": 1, "max_context": 200, "stop_on_truncation": False},
            "roles": {
                "meta": {"policy": "big", "system": "plan", "trainable": False},
                "reasoning": {"policy": "small", "system": "solve", "max_tokens": 4},
            },
        },
        "policies": {
            "big": {"model": f"openai:big@{url}", "server": {"prices": [1.0, 2.0]}},
            "small": {"model": str(tiny_folder)},
        },
        "tasks": {name: {"name": "wordsums", "levels": 1, "count": 4} for name in ("train", "test")},
        "stages": [
            {"kind": "evaluate", "on": "test", "limit": 2},
            {"kind": "rl", "steps": 1, "tasks_per_step": 2, "episodes_per_task": 2, "filter": "none"},
        ],
    }
    folder = cothink.run(recipe).folder
    (row,) = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert row["small/updates"] == 1 and row["samples"] == 4 and "big/updates" not in row
    assert row["meta/turns"] == 4 and row["meta/tokens_per_turn"] == 7
    # the stand-in tells 3 prompt and 7 output tokens of each request: 4 * (3 * 1 + 7 * 2) / 1e6
    assert row["big/server_requests"] == 4 and row["big/server_cost"] == pytest.approx(68e-6)
    served = json.loads((folder / "results.json").read_text())["evaluate-0"]["served"]
    assert served["big/server_requests"] == 2 and served["big/server_output_tokens"] == 14


def test_each_event_loop_has_its_own_connections(url):
    """A closed loop's place in memory may be the next one's: its connections must not be."""
    outside = engine(f"openai:m@{url}")

    async def twice():
        return outside._client(), outside._client()

    runs = [asyncio.run(twice()) for _ in range(5)]
    assert all(one is two for one, two in runs) and len({id(one) for one, _ in runs}) == 5
    assert len(outside._clients) == 1


@pytest.mark.parametrize("status", [429, 503])
def test_a_busy_server_is_asked_again_when_it_says_and_the_repeats_are_counted(url, status):
    outside = engine(f"openai:m@{url}")
    Server.refuse += [status, status]
    (done,) = ask(outside, Sampling(), 1)
    assert done.text == "plan 0 " and len(Server.seen) == 3
    assert outside.figures()["p/server_retries"] == 2 and outside.figures()["p/server_requests"] == 0
    Server.refuse += [status] * 2
    with pytest.raises(PlayError, match=f"policy p: m at .*{status}"):
        ask(engine(f"openai:m@{url}", retries=1), Sampling(), 1)


def test_requests_keep_their_pace(url):
    """1,200 a minute are 50 ms apart: four of them, asked at once, end 150 ms after the first began, or later."""
    outside, begun = engine(f"openai:m@{url}", requests_per_minute=1200), time.monotonic()

    async def four():
        chat = [Message("user", "q")]
        await asyncio.gather(*(outside.generate("p", chat, (1,), Sampling(), 1, k) for k in range(4)))

    asyncio.run(four())
    assert time.monotonic() - begun >= 0.15 and len(Server.seen) == 4


def test_a_play_that_cannot_be_paid_fails_with_the_setting_to_change(url):
    outside = engine(f"openai:m@{url}", prices=(0.0, 1e6), max_cost=8.0)  # each request costs 7
    ask(outside, Sampling(), 1)
    ask(outside, Sampling(), 1)
    with pytest.raises(PlayError, match=r"14 spent, and max_cost allows 8; write a larger server\.max_cost"):
        ask(outside, Sampling(), 1)
    assert len(Server.seen) == 2
