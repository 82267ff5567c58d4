"""A team's thinking in the terminal: who speaks, what, and the answer; no text of a model commands the terminal."""

from __future__ import annotations

import contextlib
import sys
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from cothink.report.markup import visible
from cothink.types import Message, PlayError, Turn

if TYPE_CHECKING:
    from cothink.answering import Answer, Wish
    from cothink.api import LoadedTeam

COLOURS = ("cyan", "magenta", "yellow", "blue", "red")
"""Of the roles, in recipe order."""
ANSWER = "green"
HELP = "/new forgets the conversation, /quit (or Ctrl-D) leaves, Ctrl-C stops an answer"


def tolerant() -> None:
    """What the terminal's encoding cannot write is written as an escape instead of failing."""
    for stream in (sys.stdout, sys.stderr):
        reconfigure = getattr(stream, "reconfigure", None)
        if reconfigure is not None:
            reconfigure(errors="backslashreplace")


class Screen:
    """Shows turns as they are spoken, on stderr: coloured where that is a terminal, plain lines where it is piped."""

    def __init__(self, roles: Sequence[str], plays: int = 1):
        from rich.console import Console

        self._console = Console(stderr=True, highlight=False)
        self._colours = {role: COLOURS[k % len(COLOURS)] for k, role in enumerate(roles)}
        self._plays = plays
        self._status: Any = None
        self._began = time.perf_counter()

    @contextlib.contextmanager
    def thinking(self) -> Iterator[Screen]:
        """While the team works: a line at the bottom of a terminal says who is asked."""
        self._began = time.perf_counter()
        if not self._console.is_terminal:
            yield self
            return
        with self._console.status("") as self._status:
            yield self
        self._status = None

    def asks(self, play: int, role: str) -> None:
        """Somebody is about to speak."""
        if self._status is not None:
            self._status.update(f"[dim]{visible(role)} is thinking ...")

    def said(self, play: int, turn: Turn) -> None:
        """A turn of the inner conversation."""
        self._line(self._name(play, turn.role), turn.text, self._colours.get(turn.role, "white"))

    def answered(self, found: Answer) -> None:
        """The final message, marked as such, and what it took."""
        from cothink.answering import last_turn

        final = last_turn(found.episode)
        speaker = "the team" if final is None else self._name(found.chosen, final.role)
        self._line(f"{speaker} (answer)", found.text, ANSWER)
        for note in self._notes(found):
            self._print((note, "dim"))

    def warn(self, text: str) -> None:
        """A line that is not part of the conversation."""
        self._print((visible(text), "yellow"))

    def _notes(self, found: Answer) -> Iterator[str]:
        turns = sum(len(play.turns) for play in found.plays)
        seconds = time.perf_counter() - self._began
        yield f"{_count(turns, 'turn')}, {_count(found.usage.generated, 'token')}, {seconds:.1f} s"
        if self._plays > 1:
            votes = Counter("no answer" if a is None else visible(a) for a in found.answers)
            failed = f"; {found.late} failed" if found.late else ""
            yield "votes: " + ", ".join(f"{answer} x {n}" for answer, n in votes.most_common()) + failed
        if not found.whole:
            yield f"not finished: {found.episode.finish.reason}, or its last message was cut by max_tokens"

    def _name(self, play: int, role: str) -> str:
        return f"{visible(role)} {play + 1}/{self._plays}" if self._plays > 1 else visible(role)

    def _line(self, name: str, text: str, colour: str) -> None:
        style = "bold green" if colour == ANSWER else f"bold {colour}"
        self._print((f"{name}: ", style), (visible(text), "bold" if colour == ANSWER else ""))

    def _print(self, *parts: tuple[str, str]) -> None:
        from rich.text import Text

        self._console.print(Text.assemble(*parts), soft_wrap=True)


def _count(number: int, thing: str) -> str:
    return f"{number:,} {thing}{'' if number == 1 else 's'}"


def show_answer(text: str) -> None:
    """The answer on stdout: alone where that is piped, marked where it is a terminal."""
    if sys.stdout.isatty():
        from rich.console import Console
        from rich.text import Text

        marked = Text.assemble(("answer: ", f"bold {ANSWER}"), (visible(text), "bold"))
        Console(highlight=False).print(marked, soft_wrap=True)
    else:
        print(visible(text), flush=True)


def as_json(question: str, found: Answer) -> dict[str, Any]:
    """An answer with everything that was said, as plain data."""
    usage = {"prompt": found.usage.prompt, "generated": found.usage.generated}
    stated = {"question": question, "answer": found.answer, "text": found.text, "whole": found.whole}
    return {**stated, "tokens": usage, **found.trace()}


class Talk:
    """A conversation with a team: each question is asked with what was said before."""

    def __init__(self, team: LoadedTeam, wish: Wish, *, json: bool = False):
        self.team, self.wish, self.json = team, wish, json
        self.screen = Screen(list(team.session.roles), wish.votes)
        self._said: list[Message] = []

    async def ask(self, text: str) -> Answer:
        """One answer, shown; a question that fails is not remembered."""
        from cothink.answering import checked, question_of

        try:
            checked(text)
        except ValueError as error:
            raise PlayError(str(error)) from None
        messages = [*self._said, Message("user", text)]
        if self.json:
            found = await self.team.answer(question_of(messages), self.wish)
        else:
            with self.screen.thinking() as ears:
                found = await self.team.answer(question_of(messages), self.wish, ears)
        self._said = [*messages, Message("assistant", found.text)]
        self._show(text, found)
        return found

    def forget(self) -> None:
        """The next question stands alone."""
        self._said = []

    def _show(self, text: str, found: Answer) -> None:
        if self.json:
            import json

            print(json.dumps(as_json(text, found)), flush=True)  # ASCII: no control code gets through
        else:
            self.screen.answered(found)
            show_answer(found.text if found.answer is None else found.answer)


def talk(talking: Talk, lines: Iterable[str], *, forgiving: bool) -> None:
    """Answers line after line until they end; a `forgiving` one goes on after Ctrl-C and after a failed answer.

    Raises PlayError and KeyboardInterrupt where it is not forgiving.
    """
    import asyncio

    with asyncio.Runner() as runner:  # one loop for all: connections to outside servers belong to theirs
        for line in lines:
            text = line.strip()
            if text == "/quit":
                return
            if text == "/new":
                talking.forget()
            elif text.startswith("/"):
                talking.screen.warn(f"there is no {text.split()[0]}: {HELP}")
            elif text:
                try:
                    runner.run(talking.ask(text))
                except KeyboardInterrupt:
                    if not forgiving:
                        raise
                    talking.screen.warn("stopped; the question is forgotten")
                except PlayError as error:
                    if not forgiving:
                        raise
                    talking.screen.warn(f"{error} (/new forgets the conversation so far)")


def typed() -> Iterator[str]:
    """Lines of the keyboard until Ctrl-D, with the arrow keys where Python has readline."""
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401
    while True:
        try:
            yield input("you: ")
        except EOFError:
            print()
            return
