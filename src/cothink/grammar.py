"""Constrained sampling: which tokens may come next so that a text fits a JSON schema (llguidance, on the CPU)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import numpy as np

from cothink.types import PlayError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

LAYOUT = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
"""One spelling per object, that of `json.dumps`: free white space would be room to ramble in."""


class Grammar:
    """A JSON schema over the tokens of one tokenizer.

    Properties come in the order of the schema, written as `json.dumps` does. Special tokens never count as text; once
    the text is complete only the tokens of `stop_ids` (default: the tokenizer's end token) may follow. `size` is the
    width of the model's logits, where that is more than the tokenizer has tokens. Making one costs up to a second:
    keep it. Raises PlayError where llguidance is missing, ValueError for a schema that it does not take.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        schema: str,
        *,
        size: int | None = None,
        stop_ids: Sequence[int] = (),
    ) -> None:
        try:
            from llguidance import LLMatcher
            from llguidance.hf import from_tokenizer
        except ImportError:
            raise PlayError("constrain: true needs an extra: pip install 'cothink[grammar]'") from None
        known = len(tokenizer)
        self.size = known if size is None else size
        if self.size < known:
            raise ValueError(f"the tokenizer has {known} tokens, the logits only {self.size}")
        self._known = known
        # One end token is llguidance's own; the others stand wherever that one may.
        ends: list[int] = [*stop_ids] or [tokenizer.eos_token_id]  # type: ignore[list-item]
        self._end, self._more_ends = ends[0], ends[1:]
        self._tokens = from_tokenizer(tokenizer, n_vocab=known, eos_token=self._end)  # type: ignore[arg-type]
        rules = LLMatcher.grammar_from_json_schema(schema, overrides=LAYOUT)  # type: ignore[arg-type]
        self._first = LLMatcher(self._tokens, rules, log_level=0)
        if self._first.is_error():
            raise ValueError(f"this JSON schema cannot be followed: {self._first.get_error().splitlines()[0]}")

    def matcher(self) -> Matcher:
        """A matcher at the beginning of a text."""
        return Matcher(self)


class Matcher:
    """One text on its way through a grammar."""

    def __init__(self, grammar: Grammar) -> None:
        self._grammar = grammar
        self._inner = grammar._first.deep_copy()
        self._bits = np.zeros((1, -(-grammar._known // 32)), np.int32)

    def allowed(self) -> np.ndarray:
        """Which tokens may come next: bool [V]."""
        from llguidance.numpy import fill_next_token_bitmask

        fill_next_token_bitmask(self._inner, self._bits)
        found = np.zeros(self._grammar.size, bool)
        bits = np.unpackbits(self._bits.view(np.uint8), bitorder="little")
        found[: self._grammar._known] = bits[: self._grammar._known]
        found[self._grammar._more_ends] |= found[self._grammar._end]
        return found

    def advance(self, token_id: int) -> None:
        """Takes one sampled token; ValueError if it was not allowed."""
        ends = token_id in self._grammar._more_ends and self._inner.is_accepting()
        if not self._inner.consume_token(self._grammar._end if ends else int(token_id)):
            raise ValueError(f"token {token_id} does not fit the schema here")

    @property
    def finished(self) -> bool:
        """Whether the text is complete: nothing but a stop token may follow."""
        return self._inner.is_stopped()


def replay(grammar: Grammar, ids: Iterable[int]) -> list[np.ndarray]:
    """The masks [V] that were in force when each of `ids` was sampled; ValueError where one was not allowed.

    A token that was the only one allowed was no choice: its mask has a single True.
    """
    matcher, masks = grammar.matcher(), []
    for token in ids:
        masks.append(matcher.allowed())
        matcher.advance(token)
    return masks
