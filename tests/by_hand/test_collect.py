"""The collect stage and its store on a scripted engine (malt §10, oracle O11)."""

from __future__ import annotations

import asyncio
import json

import pytest

from cothink import store
from cothink.collect_rules import Cost, cost
from cothink.engines import scripted
from cothink.recipe import Recipe
from cothink.record import Run
from cothink.resolve import RecipeError, bind, resolve
from cothink.session import Session
from cothink.stages.collect import collect, place
from cothink.store import StoreError
from cothink.types import PlayError, Task

TASKS = [Task(f"wordsums/train/{k}", f"What is {k} + 1?", str(k + 1), {"kind": "number"}) for k in range(3)]


class Kill(BaseException):
    """What a killed process looks like from inside."""


def recipe(branching=(2, 2, 2), roles=None, tasks=None, **stage):
    tree = {
        "name": "trees",
        "team": {"workflow": {"name": "malt", "prompts": "words"}, "roles": roles or {
            name: {"policy": "p", "max_tokens": 16} for name in ("generator", "verifier", "refiner")}},
        "policies": {"p": {"model": "builtin:tiny"}},
        "tasks": tasks or {"train": {"name": "wordsums", "count": 3}},
        "stages": [{"kind": "collect", "branching": list(branching), **stage}],
    }  # fmt: skip
    return Recipe.load(tree)


def reply(call):
    """Right, wrong and unreadable answers, as the seed has it."""
    return [("Final Answer: 1", "Final Answer: 2", "no idea")[(call.seed >> k) % 3] for k in range(call.n)]


def run(folder, script=reply, plan=None, tasks=TASKS):
    """Runs the collect stage in a run folder; returns its figures and the engine's calls."""
    plan = plan or recipe()
    record = Run(folder, plan.to_yaml(), plan.seed)
    engine = scripted.engine(script)
    team = bind(resolve("workflow", "malt"), plan.team.workflow.options, "workflow")
    session = Session(plan, plan.roles(), team, {}, {"p": engine}, {"train": tasks}, record)
    try:
        return asyncio.run(collect(session, plan.stages[0], 0)), engine.calls
    finally:
        record.close()


def trees_of(folder, plan=None):
    return place(folder, plan or recipe(), 0)


def text_of(folder):
    return (trees_of(folder) / "trees.jsonl").read_text()


def test_o11_row5_counts(tmp_path):
    assert cost([3, 3, 3]) == Cost(13, 39, 27)
    assert cost([4, 2, 2]) == Cost(13, 28, 16)
    assert (cost([3, 3, 3, 2, 2]).completions, cost([3, 3, 3, 2, 2]).leaves) == (201, 108)
    figures, calls = run(tmp_path / "r", plan=recipe([3, 3, 3]))
    assert len(calls) == 3 * 13 and figures["completions"] == 3 * 39 and figures["graded_leaves"] == 3 * 27
    found = store.load(trees_of(tmp_path / "r"))
    assert [len(tree.episode.turns) for tree in found] == [39, 39, 39]


def test_trees_come_back_as_they_were_played(tmp_path):
    run(tmp_path / "r")
    found = store.load(trees_of(tmp_path / "r"))
    assert [tree.episode.task for tree in found] == TASKS
    tree = found[1]
    assert [t.id for t in tree.episode.turns] == [str(k) for k in range(14)]
    assert [t.parents for t in tree.episode.turns[:7]] == [(), (), ("0",), ("0",), ("1",), ("1",), ("2",)]
    assert (tree.split, tree.round, tree.episode.finish.turn) == ("train", 0, "6")
    for turn in tree.episode.turns:
        said = turn.completion.text
        want = {"Final Answer: 2": ("right", "2"), "Final Answer: 1": ("wrong", "1"), "no idea": ("unparsable", None)}
        grade = tree.grades[turn.id]
        assert (grade.verdict, grade.answer) == want[said]
        assert turn.completion.version == 0 and turn.completion.logprobs == ()  # those are not kept
    facts = tree.origin["verifier"]
    assert facts["base_model"] == "builtin:tiny" and facts["weights"] == "base"
    assert facts["sampling"] == {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "max_tokens": 16, "stop": [], "seed": 0}
    assert len({tree.origin[r]["prompt_template_hash"] for r in tree.origin}) == 3 and facts["config_hash"]


