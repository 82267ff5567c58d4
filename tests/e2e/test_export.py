"""An exported team: plain transformers and peft load it and say what the team's own policies say."""

from __future__ import annotations

import asyncio
import importlib
import json
import re
import shutil
from collections import Counter
from functools import partial

import pytest

import cothink
from cothink import cli, export
from cothink.engines.scripted import engine
from cothink.export import replay, rows
from cothink.record import RunError, episode_row
from cothink.resolve import resolve
from cothink.tasks.files import load as load_tasks
from cothink.team import Job, play
from cothink.types import Message, Role, Sampling, Task

QUESTION = "what is 1 + 2?"


def recipe(folder, model):
    data = folder / "sums.jsonl"
    data.write_text("".join(json.dumps({"question": f"{a} + {b}?", "answer": str(a + b)}) + "\n"
                            for a in range(4) for b in range(4)))  # fmt: skip
    adapter = {"model": str(model), "learning_rate": 3e-2, "lora_r": 4}
    return {
        "name": "three",
        "team": {
            "workflow": {"name": "rema", "max_turns": 1, "max_context": 200, "stop_on_truncation": False,
                         "order": ["meta", "critic", "reasoning"]},
            "roles": {name: {"policy": name, "system": f"you {name}", "max_tokens": 8}
                      for name in ("meta", "critic", "reasoning")},
        },
        "policies": {"meta": {"model": str(model), "learning_rate": 1e-2}, "critic": adapter, "reasoning": adapter},
        "tasks": {"train": {"name": "files", "path": str(data)}, "test": {"name": "files", "path": str(data)}},
        "stages": [
            {"kind": "evaluate", "limit": 4, "label": "before"},
            {"kind": "rl", "steps": 1, "tasks_per_step": 3, "episodes_per_task": 4, "unfinished": "keep",
             "filter": "none", "rewards": [{"name": "house_marks:vowels"}]},
        ],
    }  # fmt: skip


@pytest.fixture(scope="module")
def run(tiny_folder, tmp_path_factory):
    """A run with full weights and two adapters over one base, all of them changed by training."""
    import sys
    import types

    module = types.ModuleType("house_marks")
    # Every episode gets a reward of its own, so that every group has a gradient.
    exec(
        "def vowels(task, turn, episode):\n"
        "    return sum(ord(c) % 7 for c in turn.text) / 50 if turn.id == episode.finish.turn else None\n",
        module.__dict__,
    )
    sys.modules["house_marks"] = module
    folder = tmp_path_factory.mktemp("export")
    yield cothink.run(recipe(folder, tiny_folder), out=folder / "run").folder
    del sys.modules["house_marks"]


@pytest.fixture(scope="module")
def own(run):
    """What each policy of the run itself answers without chance."""
    return greedy_of_team(cothink.load_team(run))


@pytest.fixture(scope="module", params=["adapters", "merged"])
def made(request, run, tmp_path_factory):
    place = tmp_path_factory.mktemp(request.param)
    found = export.export(run, place / "first", merge=request.param == "merged", rows=True)
    shutil.move(place / "first", place / "team")  # it does not know where it lies
    return request.param, place / "team", found


def greedy_of_team(team):
    async def ask(name):
        speaker = team.session.engines[name]
        messages = [Message("system", f"you {name}"), Message("user", QUESTION)]
        prompt = tuple(speaker.codec(name).start(messages))
        (done,) = await speaker.generate(name, messages, prompt, Sampling(0.0, max_tokens=24), 1, 0)
        return prompt, done.output_ids

    async def everybody():
        return {name: await ask(name) for name in team.session.policies}

    return asyncio.run(everybody())


def greedy(model, ids, new=24):
    import torch

    done = model.generate(torch.tensor([ids]), max_new_tokens=new, do_sample=False)[0, len(ids) :]
    return tuple(done.tolist())


def test_plain_libraries_say_what_the_policies_say(made, own, tiny_folder, monkeypatch):
    from peft import AutoPeftModelForCausalLM, PeftModel
    from transformers import AutoModelForCausalLM, AutoTokenizer

    kind, team, _ = made
    monkeypatch.chdir(team)  # as the cards say
    base = AutoModelForCausalLM.from_pretrained(tiny_folder)
    for name, (prompt, said) in own.items():
        if kind == "merged" or name == "meta":
            model = AutoModelForCausalLM.from_pretrained(f"policies/{name}")
            assert not (team / "policies" / name / "adapter_config.json").exists()
        else:
            local = json.loads((team / "policies" / name / "adapter_config.json").read_text())[
                "base_model_name_or_path"
            ]
            assert (team / local).is_dir() and not local.startswith("/")
            model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(local), f"policies/{name}")
            assert greedy(AutoPeftModelForCausalLM.from_pretrained(f"policies/{name}"), prompt) == said
        assert greedy(model, prompt) == said != greedy(base, prompt), name
        tokenizer = AutoTokenizer.from_pretrained(f"policies/{name}")
        chat = [{"role": "system", "content": f"you {name}"}, {"role": "user", "content": QUESTION}]
        ids = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=True)["input_ids"]
        assert tuple(ids) == prompt


