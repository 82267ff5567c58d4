"""Messages to token ids and back: the only user of a tokenizer, so that a sampled token is never encoded again.

Rules, for every codec:

- A chat grows by appending: the next prompt is the exact earlier ids, the exact sampled ids, then the template's glue
  and the new message. Only a template that rewrites history forces a fresh start, and `Grown.broke` says so.
- The model sees what the recipe says: a template's default system prompt is cut out when the list has no system
  message (`TemplateCodec.injects_system` tells when that is impossible).
- Contents cannot forge control tokens: text that looks like a special token is encoded as plain text.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from datetime import date
from typing import TYPE_CHECKING, NamedTuple, Protocol, cast

from cothink.types import Message

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

PLAIN_TEMPLATE = (
    "{% for message in messages %}"
    "{{ {'system': 'System: ', 'user': 'User: ', 'assistant': 'Assistant: '}[message['role']] }}"
    "{{ message['content'] | trim if message['role'] == 'assistant' else message['content'] }}{{ '\n\n' }}"
    "{% endfor %}"
    # No space at the end: byte-level vocabularies hold words with their leading space.
    "{% if add_generation_prompt %}{{ 'Assistant:' }}{% endif %}"
)
"""Layout for a base model whose tokenizer has no chat template."""
PLAIN_STOP = "\nUser:"
_TAIL = 16  # ids that surely hold the stop string, even spelt in bytes, and white space after it

# Stand-ins for contents. Letters only, so that no template trims, splits or escapes them.
_SYSTEM, _USER, _REPLY, _NEXT = (f"qzx{name}xzq" for name in ("System", "User", "Reply", "Next"))
_GUARD = "\ue0f7"  # private use; an occurrence in a content is itself guarded, so it cannot forge a guard
_GUARDED = re.compile(f"{_GUARD}([0-9a-f]+){_GUARD}")
# The fallback date of Llama 3's template: a prompt may not change at midnight, nor between a run and its resumption.
_TODAY = date(2024, 7, 26)


class Grown(NamedTuple):
    """A grown prompt; `broke` means that it does not start with the earlier ids."""

    ids: tuple[int, ...]
    broke: bool


class Codec(Protocol):
    """Turns one role's message list into prompt ids and sampled ids into text."""

    @property
    def stop_ids(self) -> tuple[int, ...]:
        """Ids that end a reply; a sampled one is kept in the ids and not in the text."""
        ...

    @property
    def stop_strings(self) -> tuple[str, ...]:
        """Texts at which an engine must stop as well, because no single token ends a reply."""
        ...

    def start(self, messages: Sequence[Message]) -> tuple[int, ...]:
        """Encode a whole list that ends in a user message, up to where the assistant speaks."""
        ...

    def grow(self, messages: Sequence[Message], ids: Sequence[int]) -> Grown:
        """Extend `ids`, the prompt and sampled ids of the reply `messages[-2]`, by the user message `messages[-1]`."""
        ...

    def decode(self, output_ids: Sequence[int]) -> str:
        """The text of sampled ids, without special tokens and otherwise untouched."""
        ...


class InternCodec:
    """One id per distinct message, numbered in order of appearance: for engines that have no tokenizer."""

    stop_ids: tuple[int, ...] = ()
    stop_strings: tuple[str, ...] = ()

    def __init__(self) -> None:
        self._ids: dict[tuple[str, str], int] = {}
        self._contents: list[str] = []

    def __len__(self) -> int:
        return len(self._contents)

    def intern(self, role: str, content: str) -> int:
        """The id of a message; an engine returns `(intern("assistant", text),)` as its output ids."""
        key = (role, content)
        if key not in self._ids:
            self._ids[key] = len(self._contents)
            self._contents.append(content)
        return self._ids[key]

    def start(self, messages: Sequence[Message]) -> tuple[int, ...]:
        _check_start(messages)
        return tuple(self.intern(message.role, message.content) for message in messages)

    def grow(self, messages: Sequence[Message], ids: Sequence[int]) -> Grown:
        _check_growth(messages)
        return Grown((*ids, self.intern("user", messages[-1].content)), broke=False)

    def decode(self, output_ids: Sequence[int]) -> str:
        unknown = [i for i in output_ids if not 0 <= i < len(self._contents)]
        if unknown:
            raise ValueError(f"ids {unknown} name no message; make output ids with intern('assistant', text)")
        return "".join(self._contents[i] for i in output_ids)


