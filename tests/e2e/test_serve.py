"""The endpoint over real sockets on this machine, asked by the official client."""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from scripted_team import team

from cothink.api import load_team

openai = pytest.importorskip("openai")
httpx = pytest.importorskip("httpx")
pytest.importorskip("fastapi")
pytest.importorskip("prometheus_client")

from cothink import cli, serve  # noqa: E402
from cothink.serve.desk import Limits  # noqa: E402

QUESTION = "Tom counts apples. Tom has 5 apples. Tom gets 3 apples. How many apples does Tom have now?"


async def sums(call):
    """meta says how, and ends in the second round; reasoning states the length of the question's last line."""
    await asyncio.sleep(0.002)
    turn = sum(m.role == "user" for m in call.messages)
    asked = call.messages[1].content
    if call.policy == "meta":
        return "count them" if turn == 1 else "say it [FINISH]"
    return "I count" if turn == 1 else f"\\boxed{{{len(asked)}}}"


@contextlib.contextmanager
def serving(made, **options):
    """The server in a thread; yields its base URL and the server."""
    place = serve.listener("127.0.0.1", 0)
    ready = threading.Event()
    server = serve.server(made, on_ready=ready.set, **options)
    thread = threading.Thread(target=lambda: asyncio.run(server.serve(sockets=[place])), daemon=True)
    thread.start()
    assert ready.wait(60)
    try:
        yield f"http://127.0.0.1:{place.getsockname()[1]}", server
    finally:
        server.should_exit = True
        thread.join(20)
        place.close()
    assert not thread.is_alive()


def client(url, key="k", **options):
    return openai.OpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0, **options)


def ask(who, text="one two", **options):
    given = {"model": "pair", "messages": [{"role": "user", "content": text}], **options}
    return who.chat.completions.create(**given)


@pytest.fixture(scope="module")
def pair():
    made, speaker = team(sums)
    with serving(made) as (url, server):
        yield client(url), speaker, url, server


def test_an_answer_its_inner_conversation_its_usage_and_a_trace(pair):
    who, *_ = pair
    assert [m.id for m in who.models.list()] == ["pair"] and who.models.retrieve("pair").owned_by == "cothink"
    reply = ask(who, extra_body={"trace": True})
    (choice,) = reply.choices
    wanted = len("Question:\none two\n\nInstruction:\ncount them")
    assert choice.message.content == f"\\boxed{{{wanted}}}" and choice.finish_reason == "stop"
    inner = "[meta] count them\n\n[reasoning] I count\n\n[meta] say it [FINISH]\n\n"
    assert choice.message.reasoning_content == inner
    # By hand: an id a message. Prompts of 2, 2, 4 and 4 messages, four replies, of which one is the final message.
    assert reply.usage.model_dump(exclude_none=True) == {
        "prompt_tokens": 12, "completion_tokens": 4, "total_tokens": 16,
        "completion_tokens_details": {"reasoning_tokens": 3},
    }  # fmt: skip
    (play,) = reply.trace["plays"]
    assert [t["role"] for t in play["turns"]] == ["meta", "reasoning"] * 2
    assert (play["finish"], play["graded"], play["answer"]) == ("finished", "3", str(wanted))
    assert not hasattr(ask(who), "trace")


def test_a_stream_brings_the_same_turn_by_turn(pair):
    who, *_ = pair
    whole = ask(who)
    stream = ask(who, stream=True, stream_options={"include_usage": True}, extra_body={"trace": True})
    chunks = list(stream)
    assert chunks[-1].choices == [] and chunks[-1].usage == whole.usage
    deltas = [c.choices[0] for c in chunks[:-1]]
    said = [d.delta.reasoning_content for d in deltas if getattr(d.delta, "reasoning_content", None)]
    assert len(said) == 3 and "".join(said) == whole.choices[0].message.reasoning_content
    assert "".join(d.delta.content or "" for d in deltas) == whole.choices[0].message.content
    assert deltas[0].delta.role == "assistant" and [d.finish_reason for d in deltas if d.finish_reason] == ["stop"]
    assert len({c.id for c in chunks}) == 1 and chunks[-2].trace["chosen"] == 0


