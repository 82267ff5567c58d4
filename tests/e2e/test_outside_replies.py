"""What an outside chat server may send: endless, packed, broken and lying replies cost one call and no more."""

from __future__ import annotations

import asyncio
import gzip
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

pytest.importorskip("openai")

from cothink.engines import replies
from cothink.engines.openai import engine
from cothink.types import Message, PlayError, Sampling


@pytest.fixture
def served():
    """`served(parts, **headers)` answers every call with these bytes, one chunk each, and gives the URL."""
    servers = []

    def start(parts, **headers: str) -> str:
        class Server(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_POST(self):
                self.rfile.read(int(self.headers["Content-Length"]))
                self.send_response(200)
                for name, value in {"Content-Type": "application/json", "Connection": "close", **headers}.items():
                    self.send_header(name.replace("_", "-"), value)
                self.end_headers()
                try:
                    for part in parts() if callable(parts) else parts:
                        self.wfile.write(part)
                except OSError:  # the client has heard enough
                    pass

            def log_message(self, *args):
                pass

        server = ThreadingHTTPServer(("127.0.0.1", 0), Server)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        servers.append(server)
        return f"http://127.0.0.1:{server.server_port}/v1"

    yield start
    for server in servers:
        server.shutdown()
        server.server_close()


def ask(url: str, n: int = 1, **sampling):
    outside = engine(f"openai:big@{url}", retries=0, timeout=20)
    messages = [Message("user", "q")]
    prompt = outside.codec("p").start(messages)
    return asyncio.run(outside.generate("p", messages, prompt, Sampling(**sampling), n, 1))


def reply(*texts: object, tokens: object = 3) -> bytes:
    choices = [{"index": k, "message": {"role": "assistant", "content": t}, "finish_reason": "stop"}
               for k, t in enumerate(texts)]  # fmt: skip
    return json.dumps({"choices": choices, "usage": {"completion_tokens": tokens}}).encode()


def test_an_endless_reply_is_given_up(served):
    sent = []

    def endless():
        yield b'{"choices": [{"message": {"content": "'
        while True:
            sent.append(1 << 20)
            yield b"a" * (1 << 20)

    with pytest.raises(PlayError, match=r"policy p: big at http://.*: the reply is longer than 16 MiB"):
        ask(served(endless))
    assert sum(sent) < 64 << 20  # what was in the buffers of the way when the client hung up


def test_a_packed_reply_is_measured_unpacked(served):
    packed = gzip.compress(reply("a" * (40 << 20)))
    assert len(packed) < 100_000
    with pytest.raises(PlayError, match="longer than 16 MiB"):
        ask(served([packed], Content_Encoding="gzip"))


def test_a_server_that_ignores_max_tokens_is_cut_like_an_answer_at_its_limit(served):
    (done,) = ask(served([reply("a" * 5_000_000, tokens=10**12)]), max_tokens=10)
    assert (len(done.text), done.finish_reason, len(done.output_ids)) == (replies.TOKEN_CHARACTERS * 10, "length", 10)
    (done,) = ask(served([reply("short")]), max_tokens=10)
    assert (done.text, done.finish_reason, len(done.output_ids)) == ("short", "stop", 3)


@pytest.mark.parametrize("tokens", [-5, "many", None, 1.5, [1]])
def test_a_count_of_tokens_that_is_none_counts_one_for_each_answer(served, tokens):
    assert [len(c.output_ids) for c in ask(served([reply("a", "b", tokens=tokens)]), n=2)] == [1, 1]


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"<html>not here</html>", "no JSON object"),
        (b"[1]", "no JSON object"),
        (b'{"a":' * 100_000, "no JSON object"),
        (b'{"choices": ' + b"9" * 5000 + b"}", "no JSON object"),
        (b"{}", "no choices with a text"),
        (b'{"choices": {"0": "x"}}', "no choices with a text"),
        (b'{"choices": [{"message": {"content": ["x"]}}]}', "no choices with a text"),
        (b'{"choices": [{"message": 3}]}', "no choices with a text"),
        (b'{"choices": [null]}', "no choices with a text"),
        (b"", "no JSON object"),
    ],
)
def test_what_is_no_reply_is_said(served, data, words):
    with pytest.raises(PlayError, match=words) as error:
        ask(served([data]))
    assert len(str(error.value)) < 500


def test_a_reply_that_breaks_off_is_said(served):
    with pytest.raises(PlayError, match="the reply broke off"):
        ask(served([b'{"choices"'], Content_Length="1000"))


def test_halves_of_surrogate_pairs_are_replaced(served):
    (done,) = ask(served([reply("a\ud800b\udfff")]))
    assert done.text == "a?b?" and done.text.encode()
