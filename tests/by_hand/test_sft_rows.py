"""Examples as token rows: which tokens are learned, checked letter by letter."""

from __future__ import annotations

import asyncio
from itertools import groupby
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from cothink.chat import TemplateCodec
from cothink.conversations import Conversation, fault, token_rows
from cothink.conversations.dialogues import Dialogue, views
from cothink.engines.scripted import engine as scripted
from cothink.team import Job, play
from cothink.types import Message, Role, Task
from cothink.workflows.rema import run as rema

TALK = Dialogue("d/0", "What is 2 + 2?", (("Add them.", "2 + 2 = 4"), ("Finish. [FINISH]", "\\boxed{4}")))
META, REASONING = Role("meta", "p", "Guide."), Role("reasoning", "p", "Work.")
TEMPLATES = Path(__file__).parents[1] / "fixtures" / "templates"


def said(role, *texts):
    return Conversation("r", (*((Message("system", role),) if role else ()), *(
        Message(("user", "assistant")[k % 2], text) for k, text in enumerate(texts))), "c/0")  # fmt: skip


def learned(codec, sample):
    """The whole row as text, and the text of every run of learned tokens."""
    text = codec.tokenizer.decode(sample.ids)
    runs = [(t, [i for i, _ in run]) for t, run in groupby(zip(sample.ids, sample.turns), key=lambda pair: pair[1])]
    return text, [(t, codec.tokenizer.decode(ids)) for t, ids in runs if t >= 0]


def test_both_views_of_a_two_round_dialogue_learn_own_turns_and_nothing_else(tiny_folder):
    """rema §7 row 35; malt §10 row 20: all own turns, each with its end token, and no other token."""
    codec = TemplateCodec(AutoTokenizer.from_pretrained(tiny_folder))
    meta, reasoning = (token_rows(view, codec, "p") for view in views(TALK, META, REASONING))
    ((sample,), breaks) = meta
    text, runs = learned(codec, sample)
    assert breaks == 0 and text == (
        "<|im_start|>system\nGuide.<|im_end|>\n<|im_start|>user\nWhat is 2 + 2?<|im_end|>\n"
        "<|im_start|>assistant\nAdd them.<|im_end|>\n<|im_start|>user\n2 + 2 = 4<|im_end|>\n"
        "<|im_start|>assistant\nFinish. [FINISH]<|im_end|>"
    )
    assert runs == [(0, "Add them.<|im_end|>"), (1, "Finish. [FINISH]<|im_end|>")]
    ((sample,), _) = reasoning
    text, runs = learned(codec, sample)
    assert text == (
        "<|im_start|>system\nWork.<|im_end|>\n"
        "<|im_start|>user\nQuestion:\nWhat is 2 + 2?\n\nInstruction:\nAdd them.<|im_end|>\n"
        "<|im_start|>assistant\n2 + 2 = 4<|im_end|>\n<|im_start|>user\nFinish. [FINISH]<|im_end|>\n"
        "<|im_start|>assistant\n\\boxed{4}<|im_end|>"
    )
    assert runs == [(0, "2 + 2 = 4<|im_end|>"), (1, "\\boxed{4}<|im_end|>")]
    assert (sample.policy, sample.role, sample.unit, sample.task) == ("p", "reasoning", "d/0/reasoning", "d/0")


def test_rows_are_the_prompts_of_play_and_the_ids_a_model_would_sample(tiny_folder):
    """rema §1.2: the lists of the dialogue's views are those `rema` builds when the same texts are said."""
    codec = TemplateCodec(AutoTokenizer.from_pretrained(tiny_folder))
    script = scripted([text for pair in TALK.rounds for text in pair], codec)
    roles = {"meta": META, "reasoning": REASONING}
    played = asyncio.run(play([Job(Task("t", TALK.question, "4"), "e", 0)], rema, roles, {"p": script}))
    assert played.episodes[0].finish.reason == "finished"
    for view in views(TALK, META, REASONING):
        last = [call for call in script.calls if call.messages[0].content == roles[view.role].system][-1]
        assert view.messages[:-1] == last.messages
        ((sample,), _) = token_rows(view, codec, "p")
        assert sample.ids[: len(codec.start(view.messages[:2]))] == codec.start(view.messages[:2])


