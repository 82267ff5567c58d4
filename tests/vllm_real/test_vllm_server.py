"""A real vLLM server beside the local engine: adapters loaded while it runs, token ids in and out."""

import os
import socket
import subprocess
import sys
import time
import urllib.request

import pytest
import teams

from cothink import checks, models
from cothink.engines import vllm
from cothink.types import PlayError, Sampling

LORA = ["--enable-lora", "--max-loras", "3", "--max-lora-rank", "8"]
WHOLE_PROMPTS = ["--no-enable-chunked-prefill", "--max-num-batched-tokens", "4096"]
OPTIONS = ["--dtype", "float32", "--enforce-eager", "--generation-config", "vllm", *LORA, *WHOLE_PROMPTS]
GUIDED = ["--structured-outputs-config", '{"backend": "guidance"}']


def serve(folder, *options: str):
    """A server on a free port, and its address once it answers."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", models.where("builtin:tiny")]
    more = {"VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1", "VLLM_CPU_KVCACHE_SPACE": "1"}
    log = (folder / "serve.log").open("w")
    process = subprocess.Popen(
        [*command, "--host", "127.0.0.1", "--port", str(port), *OPTIONS, *options],
        env={**os.environ, **more}, stdout=log, stderr=subprocess.STDOUT,
    )  # fmt: skip
    url = f"http://127.0.0.1:{port}"
    for _ in range(240):
        try:
            urllib.request.urlopen(f"{url}/health", timeout=1)
            return process, url
        except OSError:
            assert process.poll() is None, (folder / "serve.log").read_text()[-2000:]
            time.sleep(0.5)
    process.terminate()
    raise AssertionError("the server did not start in two minutes")


@pytest.fixture(scope="module")
def address(tmp_path_factory):
    process, url = serve(tmp_path_factory.mktemp("server"), "--logprobs-mode", "processed_logprobs", *GUIDED)
    yield url
    process.terminate()
    process.wait(timeout=60)


def test_a_server_says_what_the_local_engine_says_also_after_an_update(address):
    made = teams.policies(base={}, a={"lora_r": 4}, b={"lora_r": 8})
    engine, local = vllm.engine(made, server=address), teams.beside(made)
    for name in made:
        assert teams.says(engine, name) == teams.says(local, name)
        checks.check_engine(engine, name)
    before = teams.says(engine, "a")
    teams.shake(made["a"], seed=5)
    engine.load("a", None, made["a"].version)
    assert teams.says(engine, "a") == teams.says(local, "a") != before
    assert teams.says(engine, "b") == teams.says(local, "b")
    said = teams.says(engine, "a", Sampling(max_tokens=16), n=2)
    gaps = [abs(p - q) for c in said for p, q in zip(c.logprobs, teams.logprobs(made["a"], c), strict=True)]
    assert max(gaps) < 1e-4


def test_a_schema_reaches_the_server(address):
    engine = vllm.engine(teams.policies(a={"lora_r": 4}), server=address)
    schema = (
        '{"type": "object", "properties": {"go": {"type": "string", "enum": ["on", "off"]}}, "required": ["go"], '
        '"additionalProperties": false}'
    )
    texts = {c.text for c in teams.says(engine, "a", Sampling(max_tokens=40, schema=schema), n=2)}
    assert texts <= {'{"go": "on"}', '{"go": "off"}'}


def test_a_server_that_lacks_something_is_refused_with_the_option_to_add(address, tmp_path):
    with pytest.raises(PlayError, match=r"(?s)--max-lora-rank 64.*engine.folder names another place"):
        vllm.engine(teams.policies(a={"lora_r": 64}), server=address)  # this one was started for rank 8
    process, url = serve(tmp_path)
    try:
        with pytest.raises(PlayError, match="start it with --logprobs-mode processed_logprobs"):
            vllm.engine(teams.policies(a={"lora_r": 4}), server=url)
    finally:
        process.terminate()
        process.wait(timeout=60)
