"""Names to functions, and options to keyword parameters: a function's signature is its configuration schema."""

from __future__ import annotations

import ast
import difflib
import functools
import importlib
import inspect
import os
import re
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

PACKAGE = Path(__file__).parent


class Kind(NamedTuple):
    """Where the functions of one kind live and how they are recognised without importing them.

    `function` is the fixed name inside a folder's modules (None: every fitting public function counts, named
    `module.function`); `first` are the leading positional parameters such a function has, `returns` the beginning of
    its return annotation.
    """

    place: str
    function: str | None
    first: tuple[str, ...]
    returns: str = ""


KINDS: Mapping[str, Kind] = {
    "workflow": Kind("workflows", "run", ("task", "team")),
    "tasks": Kind("tasks", "load", ()),
    "conversations": Kind("conversations", "load", ("roles",)),
    "reward": Kind("rewards", None, ("task", "turn", "episode")),
    "engine": Kind("engines", "engine", ("policies",)),
    "estimator": Kind("estimators.py", None, ("scored",), "list"),
    "loss": Kind("losses.py", None, ("logprobs", "batch")),
}


@dataclass(frozen=True)
class Problem:
    """One thing wrong with a recipe: the dotted place, what is wrong, the nearest valid name, what to write instead."""

    where: str
    what: str
    write: str = ""
    nearest: str | None = None
    code: str = ""

    def __str__(self) -> str:
        what = short(self.what, 1_000)
        text = f"{short(self.where, 300)}: {what}" if self.where else what
        text += f" [{self.code}]" if self.code else ""
        text += f"; did you mean {self.nearest!r}?" if self.nearest else ""
        return text + (f"\n    write: {self.write}" if self.write else "")


def short(text: str, most: int) -> str:
    """A text of at most so many characters, for messages that quote what somebody wrote."""
    return text if len(text) <= most else f"{text[:most]}... ({len(text):,} characters)"


class RecipeError(ValueError):
    """A recipe that cannot run, found before any model loads; `problems` lists everything that is wrong."""

    def __init__(self, *problems: Problem) -> None:
        super().__init__("\n".join(map(str, problems)))
        self.problems = problems


def nearest(name: object, valid: Iterable[object]) -> str | None:
    """The valid name closest to `name`, None when nothing is close."""
    by_text = {str(v): v for v in valid}
    found = difflib.get_close_matches(str(name), by_text, n=1, cutoff=0.5)
    return found[0] if found else None


def listing(names: Iterable[object]) -> str:
    """Valid names in words, for the end of a message."""
    return ", ".join(map(str, names)) or "none"


def unknown(where: str, what: str, name: object, valid: Iterable[object]) -> Problem:
    """The problem of a name that is not among the valid ones."""
    valid = list(valid)
    return Problem(where, f"unknown {what} {str(name)!r}", f"one of: {listing(valid)}", nearest(name, valid), "E01")


def resolve(kind: str, name: str, where: str = "") -> Callable[..., Any]:
    """The function that `name` stands for: a file or function of the package, or the user's own `module:function`."""
    where = where or kind
    spec = KINDS[kind]
    if ":" in name:
        return _user_function(kind, name, where)
    module, _, function = name.rpartition(".") if spec.function is None else (name, "", spec.function)
    if name not in names(kind):
        raise RecipeError(_unknown_name(kind, name, where))
    stem = spec.place.removesuffix(".py")
    path = f"cothink.{stem}" if spec.place.endswith(".py") else f"cothink.{stem}.{module}"
    return getattr(importlib.import_module(path), function)


def _unknown_name(kind: str, name: str, where: str) -> Problem:
    valid = names(kind)
    own = f"your own code as my_module:{KINDS[kind].function or 'function'}"
    return Problem(
        where, f"unknown {kind} {name!r}", f"one of: {listing(valid)}; or {own}", nearest(name, valid), "E01"
    )


def _user_function(kind: str, name: str, where: str) -> Callable[..., Any]:
    module_name, _, attribute = name.partition(":")
    if os.getcwd() not in sys.path and "" not in sys.path:
        sys.path.insert(0, os.getcwd())  # a console script, unlike `python -m`, does not look in the current folder
    try:
        found: Any = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not (module_name + ".").startswith(error.name + "."):
            raise  # the module is there; something it imports is not
        fix = f"a module that Python can import from here: {module_name}.py in {os.getcwd()}, or an installed package"
        raise RecipeError(Problem(where, f"no module {module_name!r} for {kind} {name!r}", fix, code="E01")) from error
    for part in attribute.split("."):
        if not hasattr(found, part):
            valid = [n for n, v in vars(found).items() if callable(v) and not n.startswith("_")]
            what = f"{module_name} has no {attribute!r}"
            close = nearest(part, valid)
            raise RecipeError(Problem(where, what, f"{module_name}:FUNCTION, one of: {listing(valid)}", close, "E01"))
        found = getattr(found, part)
    if not callable(found):
        raise RecipeError(Problem(where, f"{name!r} is a {type(found).__name__}, not a function", code="E01"))
    return found


