"""A plan as a JSON action (arXiv 2503.09501, figure 4): what the planner must write, and how it is read."""

from __future__ import annotations

import json
from typing import Any, NamedTuple

ACTIONS = ("DECOMPOSE", "REWRITE", "EMPTY")
"""Break the question into sub-questions, ask it more clearly, or leave it as it is."""


class Action(NamedTuple):
    """What the planner chose, and the instruction that goes with it (empty for EMPTY)."""

    action: str
    output: str


def _object(action: Any, output: Any) -> dict[str, Any]:
    fields = {"action": action, "output": output}  # in this order: the choice comes before its reasons
    return {"type": "object", "properties": fields, "required": [*fields], "additionalProperties": False}


SCHEMA = json.dumps(
    {
        "anyOf": [
            _object({"enum": ["DECOMPOSE", "REWRITE"]}, {"type": "string", "minLength": 1}),
            _object({"const": "EMPTY"}, {"const": ""}),
        ]
    }
)
"""What `read` accepts, as a JSON schema for engines that can hold a model to it."""


def write(action: str, output: str) -> str:
    """The text of an action, in the spelling of the schema."""
    return json.dumps({"action": action, "output": output})


def read(text: str) -> Action | None:
    """The action that a whole text is; None if it is anything else.

    Valid is one object with exactly the keys `action` and `output`, in this order; EMPTY goes with an empty output, the
    others with some text (DECOMPOSE without sub-questions would be EMPTY under another name).
    """
    try:
        found = json.loads(text, object_pairs_hook=tuple)  # objects become tuples of pairs, in the order written
    except (ValueError, RecursionError):
        return None
    if not isinstance(found, tuple) or [key for key, _ in found] != ["action", "output"]:
        return None
    action, output = (value for _, value in found)
    if action not in ACTIONS or not isinstance(output, str) or bool(output) == (action == "EMPTY"):
        return None
    return Action(action, output)