def test_the_folder_is_a_team(made, own):
    """It can be named wherever a run can, from anywhere."""
    _, team, _ = made
    loaded = cothink.load_team(team)
    assert greedy_of_team(loaded) == own and loaded.name == "team"
    assert {r.system for r in loaded.session.roles.values()} == {"you meta", "you critic", "you reasoning"}
    assert cothink.evaluate(team, limit=2)["n"] == 2
    told = json.loads((team / "team.json").read_text())
    assert told["roles"]["critic"]["folder"] == "policies/critic" and told["workflow"]["name"] == "rema"


def test_the_cards_code_runs_as_written(made, tiny_folder, monkeypatch, capsys):
    kind, team, _ = made
    monkeypatch.chdir(team)
    for name in ("meta", "critic"):
        card = (team / "policies" / name / "README.md").read_text()
        (code,) = re.findall(r"```python\n(.*?)```", card, re.S)
        exec(code.replace("max_new_tokens=256", "max_new_tokens=4"), {})
        library = "peft" if kind == "adapters" and name == "critic" else "transformers"
        assert f"library_name: {library}\n" in card and f"you {name}" in card
    assert "| before | 0." in (team / "README.md").read_text()
    told = "".join(p.read_text() for p in (*team.rglob("*.md"), team / "team.json"))
    assert str(tiny_folder.parent) not in told and tiny_folder.name in told


def test_rows_are_in_the_shapes_of_trl_and_verl(made, run):
    datasets = pytest.importorskip("datasets")
    pytest.importorskip("trl")
    from transformers import AutoTokenizer
    from trl import is_conversational, maybe_apply_chat_template

    _, team, found = made
    tables = {p.stem: datasets.Dataset.from_parquet(str(p)) for p in (team / "rows").glob("*.parquet")}
    assert {name: len(table) for name, table in tables.items()} == {
        "turns": 36, "pairs": tables["pairs"].num_rows, "chats": 36, "verl": 3,
    }  # fmt: skip
    assert any("rows/turns.parquet: 36 rows" in line for line in found.lines)
    for name in ("turns", "pairs", "chats"):
        assert is_conversational(tables[name][0])
    tokenizer = AutoTokenizer.from_pretrained(team / "policies" / "meta")
    text = maybe_apply_chat_template({k: tables["turns"][0][k] for k in ("prompt", "completion")}, tokenizer)
    assert text["prompt"].endswith("assistant\n") and "you meta" in text["prompt"]
    # As stored: meta's plays of one row share their prompt, so the best and the worst of them are a pair.
    lines = [json.loads(x) for p in sorted((run / "episodes" / "01-rl").iterdir()) for x in p.read_text().splitlines()]
    metas = {}
    for e in lines:
        metas.setdefault(e["task"], []).append((e["turns"][0]["return"], e["turns"][0]["text"]))
    for task, said in metas.items():
        row = next(r for r in tables["pairs"] if r["role"] == "meta" and r["task"] == task)
        assert (row["chosen_return"], row["chosen"][0]["content"]) in said and row["chosen_return"] == max(said)[0]
        assert row["rejected_return"] == min(said)[0] < row["chosen_return"]
    # What was asked is what the workflow says: the reasoner reads the question and both others.
    turn = next(t for t in tables["turns"] if t["role"] == "reasoning")
    episode = next(e for e in lines if e["id"] == turn["episode"])
    heard = "\n\n".join(t.get("shown", t["text"]) for t in episode["turns"][:2])
    assert [m["content"] for m in turn["prompt"]] == [
        "you reasoning", f"Question:\n{episode['question']}\n\nInstruction:\n{heard}"
    ]  # fmt: skip
    # verl's rows are read back by our own reader of such files.
    again = list(load_tasks(path=str(team / "rows" / "verl.parquet")))
    assert {(t.question, t.answer) for t in again} == {(e["question"], e["gold"]) for e in lines}


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("solo", {}),
        ("plan_solve", {}),
        ("rema", {"max_turns": 3}),
        ("rema", {"max_turns": 1, "n_solutions": 3}),
        ("self_refine", {}),
        ("debate", {}),
        ("rerank", {}),
        ("malt", {"branching": [2, 2, 2]}),
    ],
)
def test_a_replay_asks_what_was_asked(name, options):
    """The stored texts alone bring back every prompt of every turn."""
    module = importlib.import_module(f"cothink.workflows.{name}")
    names = list(module.roles(**options) if hasattr(module, "roles") else module.ROLES)
    workflow = partial(resolve("workflow", name), **options)
    tree = {"name": "x", "team": {"workflow": {"name": name, **options}, "roles": {n: {"policy": "p"} for n in names}},
            "policies": {"p": {"model": "builtin:tiny"}}, "tasks": {"test": {"name": "wordsums", "split": "test"}},
            "stages": [{"kind": "evaluate"}]}  # fmt: skip
    made = cothink.Recipe.load(tree)
    speaker = engine(lambda call: [f"{len(speaker.calls)}.{k} \\boxed{{{k}}}" for k in range(call.n)])
    job = Job(Task("t", "how many?", "1"), "t#0", 7)
    played = asyncio.run(play([job], workflow, made.roles(), {"p": speaker}))
    (episode,) = played.episodes
    (heard,) = replay.prompts(made, [episode_row(episode)])
    said = {t.id: t.completion.text for t in episode.turns if t.completion.finish_reason != "void"}
    assert heard.keys() == said.keys() and len(said) == sum(c.n for c in speaker.calls) > 0
    asked = {f"{k + 1}.{j} \\boxed{{{j}}}": c.messages for k, c in enumerate(speaker.calls) for j in range(c.n)}
    assert {i: asked[text] for i, text in said.items()} == heard


