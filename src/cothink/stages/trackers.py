"""Metrics to TensorBoard, Weights & Biases or trackio, through accelerate; metrics.jsonl is written in any case."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any


class Trackers:
    """The trackers a recipe asks for; none of them costs nothing and imports nothing."""

    def __init__(
        self,
        names: Sequence[str],
        folder: Path,
        project: str,
        config: Mapping[str, Any],
        say: Callable[[str], None] = print,
    ):
        self._accelerator: Any = None
        self._say = say
        if not names:
            return
        from accelerate import Accelerator

        try:
            self._accelerator = Accelerator(log_with=list(names), project_dir=str(folder), cpu=_no_gpu())
            self._accelerator.init_trackers(project, config=_flat(config))
        except (ImportError, ValueError) as error:
            raise RuntimeError(
                f"trackers {', '.join(names)} cannot start ({error}); pip install 'cothink[tracking]' or remove them"
            ) from error
        except Exception as error:  # a service that is away
            self._lost(error)
            return
        missing = len(names) - len(self._accelerator.trackers)
        if missing:
            raise RuntimeError(
                f"of the trackers {', '.join(names)}, {missing} are not installed; pip install 'cothink[tracking]'"
            )

    def log(self, values: Mapping[str, Any], step: int) -> None:
        """Sends the numbers of one step."""
        if self._accelerator is not None:
            try:
                self._accelerator.log({k: v for k, v in values.items() if isinstance(v, int | float)}, step=step)
            except Exception as error:
                self._lost(error)

    def close(self) -> None:
        """Ends the trackers' runs."""
        if self._accelerator is not None:
            try:
                self._accelerator.end_training()
            except Exception as error:
                self._lost(error)

    def _lost(self, error: Exception) -> None:
        """A tracker never ends a run: metrics.jsonl has every number."""
        self._accelerator = None
        what = f"{type(error).__name__}: {error}"[:300]
        self._say(f"trackers: {what}. The run goes on without them; metrics.jsonl holds everything")


def _no_gpu() -> bool:
    import torch

    return not torch.cuda.is_available()


def _flat(tree: Any, prefix: str = "") -> dict[str, Any]:
    """Dotted keys with plain values: what every tracker can show."""
    if isinstance(tree, Mapping):
        items = tree.items()
    elif isinstance(tree, list | tuple):
        items = enumerate(tree)
    else:
        return {prefix: tree if isinstance(tree, int | float | str | bool) else str(tree)}
    found: dict[str, Any] = {}
    for key, value in items:
        found |= _flat(value, f"{prefix}.{key}" if prefix else str(key))
    return found
