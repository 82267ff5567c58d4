"""What a recipe may say about an sft stage, what it may not, and how the check describes it."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from cothink import preview, source
from cothink.conversations import Conversation, Conversations, chat
from cothink.engines.scripted import engine as scripted
from cothink.parts import SFT
from cothink.recipe import Recipe
from cothink.resolve import RecipeError
from cothink.session import Session
from cothink.stages import sft as stage_of
from cothink.types import Sample

RECIPES = Path(__file__).parents[2] / "recipes"
BASE = {
    "name": "t",
    "team": {
        "workflow": {"name": "rema", "max_turns": 2, "max_context": 512},
        "roles": {"meta": {"policy": "p", "system": "Guide."}, "reasoning": {"policy": "p", "system": "Follow."}},
    },
    "policies": {"p": {"model": "builtin:tiny"}},
    "tasks": {"test": {"name": "wordsums", "split": "test", "count": 5}},
    "stages": [
        {"kind": "sft", "data": {"name": "wordsums", "count": 10, "levels": 2}, "epochs": 2, "rows_per_step": 4}
    ],
}


def load(*overrides):
    return Recipe.load(BASE, overrides)


def complaint(*overrides):
    with pytest.raises(RecipeError) as found:
        load(*overrides)
    return str(found.value)


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["stages.0.roles=[metta]"], "stages.0.roles: unknown role 'metta' [E01]; did you mean 'meta'?"),
        (["stages.0.roles=[]"], "an sft stage needs a role that learns"),
        (["team.roles.meta.trainable=false", "stages.0.roles=[meta]"], "the role 'meta' does not learn"),
        (["stages.0.max_steps=3"], "epochs and max_steps are both given"),
        (["~stages.0.epochs"], "neither epochs nor max_steps says how long"),
        (["stages.0.microbatch_rows=3"], "3 rows at a time do not make 4 rows a step"),
        (["stages.0.data.name=wordsum"], "unknown conversations 'wordsum'"),
        (
            ["stages.0.data.level=3"],
            "unknown option 'level' of conversations.wordsums.load [E01]; did you mean 'levels'?",
        ),
        (["~stages.0.data"], "stages.0.data: is missing"),
        (["stages.0.epoch=3"], "stages.0.epoch: unknown key [E01]; did you mean 'epochs'?"),
        (["policies.p.learning_rate=1e-3"], "policies.p.learning_rate: does nothing: only an rl stage reads it"),
        (["policies.p.model='openai:m@http://x'"], "role 'meta' is taught, and openai:m@http://x has no weights here"),
    ],
)
def test_what_a_stage_may_not_say_is_named(overrides, words):
    assert words in complaint(*overrides)


def test_a_stage_survives_being_written_and_the_check_says_what_it_would_do():
    recipe = load("stages.0.roles=[meta]", "stages.0.held_out=2")
    assert Recipe.load(source.parse(recipe.to_yaml(), "text")) == recipe
    told = "\n".join(preview.lines(recipe))
    assert "stage 0: sft of meta on wordsums, 2 epochs of 4 rows each" in told
    assert "policy p: 10 of meta rows, at most 4 steps" in told  # 8 rows are learned, twice
    away = "\n".join(preview.lines(load("stages.0.data={name: files, path: not/here.jsonl}")))
    assert "rows unknown: no file not/here.jsonl" in away
    with pytest.raises(RecipeError, match=r"stages\.0\.data: wordsums: what does the role 'meta' do"):
        list(preview.lines(load("team.roles.meta.system=Say.")))


def prepared(monkeypatch, examples, policy, **stage):
    """The lessons of a stage whose data are the given examples, on a policy that has no weights."""
    recipe = load(*(f"stages.0.{k}={v}" for k, v in stage.items()))
    monkeypatch.setattr(stage_of, "resolve", lambda kind, name: lambda roles: examples)
    monkeypatch.setattr(stage_of, "bind", lambda function, options, where: function)
    session = Session(recipe, recipe.roles(), None, {"p": policy}, {"p": scripted([], _Codec())})
    return session, lambda: stage_of.prepare(session, recipe.stages[0], 0)  # type: ignore[arg-type]


class _Codec:
    """One id a letter; a reply ends in 0."""

    stop_ids, stop_strings = (0,), ()

    def start(self, messages):
        return tuple(ord(letter) for m in messages for letter in m.content)

    def reply(self, text):
        return (*map(ord, text), 0)

    def decode(self, ids):
        return "".join(map(chr, ids))


class _Policy:
    tokenizer = None

    class model:
        class config:
            max_position_embeddings = 50


def example(role, text, k=0):
    return Conversation(role, (*chat(load().roles()[role], ["q", text]),), f"t{k}", "q?")


def test_long_rows_are_left_out_and_counted_never_cut(monkeypatch):
    """malt §10 row 27."""
    examples = Conversations([*(example("meta", "x" * n, n) for n in (5, 20, 60)), example("reasoning", "y", 5)])
    _, prepare = prepared(monkeypatch, examples, _Policy(), max_length=30)
    lesson = prepare()["p"]
    # "Guide." + "q" + the reply + its end: 6 + 1 + 5 + 1
    assert [len(row.ids) for row in lesson.rows] == [13, 28, 10]
    assert (lesson.facts["meta/rows"], lesson.facts["meta/dropped"], lesson.facts["meta/trained_tokens"]) == (2, 1, 27)
    _, prepare = prepared(monkeypatch, examples, _Policy(), max_length=4000)
    assert prepare()["p"].facts["meta/dropped"] == 1  # 68 tokens do not fit the model's 50
    _, prepare = prepared(monkeypatch, examples, _Policy(), max_length=12)
    with pytest.raises(stage_of.DataShort, match=r"all 3 examples of the role 'meta' are longer than 12 tokens; raise"):
        prepare()


def test_a_role_without_examples_a_bad_chat_and_too_many_held_out_are_named(monkeypatch):
    """malt §10 row 26: empty role data stops with a named role."""
    _, prepare = prepared(monkeypatch, Conversations([example("meta", "a")]), _Policy())
    with pytest.raises(stage_of.DataShort, match="wordsums has no example for the role 'reasoning'"):
        prepare()
    bad = Conversation("meta", example("meta", "a").messages[:2], "t7")
    _, prepare = prepared(monkeypatch, Conversations([bad, example("reasoning", "b")]), _Policy())
    with pytest.raises(stage_of.DataShort, match="example 't7' of 'meta' is no chat to learn: does not end in an"):
        prepare()
    both = Conversations([example(role, "a", k) for k in range(3) for role in ("meta", "reasoning")])
    _, prepare = prepared(monkeypatch, both, _Policy(), held_out=3)
    with pytest.raises(stage_of.DataShort, match="held_out 3 leaves nothing to learn of 3 tasks"):
        prepare()
    _, prepare = prepared(monkeypatch, both, object())
    with pytest.raises(Exception, match="policy 'p' has no language model"):
        prepare()


def test_samples_with_the_sampled_ids_are_learned_as_they_are(monkeypatch):
    """malt §4.3: token ids the engine sampled, not an encoding of their text."""
    sampled = Sample("old", "meta", "e0/meta", (9, 8, 7), (-1, -1, 0), (0.0,) * 3, (0.0,) * 3, "t0")
    _, prepare = prepared(monkeypatch, Conversations([sampled, example("reasoning", "b")]), _Policy())
    lesson = prepare()["p"]
    assert lesson.rows[0].ids == (9, 8, 7) and lesson.rows[0].turns == (-1, -1, 0) and lesson.rows[0].policy == "p"


def test_overlap_with_the_recipes_own_task_sets_is_counted(monkeypatch):
    from cothink.types import Task

    both = Conversations([example(role, "a", k) for k in range(3) for role in ("meta", "reasoning")])
    session, prepare = prepared(monkeypatch, both, _Policy())
    session.tasks = {"test": [Task("a", "Q ?", "1")], "train": [Task("b", "r", "1")]}
    facts = prepare()["p"].facts
    assert (facts["overlap/test"], facts["overlap/train"]) == (3, 0)  # three tasks ask the same question


def test_trl_that_is_not_installed_is_named(monkeypatch):
    import builtins

    real = builtins.__import__

    def missing(name, *args, **kwargs):
        if name == "trl":
            raise ImportError(name)
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", missing)
    session, _ = prepared(monkeypatch, Conversations([]), _Policy())
    with pytest.raises(RuntimeError, match=r"pip install 'cothink\[trl\]'"):
        asyncio.run(stage_of.sft(session, session.recipe.stages[0], 0))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "overrides",
    [
        ["stages.0.roles=[meta]"],
        ["stages.0.roles=[reasoning]"],
        ["stages.0.data.drop=[leak, unboxed]"],
        ["policies.main.model=Qwen/Qwen2.5-32B", "stages.0.learning_rate=5e-6"],
        ["team.roles.reasoning.policy=reasoning", "policies.reasoning={model: Qwen/Qwen2.5-7B, dtype: bfloat16}"],
    ],
)
def test_the_papers_cold_starts_load(overrides):
    """rema §7 row 43 (R6): meta only, reasoning only, joint, other sizes, two models."""
    recipe = Recipe.load(RECIPES / "rema-coldstart-paper.yaml", overrides)
    stage = recipe.stages[0]
    assert isinstance(stage, SFT) and (stage.epochs, stage.packing, stage.rows_per_step) == (3, True, 8)