class TemplateCodec:
    """The codec of one tokenizer and its chat template (`chat_template`, else the tokenizer's own, else plain text).

    Encoding. The rendered text is encoded in one go, so the ids are those the model was tuned on, merges across the
    border of header and content included. Where a content holds the text of a special token, the run between two
    of the template's own special tokens around it is encoded with special tokens split. Glue is encoded apart
    from the reply, since no merge may touch sampled ids, and after a special token where there is one, so that
    tokenizers which mark the start of a text do not mark it in the middle of a chat.

    End of turn. A sampled stop id (eos, the template's own end-of-turn token, `extra_stop_ids`) closes the turn and the
    template's is left out; one that was not sampled (a stop string, the token limit) comes with the glue.

    System messages. Without one in the list, a default that the template would inject is rendered as a marker and its
    block is cut out; if the block's end cannot be told, it stays and `injects_system` holds its text. Text that the
    template prints with every system message too (Llama 3's dates) is layout and stays, with the date frozen.
    A template that refuses or drops system messages gets the system text, an empty line, and the first user text
    as its first user message (`folds_system`).

    Without a chat template replies end at `stop_strings`; a trailing one is kept in the ids, left out of the text, and
    not repeated by the glue.

    `vocabulary` is the number of ids that the model knows, which may be more than the tokenizer's; an answer with a
    higher one is refused.

    Raises ValueError where the template cannot print text contents or refuses the order of roles.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        chat_template: str | None = None,
        extra_stop_ids: Sequence[int] = (),
        vocabulary: int | None = None,
    ) -> None:
        self.tokenizer, self.vocabulary = tokenizer, vocabulary
        self.stop_strings: tuple[str, ...] = ()
        if chat_template is None and tokenizer.chat_template:
            chat_template = tokenizer.get_chat_template()
        if chat_template is None:
            chat_template = ("{{ bos_token }}" if self._adds_bos() else "") + PLAIN_TEMPLATE
            self.stop_strings = (PLAIN_STOP,)
        self._source = _freeze_dates(chat_template)

        added = sorted(tokenizer.added_tokens_decoder.values(), key=lambda token: -len(token.content))
        special = [token for token in added if token.special and token.content]
        # A token matched after normalisation may be written in another case by a content.
        literals = [f"(?i:{re.escape(t.content)})" if t.normalized else re.escape(t.content) for t in special]
        self._lookalike = re.compile("|".join([*literals, _GUARD]))
        # Tokens with lstrip or rstrip swallow the white space beside them, looked at from its start alone.
        edges = [r"(?<!\s)\s*" * t.lstrip + literal + r"\s*" * t.rstrip for t, literal in zip(special, literals)]
        self._special = re.compile("|".join(edges) or r"(?!)")

        self.folds_system = False
        self.injects_system: str | None = None
        self._cut: tuple[str, str] | None = None
        self._end, user_header = self._probe_turn([t.content for t in added if t.content])
        self._probe_system(user_header)

        end_id = cast("dict[str, int]", tokenizer.added_tokens_encoder).get(self._end)
        stops = (cast("int | None", tokenizer.eos_token_id), end_id, *extra_stop_ids)
        self.stop_ids: tuple[int, ...] = tuple(dict.fromkeys(int(i) for i in stops if i is not None))
        # A token that swallows the white space after it would change the text it is put before.
        anchors = sorted((t.content for t in special if not t.rstrip), key=lambda text: text != self._end)
        self._anchor = next((text for text in anchors if len(self._ids(text)) == 1), "")
        self._newline = self._ids("\n")
        self._marks_start = self._ids("\na")[len(self._newline) :] != self._ids("a")

    # ---- the protocol

    def start(self, messages: Sequence[Message]) -> tuple[int, ...]:
        _check_start(messages)
        return tuple(self._encode(self._render(self._guard(messages))))

    def grow(self, messages: Sequence[Message], ids: Sequence[int]) -> Grown:
        _check_growth(messages)
        glue = self._glue(self._guard(messages))
        if glue is None:
            return Grown(self.start(messages), broke=True)
        return Grown((*ids, *self._encode_glue(glue, ids)), broke=False)

    def decode(self, output_ids: Sequence[int]) -> str:
        text = self.read(output_ids)
        return text[: self._stop_at(text)]

    def reply(self, text: str) -> tuple[int, ...]:
        """The ids a role should sample to say `text`, and the token that ends a turn (the template's own, else eos)."""
        lead = "" if text[:1].isspace() else self._lead
        end = cast("dict[str, int]", self.tokenizer.added_tokens_encoder).get(self._end, self.tokenizer.eos_token_id)
        return (*self._plain_ids(lead + text, first=False), *(() if end is None else (cast(int, end),)))

    def read(self, output_ids: Sequence[int]) -> str:
        """As `decode`, with a stop string left in the text: what an engine looks through while it samples."""
        ids = list(output_ids)
        while ids and ids[-1] in self.stop_ids:
            ids.pop()
        return self._text(ids)

    # ---- growth

    def _glue(self, messages: Sequence[Message]) -> str | None:
        """Text from the end of the reply on, or None if the list no longer prints what was printed before."""
        *earlier, reply, new = messages
        head = self._render(earlier)
        whole = self._render(messages)
        marked = self._render([*earlier, Message("assistant", _REPLY), new])
        if not (whole.startswith(head) and marked.startswith(head)):
            return None
        _, found, glue = marked[len(head) :].partition(_REPLY)
        body = whole[len(head) :]
        if not found or not body.endswith(glue):
            return None
        shown = body[: len(body) - len(glue)]
        # White space around the reply may be trimmed or added by the template: the sampled ids stand for it.
        return glue if shown.strip() == reply.content.strip() else None

    def _encode_glue(self, glue: str, ids: Sequence[int]) -> list[int]:
        """Ids of the glue after `ids`, less the end of turn that was sampled already."""
        close = glue.lstrip()
        if ids and ids[-1] in self.stop_ids:
            if self._end and close.startswith(self._end):
                return self._encode(close)[1:]
        elif self.stop_strings:
            tail = self._text(list(ids[-_TAIL:]))
            if self._stop_at(tail) < len(tail):
                glue = glue[glue.index(PLAIN_STOP) + len(PLAIN_STOP) :]
        return self._encode_after(glue)

    def _stop_at(self, text: str) -> int:
        """Where a trailing stop string begins in `text`, else its length."""
        for stop in self.stop_strings:
            at = text.rfind(stop)
            # The token that completed the stop string may carry white space beyond it.
            if at >= 0 and not text[at + len(stop) :].strip():
                return at
        return len(text)

    # ---- rendering

    def _render(self, messages: Sequence[Message]) -> str:
        """The text of a list with generation prompt, under the system rules of the class."""
        if messages[0].role != "system":
            if self._cut is None:
                return self._template(messages)
            block, prefix = self._cut
            text = self._template([Message("system", _SYSTEM), *messages])
            if not text.startswith(block):
                raise ValueError("the chat template moves its default system prompt; give the role a system prompt")
            return prefix + text[len(block) :]
        if not self.folds_system:
            return self._template(messages)
        system, *rest = messages
        if not rest or rest[0].role != "user":
            raise ValueError("this chat template has no system messages; a user message must follow the system message")
        text = f"{system.content}\n\n{rest[0].content}" if system.content else rest[0].content
        return self._template([Message("user", text), *rest[1:]])

    def _template(self, messages: Sequence[Message]) -> str:
        from jinja2 import TemplateError

        chat = [{"role": m.role, "content": m.content} for m in messages]
        try:
            text = self.tokenizer.apply_chat_template(
                chat, chat_template=self._source, tokenize=False, add_generation_prompt=True
            )
        except TemplateError as error:
            roles = ", ".join(m.role for m in messages)
            raise ValueError(
                f"the chat template refuses the messages ({roles}): {error}; write a list it accepts, usually one "
                "system message and then user and assistant in turn, or pass another chat_template"
            ) from error
        return cast(str, text)

    def _guard(self, messages: Sequence[Message]) -> list[Message]:
        """Hide the text of special tokens in contents from the template and the tokenizer, until `_encode`."""

        def hide(match: re.Match[str]) -> str:
            return f"{_GUARD}{match[0].encode().hex()}{_GUARD}"

        return [Message(m.role, self._lookalike.sub(hide, m.content)) for m in messages]

    # ---- encoding

    def _encode(self, guarded: str) -> list[int]:
        if _GUARD not in guarded:
            return self._ids(guarded)
        # Special tokens that are still readable are the template's own. Runs between them that hold no guard stay
        # in one text with them.
        ids: list[int] = []
        clean, at = "", 0
        for match in [*self._special.finditer(guarded), None]:
            begin, end = match.span() if match else (len(guarded), len(guarded))
            run = guarded[at:begin]
            if _GUARD in run:
                plain = _GUARDED.sub(lambda found: bytes.fromhex(found[1]).decode(), run)
                ids += self._ids(clean)
                ids += self._plain_ids(plain, first=not ids)
                clean = guarded[begin:end]
            else:
                clean += guarded[at:end]
            at = end
        return ids + self._ids(clean)

    def _encode_after(self, guarded: str) -> list[int]:
        """Ids of a text in the middle of a chat."""
        if not self._anchor or self._special.match(guarded):
            return self._encode(guarded)
        return self._encode(self._anchor + guarded)[1:]

    def _plain_ids(self, text: str, first: bool) -> list[int]:
        """Ids of a text whose special tokens are only text; `first` when nothing stands before it."""
        if self._marks_start and not first:
            ids = self._ids("\n" + text, split=True)
            if ids[: len(self._newline)] == self._newline:
                return ids[len(self._newline) :]
        return self._ids(text, split=True)

    def _ids(self, text: str, split: bool = False) -> list[int]:
        found = self.tokenizer(text, add_special_tokens=False, split_special_tokens=split, verbose=False)
        return cast(list[int], found["input_ids"])

    def _text(self, ids: list[int]) -> str:
        return cast(str, self.tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False))

    # ---- what the template does, asked once

    def _adds_bos(self) -> bool:
        bos = self.tokenizer.bos_token_id
        return bos is not None and cast(list[int], self.tokenizer("a")["input_ids"])[:1] == [bos]

    def _probe_turn(self, added: list[str]) -> tuple[str, str]:
        """The token that ends an assistant message ("" if none does), and the header of a user message."""
        text = self._template([Message("user", _USER), Message("assistant", _REPLY), Message("user", _NEXT)])
        for role, mark in (("user", _USER), ("assistant", _REPLY), ("user", _NEXT)):
            if mark not in text:
                raise ValueError(
                    f"the chat template does not print the text of every {role} message; "
                    "pass a chat_template that takes contents as plain text"
                )
        glue = text.partition(_REPLY)[2].partition(_NEXT)[0].lstrip()
        # Space that the template puts between its header and a reply is the reply's first sampled character.
        lead = text.removeprefix(self._template([Message("user", _USER)])).partition(_REPLY)[0]
        self._lead = lead if lead.isspace() else ""
        end = next((token for token in added if glue.startswith(token)), "")
        if end == self.tokenizer.bos_token != self.tokenizer.eos_token:
            end = ""
        return end, glue[len(end) :].lstrip()

    def _probe_system(self, user_header: str) -> None:
        """Find out whether system messages work, and whether a default one is injected and can be cut."""
        bos = str(self.tokenizer.bos_token or "")
        bare = self._template([Message("user", _USER)]).partition(_USER)[0]
        try:
            asked = self._template([Message("system", _SYSTEM), Message("user", _USER)])
        except ValueError:
            asked = ""
        before, found, after = asked.partition(_SYSTEM)
        self.folds_system = not found
        if self.folds_system:
            before, after = bos, user_header
        after = after.partition(_USER)[0]
        # Without a default, all that precedes the first user text also begins or ends what surrounds a system text.
        first = _common(bare, before)
        last = _common(bare[::-1], after[::-1])
        if first + last >= len(bare):
            return
        if found and user_header and after.endswith(user_header):
            # In some vocabularies bos is also the token that opens each message.
            prefix = bos if bos and before.startswith(bos) and not user_header.startswith(bos) else ""
            self._cut = (before + _SYSTEM + after.removesuffix(user_header), prefix)
        else:
            self.injects_system = bare[first : len(bare) - last].strip()


def _freeze_dates(template: str) -> str:
    """Replace the clock of a template by one fixed day."""
    call = r"strftime_now\(\s*(['\"])(.*?)\1\s*\)"
    return re.sub(call, lambda match: repr(_TODAY.strftime(match[2])), template)


def _common(a: str, b: str) -> int:
    """Length of the longest common prefix."""
    return next((i for i, (x, y) in enumerate(zip(a, b)) if x != y), min(len(a), len(b)))


def _check_start(messages: Sequence[Message]) -> None:
    if not messages or messages[-1].role != "user":
        roles = ", ".join(message.role for message in messages) or "nothing"
        raise ValueError(f"start() got the roles ({roles}); give it a list that ends in a user message")


def _check_growth(messages: Sequence[Message]) -> None:
    if len(messages) < 3 or [m.role for m in messages[-2:]] != ["assistant", "user"]:
        roles = ", ".join(message.role for message in messages) or "nothing"
        raise ValueError(
            f"grow() got the roles ({roles}); give it a list that ends in the role's own assistant message and a new "
            "user message"
        )