def test_turns_come_when_they_are_spoken():
    """The plan is read while the reasoner still works."""
    let = threading.Event()

    async def slow(call):
        if call.policy == "reasoning":
            while not let.is_set():
                await asyncio.sleep(0.005)
            return "\\boxed{1}"
        return "the plan [FINISH]"

    with serving(team(slow)[0]) as (url, _):
        stream = iter(ask(client(url, timeout=60), stream=True))
        assert next(stream).choices[0].delta.role == "assistant"
        assert next(stream).choices[0].delta.reasoning_content == "[meta] the plan [FINISH]\n\n"
        let.set()
        assert next(stream).choices[0].delta.content == "\\boxed{1}"


def test_options_reach_the_roles_and_votes_decide(pair):
    who, speaker, *_ = pair
    before = len(speaker.calls)
    ask(who, temperature=0.5, top_p=0.5, max_tokens=9, seed=3)
    new = speaker.calls[before:]
    assert {(c.sampling.temperature, c.sampling.top_p, c.sampling.max_tokens) for c in new} == {(0.5, 0.5, 9)}
    ask(who, seed=3)
    assert [c.seed for c in speaker.calls[-4:]] == [c.seed for c in new]
    ask(who, max_tokens=9999)
    assert speaker.calls[-1].sampling.max_tokens == 64  # a role's own limit stays
    before = len(speaker.calls)
    assert ask(who, extra_body={"max_turns": 2}).choices[0].finish_reason == "stop"

    def voter(call):
        if call.policy == "meta":
            return "go [FINISH]"
        before = sum(c.policy == "reasoning" for c in speaker2.calls[:-1])
        return f"\\boxed{{{(7, 8, 8)[before]}}}"

    made, speaker2 = team(voter)
    with serving(made) as (url, _):
        reply = ask(client(url), extra_body={"votes": 3, "trace": True})
    assert reply.choices[0].message.content == "\\boxed{8}" and reply.trace["chosen"] == 1
    assert [p["answer"] for p in reply.trace["plays"]] == ["7", "8", "8"]
    inner = reply.choices[0].message.reasoning_content
    assert inner.count("meta] go") == 3 and "[1/3 reasoning] \\boxed{7}" in inner and "[2/3 reasoning]" not in inner


def test_a_history_and_instructions_are_part_of_the_question(pair):
    who, speaker, *_ = pair
    chat = [
        {"role": "system", "content": "Be short."},
        {"role": "user", "content": [{"type": "text", "text": "1 + 1?"}]},
        {"role": "assistant", "content": "2", "reasoning_content": "[meta] hm", "tool_calls": None},
        {"role": "user", "content": "and once more?"},
    ]
    ask(who, messages=chat)
    asked = next(c for c in reversed(speaker.calls) if c.policy == "meta").messages[1].content
    assert asked == (
        "Instructions:\nBe short.\n\nConversation so far:\n\nUser: 1 + 1?\n\nAssistant: 2\n\n"
        "Answer the last message of this conversation:\n\nand once more?"
    )


def post(url, data, kind="application/json"):
    return httpx.post(f"{url}/v1/chat/completions", content=data, headers={"content-type": kind})


def try_to(who, **options):
    """The error of a request that fails."""
    with pytest.raises(openai.APIError) as failed:
        list(ask(who, **options))
    return failed.value


