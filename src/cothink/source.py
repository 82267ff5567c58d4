"""Recipe text to plain mappings: YAML as people expect it (1.2 scalars, no duplicate keys) and dotted overrides."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import yaml

from cothink.resolve import Problem, RecipeError, nearest

# YAML 1.1, which PyYAML speaks, reads `on` as true, `3e-4` as a string, `1:30` as 90 and `010` as 8.
SCALARS = {
    "tag:yaml.org,2002:bool": (r"true|True|TRUE|false|False|FALSE", "tTfF"),
    "tag:yaml.org,2002:null": (r"~|null|Null|NULL|", "~nN\0"),
    "tag:yaml.org,2002:int": (r"[-+]?[0-9]+(_[0-9]+)*", "-+0123456789"),
    "tag:yaml.org,2002:float": (
        r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)",
        "-+0123456789.",
    ),
}


class _Loader(yaml.SafeLoader):
    yaml_implicit_resolvers = {}  # noqa: RUF012 (PyYAML's own way to configure a loader)

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[str] = set()
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode):
                raise RecipeError(Problem(f"line {key.start_mark.line + 1}", "a key is a list or a mapping", "a word"))
            if key.value in seen:
                line = key.start_mark.line + 1
                raise RecipeError(Problem(f"line {line}", f"the key {key.value!r} is written twice", "it once"))
            seen.add(key.value)
        return super().construct_mapping(node, deep=deep)

    def construct_yaml_int(self, node: yaml.ScalarNode) -> int:
        return int(self.construct_scalar(node))


class _Dumper(yaml.SafeDumper):
    yaml_implicit_resolvers = {}  # noqa: RUF012

    def ignore_aliases(self, data: Any) -> bool:
        return True


for _class in (_Loader, _Dumper):
    for _tag, (_pattern, _first) in SCALARS.items():
        _class.add_implicit_resolver(_tag, re.compile(f"^(?:{_pattern})$"), ["" if c == "\0" else c for c in _first])
_Loader.add_constructor("tag:yaml.org,2002:int", _Loader.construct_yaml_int)
_Dumper.add_representer(tuple, lambda dumper, data: dumper.represent_list(data))


MOST = 100_000
"""Values of a recipe: anchors within anchors could ask for more than any memory holds."""
DEEP = 50
"""How deep values may lie within one another."""


def read(source: str | Path | Mapping[str, Any], overrides: Iterable[str] = ()) -> dict[str, Any]:
    """The mapping of a recipe file (or of a mapping), with the overrides applied."""
    if isinstance(source, Mapping):
        tree = _unshared(source, "")
    else:
        path = Path(source)
        if not path.is_file():
            raise RecipeError(Problem(str(source), "no such recipe file", "the path of a .yaml file", _similar(path)))
        tree = _unshared(parse(_text(path), str(source)), str(source))
    if not isinstance(tree, dict):
        raise RecipeError(Problem(str(source), "a recipe is a mapping", "name: ..., team: ..., stages: ..."))
    for text in overrides:
        override(tree, text)
    return tree


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        what = f"not UTF-8: {error.reason} (byte {error.start})"
        raise RecipeError(Problem(str(path), what, "the file again as UTF-8 text")) from None


def _unshared(tree: Any, where: str) -> Any:
    """A copy in which nothing is shared: a YAML anchor is one object, and an override must change one place only."""
    count = 0

    def copied(value: Any, depth: int) -> Any:
        nonlocal count
        count += 1
        if count > MOST or depth > DEEP:
            what = (
                f"more than {MOST:,} values, or more than {DEEP} within one another (anchors count where they are used)"
            )
            raise RecipeError(Problem(where, what, "a smaller recipe"))
        if isinstance(value, Mapping):
            return {str(key): copied(inner, depth + 1) for key, inner in value.items()}
        return [copied(inner, depth + 1) for inner in value] if isinstance(value, list | tuple) else value

    return copied(tree, 0)


def parse(text: str, where: str) -> Any:
    """The value of a YAML text."""
    try:
        return yaml.load(text, Loader=_Loader)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        place = f"{where}, line {mark.line + 1}, column {mark.column + 1}" if mark else where
        what = f"not valid YAML: {getattr(error, 'problem', None) or error}"
        raise RecipeError(Problem(place, what)) from None
    except RecursionError:
        raise RecipeError(Problem(where, "brackets within brackets, deeper than any recipe", "fewer")) from None
    except RecipeError:
        raise
    except (ValueError, LookupError, AttributeError, TypeError) as error:  # what PyYAML makes of `!!int x`
        raise RecipeError(Problem(where, f"a value that cannot be read: {error}", "it as text or a number")) from None


def dump(tree: Mapping[str, Any]) -> str:
    """YAML text that `parse` reads back as the same values."""
    return yaml.dump(dict(tree), Dumper=_Dumper, sort_keys=False, default_flow_style=None, width=110)


def override(tree: dict[str, Any], text: str) -> None:
    """Applies `path.to.key=value` (the value is YAML) or `~path.to.key`, which removes the key; in place."""
    remove = text.startswith("~")
    path, equals, value = text.removeprefix("~").partition("=")
    if not path or remove == bool(equals):
        fix = "path.to.key=value, such as stages.1.steps=5, or ~path.to.key to remove one"
        raise RecipeError(Problem(f"override {text!r}", "not an override", fix))
    *parents, key = path.split(".")
    node: Any = tree
    for depth, parent in enumerate(parents):
        node = _child(node, parent, path, depth)
    last: Any = _index(node, key, path) if isinstance(node, list) else key
    if not remove:
        node[last] = parse(value, f"override {text!r}")
    elif isinstance(node, list) or last in node:
        del node[last]
    else:
        raise RecipeError(Problem(f"override {text!r}", f"there is no {path} to remove", "", nearest(last, node)))


def _child(node: Any, key: str, path: str, depth: int) -> Any:
    """The container under `key`, made when absent; a bare name there (`estimator: rloo`) becomes a mapping."""
    place: Any = _index(node, key, path) if isinstance(node, list) else key
    if isinstance(node, dict):
        node.setdefault(key, {})
    if isinstance(node[place], str):
        node[place] = {"name": node[place]}
    elif node[place] is None:
        node[place] = {}
    if not isinstance(node[place], dict | list):
        where = ".".join(path.split(".")[: depth + 1])
        raise RecipeError(Problem(f"override {path}", f"{where} is {node[place]!r}: it has nothing inside"))
    return node[place]


def _index(node: list[Any], key: str, path: str) -> int:
    if not key.isdigit() or int(key) >= len(node):
        what = f"{key!r} is no place in a list of {len(node)}"
        raise RecipeError(Problem(f"override {path}", what, f"a number from 0 to {len(node) - 1}"))
    return int(key)


def _similar(path: Path) -> str | None:
    folder = path.parent
    return nearest(path.name, [p.name for p in folder.glob("*.y*ml")]) if folder.is_dir() else None
