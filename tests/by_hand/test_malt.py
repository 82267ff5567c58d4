"""The `malt` workflow by hand (malt §10): who reads what, what a tree costs, reduced and longer teams."""

from __future__ import annotations

import asyncio
import itertools

import pytest

from cothink.builtin import prompts as tiny
from cothink.chat import InternCodec, TemplateCodec
from cothink.engines import scripted
from cothink.resolve import RecipeError, bind
from cothink.team import Job, play
from cothink.types import Role, Sampling, Task
from cothink.workflows import malt

GOLD = "GOLD-31"
CSQA = Task(
    "csqa/0", "Where do fish live?\nA: sea\nB: tree", "A",
    {"kind": "letter", "choices": {"A": "sea", "B": "tree"}, "question_concept": "CONCEPT-7"},
)  # fmt: skip


def played(task, reply, codec=None, limit=64, **options):
    """The episode of one task, and the engine's calls."""
    seats = {n: Role(n, n, s, sampling=Sampling(max_tokens=limit)) for n, s in malt.roles(**options).items()}
    engine = scripted.engine(reply if callable(reply) else lambda call: reply, codec)
    workflow = bind(malt.run, options, "workflow")
    found = asyncio.run(play([Job(task, "e", 3)], workflow, seats, dict.fromkeys(seats, engine)))
    return found.episodes[0], engine.calls


def numbered(call):
    """Every answer of a script says who spoke and how often that role was asked before."""
    seen: dict[str, itertools.count] = numbered.seen
    return [f"<{call.policy} {next(seen.setdefault(call.policy, itertools.count()))}>" for _ in range(call.n)]


@pytest.fixture(autouse=True)
def _fresh():
    numbered.seen = {}


@pytest.mark.parametrize(
    ("branching", "completions", "calls", "leaves"),
    [([3, 3, 3], 39, 13, 27), ([4, 2, 2], 28, 13, 16), ([3, 3, 3, 2, 2], 201, 94, 108), ([1, 1, 1], 3, 3, 1)],
)
def test_o11_row5_cost_of_a_tree(branching, completions, calls, leaves):
    order = ["generator", "verifier", "refiner", "verifier", "refiner"][: len(branching)]
    episode, asked = played(Task("t", "q", GOLD), numbered, order=order, branching=branching)
    assert (len(episode.turns), len(asked)) == (completions, calls)
    parents = {p for t in episode.turns for p in t.parents}
    assert sum(t.id not in parents for t in episode.turns) == leaves
    assert len({call.seed for call in asked}) == calls, "every call has a seed of its own"


def test_row2_every_role_reads_exactly_its_slots():
    task = Task("t", "What is 1 + 1?", GOLD, {"note": GOLD})
    _, calls = played(task, numbered, branching=[2, 2, 2])
    texts = {name: [c.messages[-1].content for c in calls if c.policy == name] for name in malt.TEAM}
    assert texts["generator"] == ["What is 1 + 1?"]
    assert set(texts["verifier"]) == {f"Question:\nWhat is 1 + 1?\n\nAnswer:\n<generator {g}>" for g in range(2)}
    assert set(texts["refiner"]) == {
        f"Question:\nWhat is 1 + 1?\n\nAnswer:\n<generator {v // 2}>\n\nVerification:\n<verifier {v}>" for v in range(4)
    }
    for call in calls:
        assert [m.role for m in call.messages] == ["system", "user"]
        assert not any(GOLD in m.content for m in call.messages)


def test_row2_csqa_shows_the_choices_and_never_the_concept():
    _, calls = played(CSQA, "I think so. Final Answer: A", prompts="choice")
    assert all("A: sea\nB: tree" in c.messages[-1].content for c in calls)
    assert not any("CONCEPT" in m.content for c in calls for m in c.messages)


def test_parents_and_rounds_of_a_line():
    episode, _ = played(
        Task("t", "q", GOLD), numbered, order=["generator", "verifier", "refiner", "verifier", "refiner"]
    )
    assert [(t.role, t.parents, t.round) for t in episode.turns] == [
        ("generator", (), 0), ("verifier", ("0",), 0), ("refiner", ("1",), 0), ("verifier", ("2",), 1),
        ("refiner", ("3",), 1),
    ]  # fmt: skip
    assert episode.finish.text == "<refiner 1>" and episode.finish.turn == "4"