def test_row3_a_template_that_changes_has_another_hash(tmp_path):
    run(tmp_path / "a")
    seats = {name: {"policy": "p", "max_tokens": 16} for name in ("generator", "verifier", "refiner")}
    changed = recipe(roles={**seats, "verifier": {**seats["verifier"], "system": "Check!"}})
    run(tmp_path / "b", plan=changed)
    a, b = (store.load(trees_of(tmp_path / x))[0].origin for x in "ab")
    same = {name: a[name]["prompt_template_hash"] == b[name]["prompt_template_hash"] for name in a}
    assert same == {"generator": True, "verifier": False, "refiner": True}


@pytest.mark.parametrize("after", range(21))
def test_row7_killed_after_any_call_and_resumed(after, tmp_path):
    whole, _ = run(tmp_path / "whole")
    asked = []

    def dies(call):
        if len(asked) == after:
            raise Kill
        asked.append(call.seed)
        return reply(call)

    with pytest.raises(Kill):
        run(tmp_path / "r", dies)
    figures, calls = run(tmp_path / "r")
    asked += [call.seed for call in calls]
    assert len(asked) == len(set(asked)) == 21, "a call was repeated, or left out"
    assert text_of(tmp_path / "r") == text_of(tmp_path / "whole")
    assert figures["completions"] == whole["completions"]


def test_row7_a_line_that_was_cut_off_is_played_again(tmp_path):
    run(tmp_path / "r")
    whole, path = text_of(tmp_path / "r"), trees_of(tmp_path / "r") / "trees.jsonl"
    lines = whole.splitlines(keepends=True)
    path.write_text("".join(lines[:11]) + lines[11][:40])
    said = []
    again = store.Store(path.parent, json.loads((path.parent / "header.json").read_text()), said.append)
    again.close()
    assert "the last line was cut off (40 bytes)" in said[0] and path.read_text() == "".join(lines[:11])
    (tmp_path / "r" / "state.json").unlink(missing_ok=True)
    _, calls = run(tmp_path / "r")
    kept = sum('"turns"' in line for line in lines[:11])
    assert len(calls) == 21 - kept and path.read_text() == whole


def test_row8_the_seed_decides_the_bytes(tmp_path):
    for name, seed in (("a", 5), ("b", 5), ("c", 6)):
        run(tmp_path / name, plan=recipe(seed=seed))
    assert text_of(tmp_path / "a") == text_of(tmp_path / "b") != text_of(tmp_path / "c")


def test_row8_whoever_answers_first_leaves_no_trace(tmp_path):
    async def slowly(call):
        await asyncio.sleep((call.seed % 5) / 1000)
        return reply(call)

    run(tmp_path / "a")
    run(tmp_path / "b", slowly)
    assert text_of(tmp_path / "a") == text_of(tmp_path / "b")


def test_failed_calls_are_holes_and_are_tried_again_on_a_resume(tmp_path):
    broken = {"on": True}

    def fails(call):
        if broken["on"] and "Answer:\nno idea" in call.messages[-1].content:
            raise RuntimeError("the server is down")
        return reply(call)

    figures, _ = run(tmp_path / "r", fails)
    assert figures["failed_calls"] > 0
    short = store.load(trees_of(tmp_path / "r"))
    assert sum(len(tree.episode.turns) for tree in short) == figures["completions"] < 42
    broken["on"] = False
    figures, calls = run(tmp_path / "r", fails)
    assert figures["completions"] == 42 and len(calls) < 21
    run(tmp_path / "whole")
    assert text_of(tmp_path / "r") == text_of(tmp_path / "whole")


