"""The command line: thin, and everything heavy is imported by the command that needs it.

Exit codes: 0 done, 1 a run that failed, 2 a recipe or command line that cannot run, 130 interrupted.
"""

from __future__ import annotations

import errno
import os
import signal
import sys
import warnings
from pathlib import Path
from typing import Annotated

import typer

from cothink import cli_use
from cothink.report.markup import visible

# Plain help: drawing boxes would cost a quarter of the time --help may take.
app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    help="Train, measure and serve teams of language-model agents that reason together.",
)

INTERRUPTED = 130

RecipeFile = Annotated[str, typer.Argument(metavar="RECIPE", help="A recipe file (YAML).")]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(metavar="[OVERRIDES]...", help="Such as stages.1.steps=5; ~stages.1.kl_stop removes a key."),
]
RunFolder = Annotated[Path, typer.Argument(metavar="RUN", help="A run folder.")]


@app.command()
def run(
    recipe: RecipeFile,
    overrides: Overrides = None,
    out: Annotated[Path | None, typer.Option(help="The run folder; an unfinished run there is resumed.")] = None,
) -> None:
    """Run a recipe, or resume it."""
    from cothink import rules
    from cothink.recipe import Recipe

    loaded = Recipe.load(recipe, overrides or ())
    leads = os.environ.get("RANK", "0") == "0"  # of several processes, one speaks
    for warning in rules.findings(loaded).warnings if leads else ():
        typer.echo(f"warning {warning}", err=True)
    from rich.console import Console

    from cothink import api

    done = api.run(loaded, out=out, console=Console())
    if leads:
        typer.echo(f"done: {done.folder}")


@app.command()
def check(
    recipe: RecipeFile,
    overrides: Overrides = None,
    memory: Annotated[str | None, typer.Option(metavar="SIZE", help="Does it fit a GPU of 80GB, say?")] = None,
    processes: Annotated[int, typer.Option(min=1, help="Of one run, with a GPU of that memory each.")] = 1,
) -> None:
    """Say in words what a recipe would do and what memory it takes, without loading a model."""
    from cothink import fit, preview
    from cothink.recipe import Recipe

    try:
        device = None if memory is None else fit.Device(fit.size(memory), processes=processes)
    except ValueError as error:
        raise typer.BadParameter(f"--memory {error}") from None
    if device is None and processes > 1:
        raise typer.BadParameter("--processes says how many a memory is for: write --memory 80GB beside it")
    for line in preview.lines(Recipe.load(recipe, overrides or ()), device):
        typer.echo(visible(line))
    typer.echo("ok")