def test_a_later_verifier_checks_the_last_refinement():
    _, calls = played(Task("t", "q", GOLD), numbered, order=["generator", "verifier", "refiner", "verifier"])
    assert calls[3].messages[-1].content == "Question:\nq\n\nAnswer:\n<refiner 0>"


def test_row29_reduced_teams():
    task = Task("t", "q", "4", {"kind": "number"})
    assert [c.policy for c in played(task, numbered, order=["generator"])[1]] == ["generator"]
    numbered.seen = {}
    alone, calls = played(task, numbered, order=["generator", "refiner"])
    assert calls[1].messages[-1].content == "Question:\nq\n\nAnswer:\n<generator 0>\n\nVerification:\n"
    assert alone.turns[1].parents == ("0",)
    says = {"generator": "Final Answer: 4", "verifier": "It is fine."}
    for carry, graded in ((False, "1"), (True, "0")):
        pair = played(task, lambda c: says[c.policy], order=["generator", "verifier"], carry_forward=carry)[0]
        assert pair.finish.turn == graded
    says["verifier"] = "Final Answer: 5"
    pair = played(task, lambda c: says[c.policy], order=["generator", "verifier"], carry_forward=True)[0]
    assert pair.finish.text == "Final Answer: 5", "an answer of the verifier's own stands"


def test_what_does_not_fit_the_context_ends_a_branch():
    class Long(InternCodec):
        def start(self, messages):
            ids = super().start(messages)
            return ids * 9 if "<generator 1>" in messages[-1].content else ids

    task = Task("t", "q", GOLD)
    tree, _ = played(task, numbered, Long(), branching=[2, 1, 1], max_context=10)
    assert [t.role for t in tree.turns] == ["generator", "generator", "verifier", "refiner"]
    assert tree.finish.reason == "finished" and tree.finish.turn == "3"
    numbered.seen = {"generator": itertools.count(1)}
    line, calls = played(task, numbered, Long(), max_context=10)
    assert (line.finish.reason, line.finish.text, len(calls)) == ("context_exceeded", "", 1)
    assert line.turns[-1].role == "refiner" and not line.turns[-1].completion.output_ids


@pytest.mark.parametrize(
    ("options", "word"),
    [
        ({"order": ["verifier"]}, "a generator comes first"),
        ({"order": ["generator", "generator"]}, "a generator comes first"),
        ({"order": []}, "a generator comes first"),
        ({"order": ["generator", "verifier", "verifier"]}, "a refiner between"),
        ({"branching": [3, 3]}, "one number of at least 1 for each"),
        ({"branching": [3, 0, 3]}, "one number of at least 1 for each"),
        ({"carry_forward": True}, "whose last role is the verifier"),
        ({"prompts": "words", "verifier_states_answer": False}, "fixed lines"),
    ],
)
def test_options_that_contradict_one_another(options, word):
    with pytest.raises(ValueError, match=word):
        malt.roles(**options)


def test_an_unknown_kind_of_prompts_is_refused():
    with pytest.raises(RecipeError, match="boxed"):
        bind(malt.run, {"prompts": "box"}, "workflow")


def test_the_built_in_model_reads_what_it_was_trained_on():
    names = ("generator", "verifier", "refiner")
    assert malt.roles(prompts="words") == {n: tiny.PROMPTS[n] for n in names}
    assert malt.LAYOUTS["verifier"] == tiny.VERIFY and malt.LAYOUTS["refiner"] == tiny.REFINE


def test_prompts_ask_for_the_marker_that_is_read():
    for kind in ("math", "boxed", "choice"):
        every = malt.roles(prompts=kind)
        assert all("Final Answer:" in text for text in every.values())
        assert ("\\boxed{}" in every["refiner"]) == (kind == "boxed")
        free = malt.roles(prompts=kind, verifier_states_answer=False)
        assert "Final Answer:" not in free["verifier"] and free["refiner"] == every["refiner"]


def test_row4_a_tokenizer_without_chat_template_gets_plain_text(tiny_folder):
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(tiny_folder)
    tokenizer.chat_template = None
    codec = TemplateCodec(tokenizer)
    _, calls = played(Task("t", "What is 1 + 1?", GOLD), "Final Answer: 2", codec)
    text = tokenizer.decode(calls[2].prompt_ids)
    head = f"System: {malt.roles()['refiner']}\n\nUser: Question:\nWhat is 1 + 1?\n\nAnswer:\nFinal Answer: 2"
    assert text.startswith(head) and text.endswith("\n\nAssistant:")
    assert codec.stop_strings == ("\nUser:",)
