"""The commands that use a team: solve, chat, serve, export; each imports what is heavy when it is called."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from cothink.answering import Wish
    from cothink.api import LoadedTeam

Target = Annotated[
    str, typer.Argument(metavar="TARGET", help="A run folder, a recipe, a model, openai:MODEL@URL; or NAME=TARGET.")
]
Votes = Annotated[int, typer.Option(min=1, help="Plays; the answer that most of them state wins.")]
MaxTurns = Annotated[int | None, typer.Option(min=1, help="Fewer turns than the recipe's, where its workflow counts.")]
Temperature = Annotated[float | None, typer.Option(min=0, help="Of every role, instead of its own.")]
MaxTokens = Annotated[int | None, typer.Option(min=1, help="Of any turn; a role's own limit stays if it is lower.")]
Seed = Annotated[int | None, typer.Option(help="Equal seeds give equal answers.")]
Changes = Annotated[list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Changes the recipe.")]
Json = Annotated[bool, typer.Option("--json", help="One JSON object for each answer, with everything that was said.")]


def solve(
    question: Annotated[str, typer.Argument(metavar="QUESTION", help="The question; - reads it from stdin.")],
    team: Annotated[str, typer.Option(metavar="TARGET", help="A run folder, a recipe, a model, openai:MODEL@URL.")],
    votes: Votes = 1,
    max_turns: MaxTurns = None,
    temperature: Temperature = None,
    max_tokens: MaxTokens = None,
    seed: Seed = None,
    json: Json = False,
    changes: Changes = None,
) -> None:
    """Let a team answer one question: you see it think on stderr, the answer comes on stdout."""
    from cothink import terminal

    text = sys.stdin.read() if question == "-" else question
    if not text.strip():
        raise typer.BadParameter("the question is empty")
    terminal.tolerant()
    talking = terminal.Talk(*_asked(team, votes, max_turns, temperature, max_tokens, seed, changes), json=json)
    from cothink.api import run_sync

    run_sync(talking.ask(text.strip()))


def chat(
    target: Target,
    votes: Votes = 1,
    max_turns: MaxTurns = None,
    temperature: Temperature = None,
    max_tokens: MaxTokens = None,
    seed: Seed = None,
    json: Json = False,
    changes: Changes = None,
) -> None:
    """Talk with a team: each line is a question, answered with what was said before. Reads a pipe, too."""
    from cothink import terminal

    terminal.tolerant()
    talking = terminal.Talk(*_asked(target, votes, max_turns, temperature, max_tokens, seed, changes), json=json)
    here = sys.stdin.isatty()
    if here:
        talking.screen.warn(f"{talking.team.name}: {terminal.HELP}")
    terminal.talk(talking, terminal.typed() if here else sys.stdin, forgiving=here)


def _asked(
    target: str,
    votes: int,
    max_turns: int | None,
    temperature: float | None,
    max_tokens: int | None,
    seed: int | None,
    changes: list[str] | None,
) -> tuple[LoadedTeam, Wish]:
    """The team of a target, and how it is to answer; a wish it cannot follow is an error before anything is asked."""
    from cothink import api
    from cothink.answering import Wish, WrongOption, fitted

    loaded = api.load_team(target, overrides=changes or ())
    wish = Wish(votes, max_turns, temperature, None, max_tokens, seed)
    try:
        fitted(loaded.session, wish)
    except WrongOption as error:
        option = error.option.replace("_", "-")
        raise typer.BadParameter(str(error).replace(error.option, f"--{option}", 1)) from None
    return loaded, wish


def serve(
    target: Target,
    host: Annotated[str, typer.Option(help="The address to listen on; this machine only, unless you name another.")] = (
        "127.0.0.1"
    ),
    port: Annotated[int, typer.Option(min=0, max=65535, help="0 takes a free one.")] = 8000,
    api_key_env: Annotated[
        str | None, typer.Option(metavar="VARIABLE", help="The environment variable that holds the API key.")
    ] = None,
    max_plays: Annotated[int, typer.Option(min=1, help="Plays at once; a request counts its votes. More: 429.")] = 256,
    timeout: Annotated[float, typer.Option(min=0.001, help="Seconds for one answer. Longer: 504.")] = 600.0,
    max_body: Annotated[int, typer.Option(min=1024, help="Bytes of one request. More: 413.")] = 1 << 20,
    grace: Annotated[float, typer.Option(min=0, help="Seconds that running answers get when it is stopped.")] = 30.0,
    changes: Changes = None,
) -> None:
    """Serve a team behind an OpenAI-compatible endpoint: /v1/chat/completions, /v1/models, /health, /metrics."""
    from cothink import serve as serving

    limits = serving.limits_of(plays=max_plays, seconds=timeout, body=max_body)
    key = serving.key_of(api_key_env)
    serving.serve(_loading(target, changes), host=host, port=port, key=key, limits=limits, grace=grace, say=_say)


def _loading(target: str, changes: list[str] | None) -> Callable[[], LoadedTeam]:
    def load() -> LoadedTeam:
        from cothink import api

        return api.load_team(target, overrides=changes or ())

    return load


def _say(line: str) -> None:
    typer.echo(line, err=True)


def export(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="A run folder.")],
    to: Annotated[Path, typer.Option(metavar="FOLDER", help="A new or empty folder.")],
    merge: Annotated[bool, typer.Option(help="Merge adapters into full weights.")] = False,
    rows: Annotated[bool, typer.Option(help="Also the training rows of its episodes, in TRL's and verl's shapes.")] = (
        False
    ),
    checkpoint: Annotated[str | None, typer.Option(metavar="NAME", help="Instead of the newest one.")] = None,
    push_to_hub: Annotated[
        str | None, typer.Option(metavar="OWNER/NAME", help="Upload the folder to the Hugging Face hub, privately.")
    ] = None,
) -> None:
    """Write a trained team as a folder that transformers, peft and vLLM load: weights, cards, prompts, recipe."""
    from cothink import export as exporting

    made = exporting.export(run, to, merge=merge, rows=rows, checkpoint=checkpoint)
    for line in made.lines:
        typer.echo(line)
    if push_to_hub is not None:
        typer.echo(f"uploaded: {exporting.push(to, push_to_hub)}")