@functools.cache
def names(kind: str) -> tuple[str, ...]:
    """Every shipped name of a kind, found by reading the files; nothing is imported."""
    spec = KINDS[kind]
    place = PACKAGE / spec.place
    if spec.place.endswith(".py"):
        return tuple(sorted(_functions(place, spec)))
    found: list[str] = []
    for path in sorted(place.glob("*.py")):
        if not path.name.startswith("_"):
            inside = _functions(path, spec)
            found += [path.stem] if spec.function in inside else []
            found += [f"{path.stem}.{name}" for name in inside] if spec.function is None else []
    return tuple(found)


def _functions(path: Path, spec: Kind) -> list[str]:
    if not path.is_file():
        return []
    found: list[str] = []
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and not node.name.startswith("_"):
            leading = tuple(a.arg for a in node.args.posonlyargs + node.args.args)
            fits = leading[: len(spec.first)] == spec.first and node.name == (spec.function or node.name)
            if fits and (ast.unparse(node.returns) if node.returns else "").startswith(spec.returns):
                found.append(node.name)
    return found


def options_of(function: Callable[..., Any]) -> dict[str, inspect.Parameter]:
    """The keyword-only parameters of a function, and a task loader's `split`: its options."""
    parameters = inspect.signature(function).parameters.values()
    return {p.name: p for p in parameters if p.kind is inspect.Parameter.KEYWORD_ONLY or p.name == "split"}


def effective(function: Callable[..., Any], options: Mapping[str, Any]) -> dict[str, Any]:
    """All options of a function with the values it will see: given ones over defaults."""
    defaults = {n: p.default for n, p in options_of(function).items() if p.default is not inspect.Parameter.empty}
    return defaults | dict(options)


def bind(function: Callable[..., Any], options: Mapping[str, Any], where: str) -> Callable[..., Any]:
    """`function` with its options filled in, after names and types were checked against its signature.

    Values are converted as the annotations say (a YAML list for a tuple, 1 for a float).
    """
    problems: list[Problem] = []
    accepted = options_of(function)
    parameters = inspect.signature(function).parameters.values()
    open_ended = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters)
    positional = {p.name for p in parameters if p.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD}
    values: dict[str, Any] = {}
    for name, value in options.items():
        if name in accepted:
            try:
                values[name] = _converted(function, accepted[name], value)
            except TypeError as error:
                problems.append(_wrong_value(f"{where}.{name}", value, str(error)))
        elif open_ended:
            values[name] = value
        else:
            problems.append(_unknown_option(function, name, where, accepted, name in positional))
    for name, parameter in accepted.items():
        if parameter.default is inspect.Parameter.empty and name not in options:
            what = f"{title(function)} needs the option {name!r}"
            problems.append(Problem(where, what, f"{name}: VALUE  ({parameter.annotation})", code="E01"))
    if problems:
        raise RecipeError(*problems)
    return functools.partial(function, **values)


def title(function: Callable[..., Any]) -> str:
    """How a function is called in messages: `module.function` without the package's own prefix."""
    module = getattr(function, "__module__", "").removeprefix("cothink.")
    return f"{module}.{getattr(function, '__name__', type(function).__name__)}"


def _unknown_option(
    function: Callable[..., Any], name: str, where: str, accepted: Iterable[str], positional: bool
) -> Problem:
    accepted = list(accepted)
    if positional:
        what = f"{name!r} is no option of {title(function)}: it is a positional parameter"
        return Problem(f"{where}.{name}", what, f"def {function.__name__}(..., *, {name}) makes it one", code="E01")
    fix = f"one of: {listing(accepted)}" if accepted else f"nothing: {title(function)} takes no options"
    what = f"unknown option {name!r} of {title(function)}"
    return Problem(f"{where}.{name}", what, fix, nearest(name, accepted), "E01")


def _wrong_value(where: str, value: object, message: str) -> Problem:
    expected = re.findall(r"'([^']*)'", message) if "Input should be '" in message else []
    return Problem(where, f"{value!r} is not valid: {message}", "", nearest(value, expected), "E01")


@functools.cache
def _hints(function: Callable[..., Any]) -> Mapping[str, Any]:
    target = function.func if isinstance(function, functools.partial) else function
    names = getattr(target, "__globals__", {})
    found: dict[str, Any] = {}
    for name, text in getattr(target, "__annotations__", {}).items():
        try:
            found[name] = eval(text, names) if isinstance(text, str) else text  # what typing.get_type_hints does
        except NameError:
            continue  # a name imported for type checkers only: nothing to check against at run time
    return found


def _converted(function: Callable[..., Any], parameter: inspect.Parameter, value: Any) -> Any:
    hint = _hints(function).get(parameter.name)
    if hint is None:
        return value
    from pydantic import PydanticSchemaGenerationError, TypeAdapter, ValidationError

    if isinstance(value, bool) and hint in (int, float, str):
        raise TypeError(f"Input should be a {hint.__name__}, not true or false")
    try:
        return TypeAdapter(hint).validate_python(value)
    except PydanticSchemaGenerationError:
        return value  # a class of the author's own: nothing to check against
    except ValidationError as error:
        first = error.errors()[0]
        inside = ".".join(map(str, first["loc"]))
        raise TypeError(f"{inside + ': ' if inside else ''}{first['msg']}") from None