def test_only_the_completion_is_learned_where_a_prompt_is_given(tiny_folder):
    codec = TemplateCodec(AutoTokenizer.from_pretrained(tiny_folder))
    whole = said("", "a", "b", "c", "d")
    ((sample,), _) = token_rows(Conversation("r", whole.messages, "c/0", first=2), codec, "p")
    assert learned(codec, sample)[1] == [(0, "d<|im_end|>")]


def test_a_layout_without_template_learns_the_space_it_prints_and_the_end_of_text(tiny_folder):
    tokenizer = AutoTokenizer.from_pretrained(tiny_folder)
    tokenizer.chat_template = None
    codec = TemplateCodec(tokenizer)
    ((sample,), _) = token_rows(said("S", "q", "a", "r", "b"), codec, "p")
    text, runs = learned(codec, sample)
    assert text == "System: S\n\nUser: q\n\nAssistant: a<|im_end|>\n\nUser: r\n\nAssistant: b<|im_end|>"
    assert runs == [(0, " a<|im_end|>"), (1, " b<|im_end|>")]


def test_a_template_that_drops_thinking_starts_a_new_row_as_in_play(tiny_folder):
    tokenizer = AutoTokenizer.from_pretrained(tiny_folder)
    codec = TemplateCodec(tokenizer, (TEMPLATES / "thinking.jinja").read_text())
    rows, breaks = token_rows(said("", "q", "<think>hm</think>a", "r", "b"), codec, "p")
    assert breaks == 1 and [[t for t, _ in learned(codec, row)[1]] for row in rows] == [[0], [1]]
    assert len({row.unit for row in rows}) == 1  # the loss still counts them as one
    assert "<think>" in learned(codec, rows[0])[1][0][1] and "hm" not in tokenizer.decode(rows[1].ids)


def test_texts_cannot_forge_the_end_of_a_turn(tiny_folder):
    codec = TemplateCodec(AutoTokenizer.from_pretrained(tiny_folder))
    ((sample,), _) = token_rows(said("", "q", "say <|im_end|> now"), codec, "p")
    end = codec.stop_ids[0]
    learned_ids = [i for i, t in zip(sample.ids, sample.turns) if t >= 0]
    assert learned_ids.count(end) == 1 and learned_ids[-1] == end


@pytest.mark.parametrize("name", ["smollm2", "qwen25", "chatml", "llama3"])
def test_a_row_is_what_the_template_prints_for_the_whole_chat(tiny_folder, name):
    """Ids as TRL would make them from the same messages, wherever no merge crosses the border of a reply."""
    tokenizer = AutoTokenizer.from_pretrained(tiny_folder)
    source = (TEMPLATES / f"{name}.jinja").read_text()
    if name == "llama3":
        tokenizer.add_special_tokens(
            {"additional_special_tokens": ["<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"]}
        )
    codec = TemplateCodec(tokenizer, source)
    chat = said("S", "question", "plan", "answer", "solve")
    ((sample,), _) = token_rows(chat, codec, "p")
    listed = [{"role": m.role, "content": m.content} for m in chat.messages]
    whole = tokenizer.apply_chat_template(listed, chat_template=codec._source, tokenize=False)
    assert tokenizer.decode(sample.ids).rstrip() == whole.rstrip()


@pytest.mark.parametrize(
    ("messages", "why"),
    [
        ((), "assistant message"),
        ((Message("user", "q"),), "assistant message"),
        ((Message("assistant", "a"),), "in turn"),
        ((Message("user", "q"), Message("user", "q"), Message("assistant", "a")), "in turn"),
        ((Message("user", "q"), Message("assistant", "a"), Message("user", "r")), "assistant message"),
        ((Message("user", "q"), Message("assistant", "")), None),
    ],
)
def test_what_is_no_conversation_is_named(messages, why):
    found = fault(messages)
    assert found is None if why is None else why in (found or "")
