"""Constrained sampling: masks of a JSON schema over two real tokenizers (spec/rema.md 6.1 and §7 row 33)."""

from __future__ import annotations

import json
import random
import sys

import numpy as np
import pytest

from cothink import builtin, models
from cothink.actions import ACTIONS, SCHEMA, read
from cothink.grammar import Grammar, replay
from cothink.types import PlayError

pytest.importorskip("llguidance")
TEXT = '{"action": "DECOMPOSE", "output": "What is 2?"}'


@pytest.fixture(scope="module", params=["builtin:tiny", "smollm2"])
def tokenizer(request):
    from transformers import AutoTokenizer

    folder = builtin.path() if request.param == "builtin:tiny" else models.cache_root() / models.SMOLLM2
    if not (folder / "tokenizer.json").exists():
        pytest.skip("needs `cothink models fetch smollm2`")
    return AutoTokenizer.from_pretrained(folder)


@pytest.fixture(scope="module")
def grammar(tokenizer):
    return Grammar(tokenizer, SCHEMA)


def test_row33_whatever_is_sampled_is_a_valid_action(tokenizer, grammar):
    """rema §7 row 33: random walks through the allowed tokens, closed as soon as may be once they are 40 long."""
    dice, seen = random.Random(0), set()
    closing = [i for i in range(len(tokenizer)) if tokenizer.decode([i]) in ('"', '"}')]
    for _ in range(20):
        matcher, ids = grammar.matcher(), []
        while not matcher.finished:
            allowed = np.flatnonzero(matcher.allowed()).tolist()
            shut = [i for i in closing if i in set(allowed)] if len(ids) > 40 else []
            ids.append(dice.choice(shut or allowed))
            matcher.advance(ids[-1])
        action = read(tokenizer.decode(ids))
        assert action is not None, tokenizer.decode(ids)
        assert tokenizer.decode(ids).startswith('{"action": "')  # first, and in one spelling
        seen.add(action.action)
        ends = np.flatnonzero(matcher.allowed())
        assert ends.tolist() == [tokenizer.eos_token_id]
        matcher.advance(int(ends[0]))
        assert matcher.finished
    assert seen == set(ACTIONS)


def test_special_tokens_are_no_text(tokenizer, grammar):
    matcher = grammar.matcher()
    for token in tokenizer('{"action": "REWRITE", "output": "Ask')["input_ids"]:
        matcher.advance(token)
    allowed = matcher.allowed()
    assert not allowed[tokenizer.all_special_ids].any() and allowed.sum() > 200
    with pytest.raises(ValueError, match="does not fit"):
        matcher.advance(tokenizer.eos_token_id)


def test_replay_gives_the_masks_of_every_place(tokenizer, grammar):
    ids = [*tokenizer(TEXT)["input_ids"], tokenizer.eos_token_id]
    masks = replay(grammar, ids)
    assert len(masks) == len(ids) and all(m.dtype == bool and m.shape == (len(tokenizer),) for m in masks)
    assert all(mask[token] for mask, token in zip(masks, ids))
    forced = [mask.sum() == 1 for mask in masks]
    assert forced[0] and forced[-1] and 0 < sum(forced) < len(ids)
    matcher = grammar.matcher()  # the same as sampling saw
    for mask, token in zip(masks, ids):
        assert (matcher.allowed() == mask).all()
        matcher.advance(token)
    with pytest.raises(ValueError, match="does not fit"):
        replay(grammar, tokenizer("hello")["input_ids"])


def test_wide_logits_and_several_end_tokens(tokenizer):
    size, other = len(tokenizer) + 7, tokenizer.convert_tokens_to_ids("<|im_start|>")
    grammar = Grammar(tokenizer, SCHEMA, size=size, stop_ids=(tokenizer.eos_token_id, other))
    matcher = grammar.matcher()
    for token in tokenizer('{"action": "EMPTY", "output": ""}')["input_ids"]:
        matcher.advance(token)
    allowed = matcher.allowed()
    assert allowed.shape == (size,) and set(np.flatnonzero(allowed)) == {tokenizer.eos_token_id, other}
    matcher.advance(other)
    assert matcher.finished
    with pytest.raises(ValueError, match="the logits only 5"):
        Grammar(tokenizer, SCHEMA, size=5)


@pytest.mark.parametrize("schema", ['{"type": "nothing"}', "{", json.dumps({"$ref": "#/nowhere"})])
def test_a_schema_that_cannot_be_followed_is_an_error(tokenizer, schema):
    with pytest.raises(ValueError):
        Grammar(tokenizer, schema)


def test_without_the_library_one_line_says_what_to_install(tokenizer, monkeypatch):
    monkeypatch.setitem(sys.modules, "llguidance", None)
    with pytest.raises(PlayError, match=r"constrain: true needs an extra: pip install 'cothink\[grammar\]'"):
        Grammar(tokenizer, SCHEMA)
