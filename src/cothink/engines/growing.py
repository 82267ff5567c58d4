"""A key-value cache that grows in place: appending one token must not copy all the tokens before it."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from transformers.cache_utils import DynamicCache, DynamicLayer

ROOM = 64
"""Tokens of free space that are allocated whenever a buffer is full."""


class GrowingLayer(DynamicLayer):
    """A `DynamicLayer` whose `keys` and `values` are views into larger buffers."""

    _buffers: tuple[Tensor, Tensor] | None = None

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Appends new states and returns all of them, [rows, heads, tokens, size]."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        have = self.get_seq_length()
        size = have + key_states.shape[-2]
        if self._buffers is None or self._buffers[0].shape[-2] < size:
            self._buffers = (_larger(self.keys, key_states, have), _larger(self.values, value_states, have))
        keys, values = self._buffers
        keys[..., have:size, :] = key_states
        values[..., have:size, :] = value_states
        self.keys, self.values = keys[..., :size, :], values[..., :size, :]
        return self.keys, self.values

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keeps these rows; the next token finds a new buffer."""
        super().batch_select_indices(indices)
        self._buffers = None


def _larger(old: Tensor | None, new: Tensor, have: int) -> Tensor:
    rows, heads, more, size = new.shape
    buffer = new.new_empty(rows, heads, have + more + ROOM, size)
    if have and old is not None:
        buffer[..., :have, :] = old
    return buffer


def growing_cache(model: Any) -> DynamicCache:
    """An empty cache for a model; layers of other kinds (sliding windows) keep their own way."""
    cache = DynamicCache(config=model.config)
    cache.layers = [GrowingLayer() if type(layer) is DynamicLayer else layer for layer in cache.layers]
    return cache
