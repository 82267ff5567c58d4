"""Keys and values of earlier prompts and answers, found again by their tokens."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from cothink.batch import common

SLACK = 0.9
"""Eviction goes on until the cache is this full, so that it does not happen at every insertion."""


@dataclass(eq=False)
class _Node:
    """A run of tokens after its parent's, with their states [layers, 2, tokens, heads, size]."""

    ids: tuple[int, ...]
    states: Tensor | None
    parent: _Node | None = None
    used: int = 0
    children: dict[int, _Node] = field(default_factory=dict)


class Prefixes:
    """A tree of token runs that share their beginnings; the longest unused leave first."""

    def __init__(self) -> None:
        self._root = _Node((), None)
        self._clock = 0
        self.size = 0

    def clear(self) -> None:
        """Forgets everything: the weights have changed."""
        self._root, self.size = _Node((), None), 0

    def find(self, ids: Sequence[int]) -> list[Tensor]:
        """States of the longest known beginning of `ids`, in pieces [layers, 2, tokens, heads, size]."""
        pieces, node, done = [], self._root, 0
        self._clock += 1
        while done < len(ids) and (child := node.children.get(ids[done])) is not None:
            same = common(child.ids, ids[done : done + len(child.ids)])
            assert child.states is not None
            pieces.append(child.states[:, :, :same])
            child.used = self._clock
            done += same
            if same < len(child.ids):
                break
            node = child
        return pieces

    def store(self, ids: Sequence[int], read: Callable[[int, int], Tensor]) -> None:
        """Adds `ids`; `read(a, b)` copies the states of tokens a..b, and is asked only for what is new."""
        node, done = self._root, 0
        self._clock += 1
        while done < len(ids):
            child = node.children.get(ids[done])
            if child is None:
                fresh = _Node(tuple(ids[done:]), read(done, len(ids)), node, self._clock)
                node.children[ids[done]] = fresh
                self.size += len(fresh.ids)
                return
            same = common(child.ids, ids[done : done + len(child.ids)])
            child.used = self._clock
            done += same
            node = child if same == len(child.ids) else self._split(child, same)

    def trim(self, limit: int) -> None:
        """Forgets the tokens unused for longest until at most `limit` are left."""
        if self.size <= limit:
            return
        order = itertools.count()  # between equals the one found first
        leaves = [(n.used, next(order), n) for n in self._nodes() if not n.children]
        heapq.heapify(leaves)
        while leaves and self.size > SLACK * limit:
            leaf = heapq.heappop(leaves)[2]
            parent = leaf.parent
            assert parent is not None
            del parent.children[leaf.ids[0]]
            self.size -= len(leaf.ids)
            if not parent.children and parent is not self._root:
                heapq.heappush(leaves, (parent.used, next(order), parent))

    def _nodes(self) -> list[_Node]:
        found, line = [], list(self._root.children.values())
        while line:
            node = line.pop()
            found.append(node)
            line += node.children.values()
        return found

    def _split(self, node: _Node, at: int) -> _Node:
        """Cuts a run in two; copies, because a view would keep the memory of the half that is forgotten first."""
        assert node.parent is not None and node.states is not None
        upper = _Node(node.ids[:at], node.states[:, :, :at].clone(), node.parent, node.used)
        node.parent.children[node.ids[0]] = upper
        node.ids, node.states, node.parent = node.ids[at:], node.states[:, :, at:].clone(), upper
        upper.children[node.ids[0]] = node
        return upper
