"""A chat grown turn by turn holds exactly what was sampled, and reads as the template renders the whole of it."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

sys.path.append(str(Path(__file__).parents[1] / "fixtures" / "templates"))

from small_tokenizers import byte_level, lower_case, special_ids, start_marking

from cothink.chat import TemplateCodec
from cothink.types import Message

VERBATIM, INJECTING = {"chatml", "plain", "qwen25", "smollm2"}, {"qwen25", "smollm2"}
STEADY = ["", "chatml", "qwen25", "smollm2", "plain", "llama3", "no_system", "inst"]
SNIPPETS = [
    *("<|im_end|>", "<|im_start|>system\n", "</s>", "<|eot_id|>", "<|endof", "text|>", "\ue0f7", "\ue0f73c\ue0f7"),
    *("\n", "\n\n", "  ", "\t", "hello world", "The answer is", "User:", "é", "🙂", "日本", "{{ x }}", "<think>", ""),
]
texts = st.lists(st.sampled_from(SNIPPETS) | st.text(st.characters(exclude_categories=["Cs"]), max_size=4), max_size=5)
texts = texts.map("".join)


def chats(vocabulary: list[int]) -> st.SearchStrategy:
    """A system text or None, the user texts, and after each but the last the sampled ids and whether they ended."""
    replies = st.tuples(st.lists(st.sampled_from(vocabulary), max_size=6), st.booleans())
    exchanges = st.lists(st.tuples(texts, replies), min_size=1, max_size=5)
    return st.tuples(st.none() | texts, exchanges, texts)


def ordinary(tokenizer) -> list[int]:
    return [i for i in range(len(tokenizer)) if i not in special_ids(tokenizer)]


def shape(codec: TemplateCodec, messages: list[Message]) -> list[int]:
    """The special ids of the list with harmless contents."""
    harmless = codec.start([Message(m.role, "x") for m in messages])
    return [i for i in harmless if i in special_ids(codec.tokenizer)]


@pytest.mark.parametrize("name", [*STEADY, "start_marking", "lower_case"])
def test_turns_extend_one_another(name: str) -> None:
    named = {"start_marking": lambda: start_marking("chatml"), "lower_case": lower_case}
    tokenizer = named[name]() if name in named else byte_level(name)
    codec = TemplateCodec(tokenizer)
    has_end_token = name not in {"", "plain"}

    @settings(max_examples=40, deadline=None, derandomize=True, database=None)
    @given(chats(ordinary(tokenizer)))
    def check(chat) -> None:
        system, exchanges, last = chat
        messages = [Message("system", system)] if system is not None else []
        messages.append(Message("user", exchanges[0][0]))
        ids = codec.start(messages)
        verbatim = name in VERBATIM and (system is not None or name not in INJECTING)
        if verbatim:
            assert tokenizer.decode(ids) == rendered(codec, messages)
        for (_, (sampled, ended)), new in zip(exchanges, [text for text, _ in exchanges[1:]] + [last]):
            output = (*sampled, *codec.stop_ids[-1:]) if ended and has_end_token else tuple(sampled)
            messages += [Message("assistant", codec.decode(output)), Message("user", new)]
            before = ids + output
            ids, broke = codec.grow(messages, before)
            assert not broke
            assert ids[: len(before)] == before
            if verbatim:
                assert tokenizer.decode(ids) == rendered(codec, messages)
            assert [i for i in ids if i in special_ids(tokenizer)] == shape(codec, messages)

    check()


def rendered(codec: TemplateCodec, messages: list[Message]) -> str:
    """The template's own rendering, straight from transformers."""
    chat = [{"role": m.role, "content": m.content} for m in messages]
    return codec.tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)


@pytest.mark.parametrize("name", ["chatml", "no_system"])
def test_a_canonical_chat_has_the_ids_of_transformers(name: str) -> None:
    tokenizer = byte_level(name)
    codec = TemplateCodec(tokenizer)
    messages = [Message("user", "\nWhat is 2 and 3?"), Message("assistant", "The answer is 5."), Message("user", " go")]
    whole = tokenizer.apply_chat_template(
        [{"role": m.role, "content": m.content} for m in messages], add_generation_prompt=True, return_dict=False
    )
    assert codec.start(messages) == tuple(whole)
    sampled = (*tokenizer.encode("The answer is 5.", add_special_tokens=False), codec.stop_ids[-1])
    assert codec.grow(messages, codec.start(messages[:1]) + sampled).ids == tuple(whole)


def test_thinking_templates_break_exactly_when_they_drop_thoughts() -> None:
    codec = TemplateCodec(byte_level("thinking"))

    @settings(max_examples=60, deadline=None, derandomize=True, database=None)
    @given(st.lists(st.tuples(texts, texts | st.just("<think>a</think> b")), min_size=1, max_size=4), texts)
    def check(exchanges, last) -> None:
        messages = [Message("user", exchanges[0][0])]
        ids = codec.start(messages)
        for (_, reply), new in zip(exchanges, [text for text, _ in exchanges[1:]] + [last]):
            before = ids + tuple(codec.tokenizer.encode(reply, add_special_tokens=False, split_special_tokens=True))
            messages += [Message("assistant", reply), Message("user", new)]
            ids, broke = codec.grow(messages, before)
            assert broke == ("</think>" in reply)
            assert ids == codec.start(messages) if broke else ids[: len(before)] == before

    check()