def test_a_stage_in_which_nothing_succeeds_says_why(tmp_path):
    def down(call):
        raise RuntimeError("connection refused")

    many = [Task(f"t/{k}", f"q{k}", "1") for k in range(30)]
    with pytest.raises(PlayError, match="connection refused"):
        run(tmp_path / "r", down, tasks=many)

    def half(call):
        if "Answer:" in call.messages[-1].content:
            raise RuntimeError("the verifier is down")
        return reply(call)

    with pytest.raises(PlayError, match=r"no tree has a leaf.*the verifier is down"):
        run(tmp_path / "s", half)


def test_row9_a_grader_that_raises_costs_one_answer(tmp_path, monkeypatch):
    from cothink.verify import pool, worker

    def hangs(job, timeout):
        raise TimeoutError

    monkeypatch.setattr(pool, "_submit", hangs)
    tasks = [Task("t/0", "q", "\\frac{1}{2}", {"kind": "math"})]
    figures, _ = run(tmp_path / "r", lambda call: "Final Answer: \\sqrt{x+1}", tasks=tasks)
    assert worker and figures["grading_errors"] == figures["graded_leaves"] == 8 and figures["right_leaves"] == 0


def test_trees_that_still_grow_can_be_read(tmp_path):
    calls = []

    def dies(call):
        calls.append(call)
        if len(calls) >= 10:
            raise Kill
        return reply(call)

    with pytest.raises(Kill):
        run(tmp_path / "r", dies)
    folder = trees_of(tmp_path / "r")
    assert store.load(folder) == []
    growing = store.load(folder, partial=True)
    assert sum(len(tree.episode.turns) for tree in growing) == 18
    assert all(not tree.grades for tree in growing)


def test_one_process_at_a_time_and_the_same_settings(tmp_path):
    first = store.Store(tmp_path / "s", {"seed": 1, "round": 0})
    with pytest.raises(StoreError, match="written by another process"):
        store.Store(tmp_path / "s", {"seed": 1, "round": 0})
    first.close()
    with pytest.raises(StoreError, match="another seed: 1, not 2"):
        store.Store(tmp_path / "s", {"seed": 2, "round": 0})
    store.Store(tmp_path / "s", {"seed": 1, "round": 0}).close()
    with pytest.raises(StoreError, match="holds no trees"):
        store.load(tmp_path)


def test_another_question_of_the_same_name_and_a_damaged_file_are_refused(tmp_path):
    run(tmp_path / "r")
    path = trees_of(tmp_path / "r") / "trees.jsonl"
    whole = path.read_text().splitlines(keepends=True)
    path.write_text("".join(line for line in whole if '"grades"' not in line))
    other = [Task(TASKS[0].id, "What is 7 + 1?", "8", {"kind": "number"})]
    with pytest.raises(StoreError, match="another question"):
        run(tmp_path / "r", tasks=other)
    path.write_text("nonsense\n" + "".join(whole))
    with pytest.raises(StoreError, match=r"trees\.jsonl, line 1"):
        store.load(path.parent)


@pytest.mark.parametrize(
    ("change", "where", "word"),
    [
        ({"branching": None}, "stages.0.branching", r"branching: \[3, 3, 3\]"),
        ({"branching": [1, 1, 1]}, "stages.0.branching", "no alternatives"),
        ({"branching": [3, 3]}, "stages.0", "one number of at least 1 for each"),
        ({"temperature": 0}, "stages.0.temperature", "all alternatives are equal"),
        ({"on": "tran"}, "stages.0.on", "train"),
        ({"branchings": [3]}, "stages.0.branchings", "branching"),
    ],
)
def test_a_stage_that_cannot_run_is_refused(change, where, word):
    tree = recipe().model_dump()
    tree["stages"] = [{k: v for k, v in {"kind": "collect", "branching": [2, 2, 2], **change}.items() if v is not None}]
    with pytest.raises(RecipeError, match=word) as error:
        Recipe.load(_plain(tree))
    assert any(p.where == where for p in error.value.problems)


def test_trees_of_the_test_split_teach_nobody():
    tree = _plain(recipe(tasks={"train": {"name": "wordsums", "split": "test"}}).model_dump())
    tree["stages"].append({"kind": "sft", "data": "tree", "epochs": 1})
    with pytest.raises(RecipeError, match="learn from trees on the split 'test'"):
        Recipe.load(tree)