def test_a_record_that_ends_early_is_rebuilt_as_far_as_it_goes():
    roles = {n: Role(n, "p", n) for n in ("meta", "reasoning")}
    made = cothink.Recipe.load({
        "name": "x", "team": {"workflow": {"name": "rema", "max_turns": 3},
                              "roles": {n: {"policy": "p"} for n in roles}},
        "policies": {"p": {"model": "builtin:tiny"}}, "tasks": {"test": {"name": "wordsums", "split": "test"}},
        "stages": [{"kind": "evaluate"}],
    })  # fmt: skip
    turn = {"parents": [], "role": "meta", "policy": "p", "text": "plan", "finish_reason": "stop"}
    more = {**turn, "parents": ["0"], "role": "reasoning", "text": "work"}
    (heard,) = replay.prompts(made, [{"task": "t", "question": "q", "gold": "1",
                                      "turns": [{**turn, "id": "0"}, {**more, "id": "1"}]}])  # fmt: skip
    assert [m.content for m in heard["1"]][1:] == ["Question:\nq\n\nInstruction:\nplan"] and len(heard) == 2


def test_pairs_and_chats_by_hand():
    def turn(task, role, prompt, text, worth, episode="e", number="0"):
        said = [{"role": "assistant", "content": text}]
        return {"task": task, "role": role, "policy": "p", "prompt": prompt, "completion": said, "return": worth,
                "episode": episode, "turn": number, "stage": 1, "step": 1}  # fmt: skip

    one, two = [{"role": "user", "content": "1"}], [{"role": "user", "content": "2"}]
    turns = [
        turn("a", "meta", one, "w", 0.0, "e0"), turn("a", "meta", one, "r", 1.0, "e1"),
        turn("a", "meta", one, "m", 0.5, "e2"), turn("b", "meta", two, "x", 1.0, "e3"),
        turn("b", "meta", two, "y", 1.0, "e4"), turn("b", "meta", two, "z", None, "e5"),
    ]  # fmt: skip
    (row,) = rows.pairs(turns)
    assert (row["chosen_turn"], row["rejected_turn"]) == ("e1/0", "e0/0")
    assert (row["chosen"][0]["content"], row["rejected_return"]) == ("r", 0.0)
    first = turn("a", "meta", one, "w", 0.0)
    later = turn("a", "meta", [*one, *first["completion"], *two], "v", 0.0, number="2")
    other = turn("a", "meta", two, "u", 0.0, number="3")
    found = list(rows.chats([first, later, other]))
    assert Counter(len(r["messages"]) for r in found) == {4: 1, 2: 1}


def test_what_cannot_be_exported_is_said(run, tmp_path, capsys, monkeypatch):
    with pytest.raises(RunError, match="is not a run folder"):
        export.export(tmp_path, tmp_path / "out")
    with pytest.raises(RunError, match="it has stage01-step000001"):
        export.export(run, tmp_path / "out", checkpoint="../../etc")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "mine").write_text("x")
    with pytest.raises(RunError, match="is there already"):
        export.export(run, tmp_path / "full")
    assert (tmp_path / "full" / "mine").exists() and not (tmp_path / "full.part").exists()
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    assert export.export(run, ".").folder.samefile(tmp_path / "here") and (tmp_path / "here" / "recipe.yaml").exists()
    with pytest.raises(SystemExit) as left:
        cli.main(["export", str(tmp_path), "--to", str(tmp_path / "out")])
    assert left.value.code == 1 and "is not a run folder" in capsys.readouterr().err


def test_nothing_is_uploaded_unless_asked(run, tmp_path, monkeypatch, capsys):
    hub = pytest.importorskip("huggingface_hub")
    calls = []

    class Api:
        def create_repo(self, name, **options):
            calls.append((name, options["private"]))

        def upload_folder(self, *, repo_id, folder_path, **options):
            calls.append((repo_id, folder_path))
            return f"https://huggingface.co/{repo_id}"

    monkeypatch.setattr(hub, "HfApi", Api)
    for to, more in (("a", []), ("b", ["--push-to-hub", "me/team"])):
        with pytest.raises(SystemExit) as left:
            cli.main(["export", str(run), "--to", str(tmp_path / to), *more])
        assert left.value.code == 0 and bool(calls) == bool(more)
    assert calls == [("me/team", True), ("me/team", str(tmp_path / "b"))]
    assert "uploaded: https://huggingface.co/me/team" in capsys.readouterr().out
