"""The built-in tokenizer: byte-level, lossless on any text, one token per digit and per common word."""

from __future__ import annotations

import random
from collections import Counter
from itertools import islice
from typing import TYPE_CHECKING

from cothink.builtin.chats import Chat, chats

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

START, END, PAD = "<|im_start|>", "<|im_end|>", "<|pad|>"
SAMPLE = 4000
"""Chats whose words are counted."""

PIECES = r" ?\\boxed\{| ?\[FINISH\]| ?[A-Za-z]+(?: (?=[0-9]))?|[0-9]| ?[^\sA-Za-z0-9](?: (?=[0-9]))?|\s+(?!\S)|\s+"
"""Words and signs take a space in front; a space before a digit goes to the piece on its left, digits stand alone."""

TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


def render(chat: Chat) -> str:
    """Write a chat as ChatML, as the chat template does."""
    return "".join(f"{START}{message.role}\n{message.content}{END}\n" for message in chat)


def build(seed: int = 0, rare: int = 20) -> PreTrainedTokenizerFast:
    """Count the pieces of generated chats and make each one seen at least `rare` times a token.

    The vocabulary is the 256 bytes, those pieces and three special tokens. There are no merges: a piece is either
    known whole (`ignore_merges`) or spelt in bytes, so `decode(encode(x)) == x` for any text.
    """
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    split = pre_tokenizers.Split(Regex(PIECES), behavior="isolated")
    pieces = pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    counts: Counter[str] = Counter()
    for chat in islice(chats(random.Random(f"tokenizer/{seed}")), SAMPLE):
        for message in chat:
            for text in (message.content, f"{message.role}\n"):
                counts.update(piece for piece, _ in pieces.pre_tokenize_str(text))
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    known = sorted(piece for piece, seen in counts.items() if seen >= rare and len(piece) > 1)
    vocab = {piece: at for at, piece in enumerate([*alphabet, *known])}
    core = Tokenizer(models.BPE(vocab=vocab, merges=[], ignore_merges=True))
    core.pre_tokenizer = pieces
    core.decoder = decoders.ByteLevel()
    core.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in (PAD, START, END)])
    return PreTrainedTokenizerFast(
        tokenizer_object=core,
        pad_token=PAD,
        eos_token=END,
        extra_special_tokens=[START],
        chat_template=TEMPLATE,
        clean_up_tokenization_spaces=False,
        model_max_length=1024,
        padding_side="left",
    )