def test_a_workflow_without_branching_is_refused():
    tree = _plain(recipe().model_dump())
    tree["team"] = {"workflow": "solo", "roles": {"solver": {"policy": "p"}}}
    with pytest.raises(RecipeError, match="'solo' has no option branching"):
        Recipe.load(tree)


def _plain(tree):
    """A dumped recipe without the settings that mean nothing in it."""
    tree["policies"] = {"p": {"model": "builtin:tiny"}}
    tree["stages"] = [{k: v for k, v in s.items() if v is not None} for s in tree["stages"]]
    return json.loads(json.dumps(tree))


def test_row6_a_dry_run_counts_and_asks_nobody(monkeypatch):
    from cothink import preview, session

    monkeypatch.setattr(session, "assemble", lambda *a, **k: pytest.fail("a check loads nothing"))
    plan = recipe([3, 3, 3], tasks={"train": {"name": "wordsums", "count": 100}}, tokens_per_second=100)
    text = "\n".join(preview.lines(plan))
    # 39 completions of 16 tokens each; 100 trees take 62,400 tokens, at 100 a second 624 seconds
    assert "a tree of branching [3, 3, 3]" in text
    assert "13 calls (13 prompts to read), 39 completions, 27 leaves" in text and "624 new tokens" in text
    assert "100 trees, 1,300 calls (1,300 prompts to read), 3,900 completions, 2,700 leaves" in text
    assert "62,400 new tokens: 10 minutes at 100 new tokens a second" in text


def test_row6_prompt_tokens_are_reckoned_with_full_answers(tmp_path):
    from cothink import preview

    data = tmp_path / "q.jsonl"
    data.write_text(json.dumps({"question": "q" * 40, "answer": "1"}) + "\n")
    tasks = {"train": {"name": "files", "path": str(data)}}
    roles = {n: {"policy": "p", "system": "s" * 20, "max_tokens": 25} for n in ("generator", "verifier", "refiner")}
    text = "\n".join(preview.lines(recipe([2, 2, 2], tasks=tasks, roles=roles)))
    # characters: G 20 + 40; V 20 + 40 + 100 and 20 of layout; R 20 + 40 + 2 * 100 and 36 of layout; 4 to a token
    assert f"at most {(60 + 2 * 180 + 4 * 296) / 4:,.0f} prompt tokens and 350 new tokens" in text


def test_reports_and_the_viewer_find_the_trees_among_the_episodes(tmp_path):
    run(tmp_path / "run")
    rows = [json.loads(line) for line in (tmp_path / "run/episodes/00-collect/000000.jsonl").read_text().splitlines()]
    assert [row["task"] for row in rows] == [task.id for task in TASKS] and {row["set"] for row in rows} == {"train"}
    assert all(len(row["turns"]) == 14 and "value" in row["turns"][0] for row in rows)  # 2 + 4 + 8


def test_row35_collections_count_their_rounds_and_say_which_weights_spoke(tmp_path):
    from types import SimpleNamespace

    from cothink.stages.collect import facts

    tree = _plain(recipe().model_dump())
    tree["stages"] = [*tree["stages"], {"kind": "sft", "data": "tree", "epochs": 1}, *tree["stages"]]
    plan = Recipe.load(tree)
    record = Run(tmp_path / "r", plan.to_yaml(), 0)
    record.state = {"stage": 2, "checkpoint": "stage01-step000003"}
    session = Session(plan, plan.roles(), None, {"p": SimpleNamespace(version=1)}, {}, {}, record)
    second = facts(session, plan.stages[2], 2, plan.roles())
    session.policies["p"].version = 0
    first = facts(session, plan.stages[0], 0, plan.roles())
    record.close()
    assert (first["round"], second["round"]) == (0, 1)
    assert first["roles"]["refiner"]["weights"] == "base"
    assert second["roles"]["refiner"]["weights"] == "stage01-step000003"