@app.command()
def evaluate(
    targets: Annotated[
        list[str],
        typer.Argument(metavar="TARGET...", help="A run folder, a recipe, a model, openai:MODEL@URL; or NAME=TARGET."),
    ],
    suite: Annotated[list[str] | None, typer.Option(help="Sets of questions, such as math500; repeatable.")] = None,
    on: Annotated[str | None, typer.Option(help="Or a set of the first recipe; default: test.")] = None,
    k: Annotated[int, typer.Option("--k", min=1, help="Plays of each question: pass@k and maj@k.")] = 1,
    limit: Annotated[int | None, typer.Option(min=1, help="How many questions of each set.")] = None,
    temperature: Annotated[float | None, typer.Option(min=0, help="Of every role, instead of its own.")] = None,
    seed: Annotated[int | None, typer.Option(help="Default: that of each recipe.")] = None,
    equal_cost: Annotated[
        str | None, typer.Option(metavar="TARGET", help="A single model: gets the votes that a team's tokens buy.")
    ] = None,
    cost: Annotated[str, typer.Option(help="Tokens that an equal cost counts: generated, or all.")] = "generated",
    max_tokens: Annotated[int | None, typer.Option(min=1, help="Of a plain model's answer; default 1024.")] = None,
    diagnose: Annotated[
        bool, typer.Option("--diagnose", help="Who in each team helps: plays all again without each role.")
    ] = False,
    changes: Annotated[list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Changes recipes.")] = None,
    out: Annotated[Path | None, typer.Option(help="A folder for answers and results; what is there goes on.")] = None,
) -> None:
    """Measure teams and models, on the same questions and against one another."""
    from rich.console import Console

    from cothink import api

    if cost not in ("generated", "all"):
        raise typer.BadParameter(f"--cost {cost}: write generated or all")
    results = api.compare(
        targets, suite=suite, on=on, k=k, limit=limit, temperature=temperature, seed=seed, equal_cost=equal_cost,
        cost=cost, max_tokens=max_tokens, diagnose=diagnose, overrides=changes or (), out=out,
        console=Console(),
    )  # fmt: skip
    if len(results["systems"]) > 1 or len(results["sets"]) > 1 or k > 1 or diagnose:
        from cothink.stages.reports import markdown

        typer.echo("\n" + markdown(results))
    if out is not None:
        typer.echo(f"written: {out}/results.json, results.md, results.csv and the answers of each system")


for use in (cli_use.solve, cli_use.chat, cli_use.serve, cli_use.export):
    app.command()(use)


@app.command()
def show(
    folder: Annotated[Path, typer.Argument(metavar="STORE_OR_RUN", help="A run folder, or one of its trees/ folders.")],
    task: Annotated[str | None, typer.Option(metavar="ID", help="Every turn of one task; default: a list.")] = None,
    theta: Annotated[str, typer.Option(help="A turn is good above this value.")] = "0.5",
    own: Annotated[bool, typer.Option("--own", help="Judge turns by their own answers, not by what follows.")] = False,
    limit: Annotated[int, typer.Option(min=1, help="How many tasks are listed.")] = 20,
) -> None:
    """Print collected trees with values, labels and answers, or stored episodes."""
    from cothink import show as showing

    for line in showing.lines(folder, task, theta=theta, limit=limit, own=own):
        typer.echo(visible(line))


@app.command()
def models(
    action: Annotated[str, typer.Argument(metavar="[list|fetch]")] = "list",
    name: Annotated[str | None, typer.Argument(metavar="[NAME]", help="With fetch: which model.")] = None,
) -> None:
    """List the models a recipe can name, or fetch one."""
    from cothink import models as known

    if action == "fetch" and name:
        typer.echo(known.fetch(name))
    elif action == "list" and name is None:
        for model in known.available():
            typer.echo(f"{model.name:18} {model.what}{'' if model.ready else ' (not here yet)'}  {model.note}".rstrip())
    else:
        raise typer.BadParameter("write `cothink models`, or `cothink models fetch NAME`")


@app.command()
def new(
    kind: Annotated[
        str, typer.Argument(metavar="KIND", help="workflow, reward, estimator, loss, tasks, conversations or engine.")
    ],
    name: Annotated[str, typer.Argument(metavar="NAME", help="The new module, in the current folder.")],
) -> None:
    """Write a skeleton of your own part, with the test that it keeps the rules."""
    from cothink import scaffold

    try:
        made = scaffold.new(kind, name, Path.cwd())
    except (ValueError, FileExistsError) as error:
        raise typer.BadParameter(str(error)) from None
    for path in made.files:
        typer.echo(f"wrote {path.name}")
    typer.echo(f"in a recipe: {made.usage}\ntest it:     python -m pytest {made.files[-1].name}")


@app.command()
def split(
    source: Annotated[Path, typer.Argument(metavar="SOURCE", help="Worked solutions: a file with a row for each.")],
    out: Annotated[Path, typer.Argument(metavar="OUT", help="A folder; an unfinished split there goes on.")],
    teacher: Annotated[str, typer.Option(metavar="MODEL@URL", help="A model behind an OpenAI-compatible server.")],
    question: Annotated[str | None, typer.Option(help="The column that holds the question.")] = None,
    solution: Annotated[str | None, typer.Option(help="The column that holds the worked solution.")] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="How many rows.")] = None,
    max_tokens: Annotated[int, typer.Option(min=1, help="Tokens of one copy at most.")] = 8192,
    concurrency: Annotated[int, typer.Option(min=1, help="Calls at once.")] = 8,
) -> None:
    """Cut worked solutions into dialogues of a thinking and a working role, for an sft stage."""
    import asyncio

    from rich.console import Console

    from cothink import splitter
    from cothink.engines import openai
    from cothink.tasks import DataError

    try:
        work = splitter.items(source, question, solution, limit)
        engine = openai.engine(teacher, timeout=600.0)
    except (DataError, ValueError) as error:
        raise typer.BadParameter(str(error)) from None
    from cothink.stages.progress import bar

    with bar(Console(), "split", len(work)) as progress:
        making = splitter.split(work, out, engine, teacher=teacher, max_tokens=max_tokens, concurrency=concurrency,
                                progress=progress)  # fmt: skip
        report = asyncio.run(making)
    for line in splitter.sentences(report):
        typer.echo(line)
    typer.echo(f"in a recipe: data: {{name: dialogues, path: {out}}}")


