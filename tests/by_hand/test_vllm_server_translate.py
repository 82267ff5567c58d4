"""What a vLLM server is asked and what is made of its replies and refusals, against a server of a few lines."""

from __future__ import annotations

import asyncio
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import SimpleNamespace as NS

import pytest

from cothink.engines import vllm_server
from cothink.engines.vllm_core import Answer, Hosted
from cothink.types import PlayError

BASE = {"id": "served", "root": "/models/one", "parent": None, "max_model_len": 77}
WHAT = Hosted("/models/one", "float32", None, 2, 8)
SETTINGS = {"temperature": 0.7, "top_p": 1.0, "top_k": 0, "max_tokens": 5, "seed": 9, "stop": ["x"],
            "stop_token_ids": [2], "include_stop_str_in_output": True, "logprobs": 0}  # fmt: skip


def choice(ids, logprobs, reason="stop"):
    return {"choices": [{"token_ids": ids, "logprobs": {"token_logprobs": logprobs}, "finish_reason": reason}]}


@pytest.fixture
def fake():
    """A server that keeps what it was asked; `replies` by path are (status, body), one for all or a list to use up."""
    asked: list[tuple[str, dict]] = []
    replies: dict = {"/v1/models": (200, {"data": [BASE]}), "/v1/completions": (200, choice([5], [0.0]))}

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            size = int(self.headers.get("content-length") or 0)
            asked.append((self.path, json.loads(self.rfile.read(size)) if size else {}))
            found = replies.get(self.path, (200, {}))
            status, body = found.pop(0) if isinstance(found, list) else found
            data = json.dumps(body).encode()
            self.send_response(status)
            self.send_header("content-type", "application/json")
            self.send_header("content-length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        do_POST = do_GET

        def log_message(self, format, *args):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield NS(url=f"http://127.0.0.1:{server.server_port}", asked=asked, replies=replies)
    server.shutdown()
    server.server_close()


def made(fake, what=WHAT, retries=0):
    return vllm_server.Server(fake.url, what, 5.0, retries)


def test_ids_go_out_and_ids_come_back(fake):
    server = made(fake)
    assert server.context == 77
    fake.replies["/v1/completions"] = (200, choice([4, 2], [-0.25, -1.5]))
    said = asyncio.run(server.ask("run.a.1", (7, 8), SETTINGS, None))
    assert said == Answer((4, 2), (-0.25, -1.5), "stop")
    path, body = fake.asked[-1]
    assert path == "/v1/completions"
    assert body == {"model": "run.a.1", "prompt": [7, 8], "return_token_ids": True, **SETTINGS}
    asyncio.run(server.ask(None, (7, 8), SETTINGS, '{"type": "object"}'))
    body = fake.asked[-1][1]
    assert body["model"] == "served" and body["structured_outputs"]["json"]["type"] == "object"


def test_a_new_adapter_takes_the_place_of_the_old_one(fake, tmp_path):
    made(fake).adapter("run.a.2", tmp_path, "run.a.1")
    assert fake.asked[-2:] == [
        ("/v1/load_lora_adapter", {"lora_name": "run.a.2", "lora_path": str(tmp_path)}),
        ("/v1/unload_lora_adapter", {"lora_name": "run.a.1"}),
    ]


def test_a_busy_server_is_asked_again_and_a_refusal_is_not(fake, monkeypatch):
    monkeypatch.setattr(vllm_server, "WAIT", 0.001)
    server = made(fake, retries=2)
    fake.replies["/v1/completions"] = [(503, {}), (500, {}), (200, choice([4], [-0.5]))]
    assert asyncio.run(server.ask(None, (7,), SETTINGS, None)).ids == (4,)
    fake.replies["/v1/completions"] = [(400, {"error": "no such thing"}), (200, choice([4], [-0.5]))]
    with pytest.raises(PlayError, match=r"said 400 to /v1/completions: .*no such thing"):
        asyncio.run(server.ask(None, (7,), SETTINGS, None))
    fake.replies["/v1/completions"] = [(503, {})] * 3
    with pytest.raises(PlayError, match="said 503"):
        asyncio.run(server.ask(None, (7,), SETTINGS, None))


def test_a_server_of_another_model_is_refused(fake):
    with pytest.raises(PlayError, match=r"has /models/one; start it with: vllm serve /models/two"):
        made(fake, Hosted("/models/two", "float32", None, 1, 8))


@pytest.mark.parametrize("reply", [choice([5], [-0.9]), choice([5], []), {"choices": [{"finish_reason": "length"}]}])
def test_a_server_that_tells_other_logprobs_or_no_ids_is_refused(fake, reply):
    fake.replies["/v1/completions"] = (200, reply)
    with pytest.raises(PlayError, match="start it with --logprobs-mode processed_logprobs"):
        made(fake)
    assert fake.asked[-1][1]["top_k"] == 1  # the only token left has log-prob 0


def test_a_server_that_takes_no_adapters_says_what_it_was_not_given(fake, tmp_path):
    server = made(fake)
    fake.replies["/v1/load_lora_adapter"] = (404, {"detail": "Not Found"})
    with pytest.raises(PlayError, match=r"(?s)VLLM_ALLOW_RUNTIME_LORA_UPDATING=1 .*--max-loras 3 --max-lora-rank 8"):
        server.adapter("run.a.1", tmp_path, None)
    with pytest.raises(PlayError, match="adapters, not full weights"):
        server.weights(tmp_path)


def test_no_server_at_all():
    with pytest.raises(PlayError, match=r"no vLLM server at http://127.0.0.1:9: .*start vllm serve"):
        vllm_server.Server("http://127.0.0.1:9/v1", WHAT, 1.0, 0)