@pytest.mark.parametrize(
    ("change", "param", "words"),
    [
        ({"tempereture": 1}, "tempereture", "did you mean 'temperature'?"),
        ({"temperature": 3}, "temperature", "less than or equal to 2"),
        ({"temperature": "hot"}, "temperature", "valid number"),
        ({"n": 2}, "n", "votes"),
        ({"stop": ["x"]}, "stop", "end their own turns"),
        ({"max_completion_tokens": 5}, "max_completion_tokens", "max_tokens bounds each turn"),
        ({"response_format": {"type": "json_object"}}, "response_format", "not supported"),
        ({"tools": [{"type": "function"}]}, "tools", "not supported"),
        ({"votes": 0}, "votes", "greater than or equal to 1"),
        ({"votes": 2, "temperature": 0}, "votes", "at temperature 0 every play is the same"),
        ({"max_turns": 9}, "max_turns", "1 to 3 turns"),
        ({"max_turns": 1}, "max_turns", "another game"),
        ({"stream_options": {"include_usage": True}}, "stream_options", "stream: true"),
        ({"messages": []}, "messages", "at least 1 item"),
        ({"messages": [{"role": "assistant", "content": "hi"}]}, "messages", "must be the user's"),
        ({"messages": [{"role": "tool", "content": "hi"}]}, "messages", "messages[0]: role 'tool'"),
        ({"messages": [{"role": "user", "content": " "}]}, "messages", "empty"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages", "no text"),
        ({"messages": [{"role": "user", "content": "\ud800"}]}, "messages", "surrogate"),
    ],
)
def test_what_would_not_be_followed_is_refused(pair, change, param, words):
    *_, url, _ = pair
    body = {"model": "pair", "messages": [{"role": "user", "content": "hi"}], **change}
    reply = post(url, json.dumps(body))
    error = reply.json()["error"]
    assert reply.status_code == 400 and error["param"] == param and words in error["message"], error
    assert error["type"] == "invalid_request_error"


def test_neutral_values_of_common_clients_are_accepted(pair):
    who, *_ = pair
    assert ask(who, n=1, presence_penalty=0, logprobs=False, user="me", stop=None).choices[0].finish_reason == "stop"


def test_errors_of_the_door(pair):
    who, _, url, _ = pair
    with pytest.raises(openai.NotFoundError, match="write 'pair'"):
        ask(who, model="gpt")
    assert post(url, "{").status_code == 400 and "not JSON" in post(url, "{").json()["error"]["message"]
    assert post(url, "[" * 100_000).status_code == 400 and post(url, "[1]").status_code == 400
    assert post(url, "{}", "text/plain").status_code == 415
    assert post(url, b"x" * ((1 << 20) + 1)).status_code == 413
    chunks = iter([b"x" * (1 << 19)] * 3)
    assert post(url, chunks).status_code == 413
    assert httpx.get(f"{url}/nothing").json()["error"]["type"] == "invalid_request_error"
    assert httpx.get(f"{url}/v1/chat/completions").status_code == 405
    assert httpx.get(f"{url}/health").json() == {"status": "ok"}


def test_a_key_is_needed_everywhere_but_for_health():
    with serving(team(sums)[0], key="sesame") as (url, _):
        assert ask(client(url, "sesame")).choices
        for wrong in ("sesam", "sesame2", "κλειδί"):
            reply = httpx.get(f"{url}/v1/models", headers={"authorization": f"Bearer {wrong}".encode()})
            assert reply.status_code == 401 and reply.headers["www-authenticate"] == "Bearer"
        with pytest.raises(openai.AuthenticationError, match="API key"):
            ask(client(url, "no"))
        assert httpx.get(f"{url}/metrics").status_code == 401 and httpx.get(f"{url}/health").status_code == 200


def test_sixty_four_clients_lose_nothing_and_are_counted():
    made, _ = team(sums)

    async def one(url, number):
        async with openai.AsyncOpenAI(
            base_url=f"{url}/v1", api_key="k", http_client=httpx.AsyncClient(verify=False), max_retries=0
        ) as who:
            found = []
            for k in range(3):
                text = "x" * (1 + 3 * number + k)
                found.append((len(text), await ask(who, text)))
            return found

    async def everybody(url):
        return await asyncio.gather(*(one(url, k) for k in range(64)))

    with serving(made) as (url, _):
        replies = [pair for found in asyncio.run(everybody(url)) for pair in found]
        lines = httpx.get(f"{url}/metrics").text
    frame = len("Question:\n\n\nInstruction:\ncount them")
    assert len(replies) == 192
    assert all(r.choices[0].message.content == f"\\boxed{{{n + frame}}}" for n, r in replies)  # nobody got another's
    value = lambda name: float(re.search(rf"^{re.escape(name)} (\S+)$", lines, re.M)[1])  # noqa: E731
    assert value('cothink_requests_total{status="200"}') == 192 == value("cothink_answer_seconds_count")
    assert value('cothink_turns_total{role="meta"}') == 384 and value("cothink_plays_running") == 0
    assert value('cothink_tokens_total{kind="generated"}') == 768


def test_a_real_engine_gives_everybody_the_answer_of_their_own_seed():
    """Requests that arrive while others are being sampled neither get lost nor change what anyone is told."""
    made = load_team(Path(__file__).parents[2] / "recipes" / "rema-demo.yaml")
    sums = [f"Tom counts apples. Tom has {5 + k} apples. Tom gets 3 apples. How many apples does Tom have now?"
            for k in range(12)]  # fmt: skip

    async def everybody(url):
        async with openai.AsyncOpenAI(
            base_url=f"{url}/v1", api_key="k", http_client=httpx.AsyncClient(verify=False), max_retries=0
        ) as who:

            async def one(k):
                await asyncio.sleep(0.004 * k)
                return await ask(who, sums[k], model="rema-demo", seed=k)

            return await asyncio.gather(*(one(k) for k in range(12)))

    with serving(made) as (url, _):
        together = [r.choices[0].message for r in asyncio.run(everybody(url))]
        alone = [ask(client(url), text, model="rema-demo", seed=k).choices[0].message for k, text in enumerate(sums)]
    said = [(m.reasoning_content, m.content) for m in together]
    assert said == [(m.reasoning_content, m.content) for m in alone] and len(set(said)) > 6


def test_more_than_there_is_room_for_is_turned_away_with_a_time_to_come_back():
    let = threading.Event()

    async def slow(call):
        while not let.is_set():
            await asyncio.sleep(0.005)
        return "a [FINISH]"

    with serving(team(slow)[0], limits=Limits(plays=2, seconds=0.6)) as (url, server):
        with pytest.raises(openai.BadRequestError, match="more than the 2 plays"):
            ask(client(url), extra_body={"votes": 3})
        late = []
        first = threading.Thread(target=lambda: late.append(try_to(client(url), extra_body={"votes": 2})))
        first.start()
        until(lambda: server.desk._plays == 2)
        with pytest.raises(openai.RateLimitError, match="2 of 2 plays") as turned:
            ask(client(url))
        assert turned.value.response.headers["retry-after"] == "1"
        first.join()
        assert late[0].status_code == 504 and "in time" in late[0].message
        let.set()
        assert ask(client(url)).choices[0].message.content == "a"


def until(true, seconds=5.0):
    ends = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < ends, "it never came true"
        time.sleep(0.005)


@pytest.fixture(scope="module")
def endless(tiny_folder):
    """A random model that would speak for thousands of tokens, in a real engine."""
    recipe = {
        "name": "endless",
        "team": {"workflow": "solo", "roles": {"solver": {"policy": "p", "system": "go", "max_tokens": 6000}}},
        "policies": {"p": {"model": str(tiny_folder)}},
        "tasks": {"test": {"name": "wordsums", "split": "test"}},
        "stages": [{"kind": "evaluate"}],
    }
    made = load_team(recipe)
    made.session.policies["p"].model.config.max_position_embeddings = 1 << 14
    made.session.engines["p"]._stops["p"].ids = made.session.engines["p"]._stops["p"].ids[:0]  # it never ends its turn
    return made


@pytest.mark.parametrize("stream", [False, True])
def test_the_rows_of_a_client_that_leaves_are_given_up(endless, stream):
    speaker = endless.session.engines["p"]
    sampler = speaker._samplers["p"]
    with serving(endless) as (url, server):
        before = speaker.counters.generated
        body = json.dumps(
            {"model": "endless", "messages": [{"role": "user", "content": "hi"}], "votes": 4, "stream": stream}
        )
        with socket.create_connection(("127.0.0.1", int(url.rpartition(":")[2]))) as line:
            line.sendall(
                b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
                b"Content-Length: %d\r\n\r\n%s" % (len(body), body.encode())
            )
            until(lambda: len(sampler._rows) == 4 and speaker.counters.generated > before + 40)
        until(lambda: not sampler._rows and not server.desk._plays)
        stopped = speaker.counters.generated
        assert stopped - before < 4 * 6000 / 2
        lines = httpx.get(f"{url}/metrics").text
        assert 'cothink_requests_total{status="499"} 1.0' in lines and "cothink_engine_passes_total" in lines
        time.sleep(0.05)
        assert speaker.counters.generated == stopped


def test_running_requests_finish_when_it_stops_and_late_ones_are_cut():
    let = threading.Event()

    async def slow(call):
        while not let.is_set():
            await asyncio.sleep(0.005)
        return "a [FINISH]"

    found = {}

    def run(name, url, **options):
        try:
            reply = ask(client(url), **options)
            found[name] = list(reply) if options else reply.choices[0].message.content
        except openai.APIError as error:
            found[name] = error

    for grace, name in ((10.0, "finished"), (0.2, "cut"), (0.2, "cut stream")):
        let.clear()
        with serving(team(slow)[0], grace=grace) as (url, server):
            options = {"stream": True} if name == "cut stream" else {}
            thread = threading.Thread(target=run, args=(name, url), kwargs=options)
            thread.start()
            until(lambda: server.desk._plays == 1)
            server.should_exit = True
            until(lambda: server.desk.draining)
            if grace > 1:
                let.set()
            thread.join(10)
    assert found["finished"] == "a"
    assert found["cut"].status_code == found["cut stream"].status_code == 503
    assert found["cut"].response.headers["retry-after"] == "5"


def test_a_failing_team_is_a_500_without_its_secrets(caplog):
    def broken(call):
        raise RuntimeError("the secret path")

    with serving(team(broken)[0]) as (url, _), pytest.raises(openai.InternalServerError) as failed:
        ask(client(url))
    assert "secret" not in str(failed.value) and "secret" in caplog.text


def test_a_question_longer_than_the_context_is_the_callers_error(endless):
    with serving(endless) as (url, _):
        for stream in (False, True):
            with pytest.raises(openai.BadRequestError, match="leaves no room") as refused:
                ask(client(url), "word " * 9000, model="endless", stream=stream)
            assert refused.value.code == "context_length_exceeded"


def test_what_cannot_be_served_is_said(monkeypatch):
    from cothink.record import RunError

    with pytest.raises(RunError, match="SOME_KEY holds no key"):
        serve.key_of("SOME_KEY")
    monkeypatch.setenv("SOME_KEY", "x")
    assert serve.key_of("SOME_KEY") == "x"
    with serve.listener("127.0.0.1", 0) as taken, pytest.raises(RunError, match="cannot listen on 127"):
        serve.listener("127.0.0.1", taken.getsockname()[1])


def test_the_benchmark_counts_what_came_back(pair, monkeypatch, capsys):
    *_, url, _ = pair
    spec = importlib.util.spec_from_file_location("bench_serve", Path(__file__).parents[2] / "bench" / "serve.py")
    bench = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(bench)
    monkeypatch.setattr("sys.argv", ["serve.py", "--url", url, "--clients", "3", "--requests", "2"])
    bench.main()
    head, one, many = (line.split() for line in capsys.readouterr().out.splitlines())
    assert head[-1] == "ratio" and one[:3] == ["1", "20", "0"] and many[:3] == ["3", "6", "0"]
    assert one[-1] == "1.00x" and re.fullmatch(r"\d+\.\d\dx", many[-1])
    assert [bench.quantile([4, 1, 3, 2], q) for q in (0.5, 0.75, 0.95)] == [2, 3, 4]


def test_the_command_serves_until_it_is_told_to_stop(monkeypatch):
    """As a stranger starts it: a free port, a key from the environment, answers, SIGTERM, exit code 0."""
    recipe = str(Path(__file__).parents[2] / "recipes" / "rema-demo.yaml")
    command = [sys.executable, "-m", "cothink.cli", "serve", f"demo={recipe}", "--port", "0", "--api-key-env", "MY_KEY"]
    started = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env={**os.environ, "MY_KEY": "sesame"})
    try:
        line = started.stderr.readline()
        url = re.fullmatch(r"demo listens on (http://127\.0\.0\.1:\d+)/v1 \(Ctrl-C stops it\)\n", line)[1]
        reply = ask(client(url, "sesame"), QUESTION, model="demo", seed=1, temperature=0, extra_body={"trace": True})
        assert [t["role"] for t in reply.trace["plays"][0]["turns"]] == ["meta", "reasoning"]
        again = ask(client(url, "sesame"), QUESTION, model="demo", temperature=0)
        assert reply.choices[0].message.content == again.choices[0].message.content
        assert httpx.get(f"{url}/v1/models").status_code == 401
        lines = httpx.get(f"{url}/metrics", headers={"authorization": "Bearer sesame"}).text
        assert 'cothink_requests_total{status="200"} 2.0' in lines
        started.send_signal(signal.SIGTERM)
        assert started.wait(90) == 0 and started.stderr.read() == "stopped\n"
    finally:
        started.kill()


def test_a_taken_port_is_said_before_anything_is_loaded(capsys):
    with serve.listener("127.0.0.1", 0) as taken, pytest.raises(SystemExit) as left:
        cli.main(["serve", "nowhere", "--port", str(taken.getsockname()[1])])
    assert left.value.code == 1 and "cannot listen on 127.0.0.1" in capsys.readouterr().err
    with pytest.raises(SystemExit) as left:
        cli.main(["serve", "nowhere", "--api-key-env", "NO_SUCH_KEY"])
    assert left.value.code == 1 and "NO_SUCH_KEY holds no key" in capsys.readouterr().err