@app.command()
def plot(
    run: RunFolder,
    metrics: Annotated[list[str], typer.Argument(metavar="METRIC...", help="Names or patterns: 'action/*/level'.")],
    out: Annotated[Path, typer.Option(help="The SVG file.")] = Path("plot.svg"),
) -> None:
    """Draw metrics of a run over its steps."""
    from cothink import plots

    out.write_text(plots.of_run(run, metrics), encoding="utf-8")
    typer.echo(f"wrote {out}")


@app.command()
def report(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN...", help="Run folders, or folders of cothink evaluate.")],
    out: Annotated[Path, typer.Option(help="The HTML file.")] = Path("report.html"),
    svg: Annotated[Path | None, typer.Option(metavar="FOLDER", help="Write the curves as SVG files as well.")] = None,
    episodes: Annotated[int, typer.Option(min=0, help="Sample episodes of each run.")] = 8,
) -> None:
    """Write one HTML page about runs: what was run, curves, evaluations, warnings, episodes."""
    from cothink import api

    path, plots = api.report(runs, out=out, svg=svg, episodes=episodes)
    size = f"{path.stat().st_size / 1000:,.0f} kB"
    typer.echo(f"wrote {path} ({size})" + (f" and {len(plots)} plots in {svg}" if plots else ""))


@app.command()
def view(
    folder: Annotated[Path, typer.Argument(metavar="[FOLDER]", help="The folder that holds your runs.")] = Path("runs"),
    port: Annotated[int, typer.Option(min=0, max=65535, help="0 takes a free one.")] = 8765,
) -> None:
    """Look at runs in a browser, while they train too: curves, episodes, two runs side by side. This machine only."""
    try:
        import uvicorn  # noqa: F401

        from cothink.report import app as viewer
    except ModuleNotFoundError as missing:
        raise typer.BadParameter(f"{missing}: the viewer needs pip install 'cothink[serve]'") from None
    from cothink.stages.comparing import evaluated

    viewer.serve(folder, evaluated, port, typer.echo)


@app.command()
def env() -> None:
    """Print what a bug report needs: versions and hardware."""
    import os
    import platform
    from importlib.metadata import PackageNotFoundError, version

    from cothink import __version__

    typer.echo(f"cothink {__version__}\npython {platform.python_version()}\nplatform {platform.platform()}")
    for package in ("torch", "transformers", "peft", "trl", "accelerate", "vllm", "pydantic", "math-verify"):
        try:
            typer.echo(f"{package} {version(package)}")
        except PackageNotFoundError:
            typer.echo(f"{package} not installed")
    typer.echo(f"cpus {os.cpu_count()}")
    import torch

    devices = [torch.cuda.get_device_name(k) for k in range(torch.cuda.device_count())]
    typer.echo(f"gpus {', '.join(devices) or 'none'}")


@app.command()
def verify(
    gold: Annotated[str | None, typer.Option(help="The right answer.")] = None,
    text: Annotated[str | None, typer.Option(help="The text to grade.")] = None,
    kind: Annotated[str, typer.Option(help="math, number, letter, text, verdict, or auto: number or math.")] = "auto",
    file: Annotated[Path | None, typer.Option(help="JSON lines {kind, gold, text}.")] = None,
    out: Annotated[Path | None, typer.Option(help="Where the verdicts go, one line for each row.")] = None,
) -> None:
    """Grade an answer (--gold and --text), or a file of them (--file and --out)."""
    from cothink import verify as grading

    one, many = (gold is not None, text is not None), (file is not None, out is not None)
    if all(one) and not any(many):
        import dataclasses
        import json

        typer.echo(json.dumps(dataclasses.asdict(grading.grade(kind, str(gold), str(text)))))
    elif all(many) and not any(one):
        if not Path(str(file)).is_file():
            raise typer.BadParameter(f"--file {file}: no such file")
        counts = grading.grade_file(str(file), str(out))
        typer.echo(", ".join(f"{count} {verdict}" for verdict, count in counts.items()))
    else:
        raise typer.BadParameter("write --gold G --text T, or --file IN.jsonl --out OUT.jsonl")


def main(arguments: list[str] | None = None) -> None:
    """The console script: runs a command and turns what went wrong into an exit code."""
    # A script's background jobs begin with SIGINT ignored, and with it everything below would be.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    # A scheduler's "stop now" ends a run as Ctrl-C does: with a checkpoint of the last finished step.
    signal.signal(signal.SIGTERM, lambda *_: signal.raise_signal(signal.SIGINT))
    # Libraries that warn one another about their own future say nothing to the person who runs a recipe.
    warnings.filterwarnings("ignore", category=FutureWarning, module=r"(transformers|peft|torch)\.")
    try:
        code = app(arguments, standalone_mode=False) or 0
    except KeyboardInterrupt:
        _leave(INTERRUPTED, _interrupted())
    except Exception as error:
        _leave(*_outcome(error))
    else:
        code = code if isinstance(code, int) else 0
        _leave(code, _interrupted() if code == INTERRUPTED else "")  # some versions of typer catch Ctrl-C themselves


def _interrupted() -> str:
    """What an interrupted process says; one of several was perhaps told to stop because another one is gone."""
    if os.environ.get("WORLD_SIZE", "1") == "1":
        return "interrupted"
    return f"process {os.environ.get('RANK')} interrupted: by you, or by the launcher because another process has ended"


def _outcome(error: Exception) -> tuple[int, str]:
    """Exit code and message of an error; unexpected ones show where they happened."""
    import traceback

    if isinstance(error, typer.Abort):  # what click makes of Ctrl-C
        return INTERRUPTED, _interrupted()
    show, code = getattr(error, "show", None), getattr(error, "exit_code", None)
    if callable(show) and isinstance(code, int):  # click's own errors, whichever click typer carries
        show()
        return code, ""
    from cothink.resolve import RecipeError

    if isinstance(error, RecipeError):
        return 2, f"recipe error\n{error}" if os.environ.get("RANK", "0") == "0" else ""  # all of them read it
    if type(error).__module__.startswith("cothink."):  # our own errors say what to do; where they arose does not help
        return 1, f"error: {error}"
    storage = _storage(error)
    if storage:
        return 1, f"error: {storage}"
    return 1, "".join(traceback.format_exception(error)).rstrip()


def _storage(error: BaseException) -> str:
    """What a disk that is full, read-only or forbidden has to say; empty for any other error."""
    codes = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EACCES, errno.EPERM, errno.EIO)
    code = error.errno if isinstance(error, OSError) else None
    if code is None:  # libraries written in Rust wrap the system's error in one of their own: "... (os error 28)"
        code = next((c for c in codes if f"(os error {c})" in str(error)), None)
    if code not in codes:
        return ""
    where = f" {error.filename}" if isinstance(error, OSError) and error.filename else " to disk"
    cure = "free some space" if code in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG) else "name another folder with --out"
    again = "What was saved is whole: the same command goes on from the last checkpoint"
    return f"cannot write{where}: {os.strerror(code)}; {cure}. {again}"


def _leave(code: int, message: str) -> None:
    if message:
        print(visible(message), file=sys.stderr)
    raise SystemExit(code)


if __name__ == "__main__":
    main()
