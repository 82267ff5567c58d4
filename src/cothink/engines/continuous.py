"""One running batch for all chats of a model: rows join when others leave, and equal prompts are read once."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from cothink.attention import bucket, by_size, causal, flat, head, hidden, states
from cothink.batch import common
from cothink.engines.arena import Shelf, Step, length_mask, moves
from cothink.engines.precision import stored
from cothink.engines.prefixes import Prefixes
from cothink.engines.requests import Answer, Counters, Request
from cothink.engines.sampler import draw
from cothink.engines.weights import Weights
from cothink.types import Sampling

PREFILL = 4096
"""Prompt tokens that join one forward pass: more would hold up the rows that are speaking."""
JOIN = 8
"""New rows wait until a share of 1/JOIN of the batch is free (or all of them fit): joining one by one costs passes."""


class Continuous:
    """Samples for all policies that share one model (adapters over one base, or one set of full weights)."""

    def __init__(
        self,
        model: Any,
        policies: Mapping[str, Any],
        *,
        max_rows: int,
        cache_tokens: int,
        dtype: torch.dtype,
        counters: Counters,
    ):
        self._policies, self._max, self._limit = dict(policies), max_rows, cache_tokens
        self._weights, self._counters = Weights(model, self._policies, dtype), counters
        self._known = {name: Prefixes() for name in policies}
        self._device = next(model.parameters()).device
        self._stored = stored(model, dtype)
        self._prompts, self._answers = (Shelf(*states(model), self._stored, self._device) for _ in range(2))
        # `submit` runs on the event loop while a thread is in `advance`: it touches nothing but this.
        self._arrived: deque[tuple[Request, list[int]]] = deque()
        self._waiting: deque[tuple[Request, list[int]]] = deque()
        self._joining: list[Request] = []  # between the line and the batch: an error must not lose them
        self._groups: list[Request] = []  # by place in the prompt shelf
        self._rows: list[tuple[Request, int]] = []  # by place in the answer shelf: which answer of which request
        self._group = np.zeros(0, np.int64)  # group of each row
        self._said = np.zeros(0, np.int64)  # tokens sampled by each row
        self._last = np.zeros(0, np.int64)  # the last of them
        self._dice: list[np.ndarray] = []
        self._maybe: dict[tuple[str, tuple[str, ...]], np.ndarray] = {}
        self._layout: tuple[Tensor, Tensor, int, bool] | None = None

    @property
    def load(self) -> int:
        """Rows that speak or wait."""
        self._receive()
        return len(self._rows) + sum(len(places) for _, places in self._waiting)

    def submit(self, request: Request) -> None:
        """Puts a request in the line, in parts of at most one batch."""
        places = list(range(len(request.answers)))
        for start in range(0, len(places), self._max):
            self._arrived.append((request, places[start : start + self._max]))

    def _receive(self) -> None:
        while self._arrived:
            self._waiting.append(self._arrived.popleft())

    def fail(self) -> list[Request]:
        """Drops everything after an error and returns the requests that were lost."""
        self._receive()
        lost = [*self._groups, *self._joining, *(r for r, _ in self._waiting)]
        self._waiting.clear()
        self._joining = []
        self._leave(list(range(len(self._rows))), keep=False)
        for known in self._known.values():
            known.clear()
        self._prompts.drop()
        self._answers.drop()
        return list(dict.fromkeys(lost))

    def forget(self) -> None:
        """Drops the kept states of earlier chats: the next samples are a new process's, bit for bit."""
        for known in self._known.values():
            known.clear()

    def advance(self) -> list[Request]:
        """Makes forward passes until a request is done; returns those that are."""
        done: list[Request] = []
        while not done:
            self._receive()
            self._drop_abandoned()
            if not self.load:
                break
            with torch.inference_mode():
                done = self._step()
        if not self.load:
            self._prompts.drop()
            self._answers.drop()
        return done

    # one pass

    def _step(self) -> list[Request]:
        if not self._rows:
            for name in self._weights.refresh():
                self._known[name].clear()
        joined, shared = self._admit()
        if not joined and not self._rows:  # all that waited were given up
            return []
        self._joining = [request for request, _ in joined]
        self._make_room()
        r = len(self._rows)
        plan, ids, positions, ends, names = self._plan(joined, shared)
        model = self._weights.model
        with self._weights.speaking(names), flat(causal(model)):
            last = hidden(model, ids, positions, plan)
        keep = torch.cat([torch.arange(r), torch.tensor(ends, dtype=torch.long)]).to(self._device)
        logits = head(model)(last[keep])
        how = [request.sampling for request, _ in self._rows] + [request.sampling for request, _ in joined]
        owner = np.concatenate(
            [np.arange(r), np.repeat(np.arange(r, r + len(joined)), [len(places) for _, places in joined])]
        ).astype(np.int64)
        self._join(joined)
        self._joining = []
        self._counters.steps += 1
        return self._sample(logits, how, owner)

    def _sample(self, logits: Tensor, how: Sequence[Sampling], owner: np.ndarray) -> list[Request]:
        allowed = {}
        for k, (request, place) in enumerate(self._rows):
            if request.grammar is not None and int(owner[k]) not in allowed:
                mask = request.answers[place].matcher.allowed()
                allowed[int(owner[k])] = torch.from_numpy(mask).to(self._device)
        dice = torch.tensor([d[n] for d, n in zip(self._dice, self._said, strict=True)], dtype=torch.float64)
        tokens, logprobs = draw(logits, how, torch.from_numpy(owner).to(self._device), dice.to(self._device), allowed)
        self._last = tokens.cpu().numpy()
        self._said += 1
        self._counters.generated += len(self._rows)
        for (request, place), token, logprob in zip(self._rows, self._last.tolist(), logprobs.tolist(), strict=True):
            answer = request.answers[place]
            answer.ids.append(token)
            answer.logprobs.append(logprob)
            if request.grammar is not None:
                answer.matcher.advance(token)
        ended = [k for k in np.flatnonzero(self._ended()).tolist() if self._ends(k)]
        done = []
        for k in ended:
            request, _ = self._rows[k]
            request.left -= 1
            if not request.left:
                done.append(request)
        self._leave(ended, keep=True)
        return done

    def _ended(self) -> np.ndarray:
        """Rows that end here, or may: at an end token, at their limit, or at a token that can complete a stop."""
        found = np.zeros(len(self._rows), bool)
        for k, (request, _) in enumerate(self._rows):
            found[k] = self._said[k] >= request.limit
        kinds: dict[tuple[str, tuple[str, ...]], list[int]] = {}
        for k, (request, _) in enumerate(self._rows):
            kinds.setdefault((request.policy, request.sampling.stop), []).append(k)
        for key, rows in kinds.items():
            if key not in self._maybe:
                stops = self._rows[rows[0]][0].stops
                self._maybe[key] = stops.maybe(key[1])
                self._maybe[key][stops.ids[stops.ids < len(self._maybe[key])]] = True
            # A token beyond the tokenizer's vocabulary (padding of the output layer) has no text to complete.
            last = self._last[rows]
            known = last < len(self._maybe[key])
            found[rows] |= known & self._maybe[key][np.where(known, last, 0)]
        return found

    def _ends(self, k: int) -> bool:
        request, place = self._rows[k]
        answer = request.answers[place]
        if int(self._last[k]) in request.stops.ids:
            answer.reason = "stop"
            return True
        if request.sampling.stop:
            answer.text = request.stops.cut(answer.ids, request.sampling.stop)
            if answer.text is not None:
                answer.reason = "stop"
                return True
        return self._said[k] >= request.limit

    # who joins

    def _admit(self) -> tuple[list[tuple[Request, list[int]]], list[list[Tensor]]]:
        """Takes waiting requests as far as rows, memory and one pass allow; also what the cache knows of each."""
        joined: list[tuple[Request, list[int]]] = []
        shared: list[list[Tensor]] = []
        free = self._max - len(self._rows)
        waiting = sum(len(places) for _, places in self._waiting)
        if self._rows and free < min(waiting, max(1, self._max // JOIN)):
            return joined, shared
        fresh = 0
        while self._waiting:
            request, places = self._waiting[0]
            if request.abandoned:
                self._waiting.popleft()
                continue
            first = not self._rows and not joined
            if not first and (len(places) > free or fresh >= PREFILL or not self._room_for(request, places, joined)):
                break
            self._waiting.popleft()
            pieces = self._known[request.policy].find(request.prompt[:-1])  # the last token's logits are needed
            fresh += len(request.prompt) - sum(p.shape[2] for p in pieces)
            joined.append((request, places))
            shared.append(pieces)
            free -= len(places)
        return joined, shared

    def _room_for(self, request: Request, places: list[int], joined: list[tuple[Request, list[int]]]) -> bool:
        """Whether the prompt and a first stretch of answers fit beside what is here; the cache gives way first."""
        groups = len(self._groups) + len(joined) + 1
        rows = len(self._rows) + len(places) + sum(len(p) for _, p in joined)
        prompt = max(len(request.prompt), *(len(r.prompt) for r, _ in joined), 1)
        need = self._prompts.tokens(groups, prompt) + self._answers.tokens(rows, int(self._said.max(initial=0)) + 1)
        return need <= self._limit

    def _make_room(self) -> None:
        """Before the next token is written: the cache forgets, and if that is not enough the youngest rows start over.

        What a row says depends on its own seed only, so that a row that starts over says the same again.
        """
        while True:
            need = self._prompts.tokens(0, 0) + self._answers.tokens(len(self._rows), int(self._said.max(initial=0)))
            if need <= self._limit or len(self._rows) <= 1:
                break
            young = list(range(max(1, len(self._rows) * 3 // 4), len(self._rows)))
            for k in young:
                request, place = self._rows[k]
                fresh = None if request.grammar is None else request.grammar.matcher()
                request.answers[place] = Answer(matcher=fresh)
                self._waiting.appendleft((request, [place]))
            self._counters.restarted += len(young)
            self._leave(young, keep=False)
            self._prompts.shrink(len(self._groups), max((len(g.prompt) for g in self._groups), default=0))
            self._answers.shrink(len(self._rows), int(self._said.max(initial=0)))
        known = sum(k.size for k in self._known.values())
        for k in self._known.values():
            k.trim(max(0, self._limit - need) * k.size // max(known, 1))
        self._counters.peak_cache_tokens = max(self._counters.peak_cache_tokens, need + known)

    def _plan(
        self, joined: Sequence[tuple[Request, list[int]]], shared: Sequence[list[Tensor]]
    ) -> tuple[Step, Tensor, Tensor, list[int], list[str]]:
        """The pass: its plan, flat ids and positions, where each new prompt ends, and whose token each is."""
        r, g = len(self._rows), len(self._groups)
        self._prompts.grow(g + len(joined), max((len(q.prompt) for q, _ in joined), default=0))
        self._answers.grow(r + sum(len(p) for _, p in joined), int(self._said.max(initial=0)) + 1)
        prompt_of = np.array([len(q.prompt) for q in self._groups], np.int64)
        written = self._said - 1
        ids, positions = self._last.tolist(), (prompt_of[self._group] + written).tolist() if r else []
        names = [q.policy for q, _ in self._rows]
        spans, copies, ends = [], ([], [], []), [0] * len(joined)
        before: Request | None = None
        line: list[int] = []  # flat places of the prompt before, -1 where the cache knew it
        for i in sorted(range(len(joined)), key=lambda i: (joined[i][0].policy, joined[i][0].prompt)):
            request = joined[i][0]
            place, prompt = g + i, request.prompt
            known = 0
            for piece in shared[i]:
                self._prompts.write(place, known, piece)
                known += piece.shape[2]
            same = common(before.prompt, prompt) if before is not None and before.policy == request.policy else 0
            same = max(known, min(same, len(prompt) - 1))
            start = len(ids)
            line = [-1] * known + line[known:same] + list(range(start, start + len(prompt) - same))
            ids += prompt[same:]
            positions += range(same, len(prompt))
            names += [request.policy] * (len(prompt) - same)
            for column, values in zip(
                copies, (line[known:], [place] * (len(prompt) - known), range(known, len(prompt))), strict=True
            ):
                column.extend(values)
            spans.append((range(start, len(ids)), range(len(prompt)), place))
            ends[i] = len(ids) - 1
            before = request
            self._counters.prefilled += len(prompt) - same
            self._counters.reused += same
        group_of, among, widest, simple = self._arranged()
        new = []
        for part in by_size(spans, lambda s: (len(s[0]), len(s[1]))):
            places = torch.tensor([s[2] for s in part], device=self._device)
            new.append((bucket([(q, k) for q, k, _ in part], self._device), places))
        to = [torch.tensor(x, dtype=torch.long, device=self._device) for x in (ids, positions, *copies)]
        plan = Step(
            self._prompts,
            self._answers,
            r,
            g,
            group_of,
            among,
            widest,
            torch.from_numpy(written).to(self._device),
            length_mask(prompt_of, self._stored, self._device),
            length_mask(self._said, self._stored, self._device),
            (to[2], to[3], to[4]),
            new,
            simple,
        )
        return plan, to[0], to[1], ends, names

    def _arranged(self) -> tuple[Tensor, Tensor, int, bool]:
        """Which group each row reads and its place among its rows; kept until somebody joins or leaves."""
        if self._layout is None:
            among = np.zeros(len(self._rows), np.int64)
            seen: dict[int, int] = {}
            for k, group in enumerate(self._group.tolist()):
                among[k] = seen.get(group, 0)
                seen[group] = among[k] + 1
            simple = len(self._groups) == len(self._rows) and bool((self._group == np.arange(len(self._rows))).all())
            group_of, place = (torch.from_numpy(x).to(self._device) for x in (self._group.copy(), among))
            self._layout = group_of, place, max(seen.values(), default=1), simple
        return self._layout

    def _join(self, joined: Sequence[tuple[Request, list[int]]]) -> None:
        for request, places in joined:
            group = len(self._groups)
            self._groups.append(request)
            # At once, because others that begin alike may join while this one speaks.
            self._known[request.policy].store(request.prompt, lambda a, b, g=group: self._copied_prompt(g, a, b))
            for place in places:
                self._rows.append((request, place))
                self._dice.append(request.dice(place))
            self._group = np.concatenate([self._group, np.full(len(places), group)])
            self._said = np.concatenate([self._said, np.zeros(len(places), np.int64)])
            self._last = np.concatenate([self._last, np.zeros(len(places), np.int64)])
        if joined:
            self._layout = None

    # who leaves

    def _leave(self, rows: Sequence[int], *, keep: bool) -> None:
        """Takes rows out; the last ones move into their places, so that the batch has no holes."""
        if not rows:
            return
        if keep:
            for k in rows:
                self._remember(k)
        size = len(self._rows) - len(rows)
        filling = moves(rows, size, len(self._rows))
        self._answers.move(filling, int(self._said.max()))
        for source, target in filling:
            self._rows[target], self._dice[target] = self._rows[source], self._dice[source]
            for column in (self._group, self._said, self._last):
                column[target] = column[source]
        del self._rows[size:], self._dice[size:]
        self._group, self._said, self._last = self._group[:size], self._said[:size], self._last[:size]
        used = set(self._group.tolist())
        empty = [g for g in range(len(self._groups)) if g not in used]
        left = len(self._groups) - len(empty)
        filling = moves(empty, left, len(self._groups))
        self._prompts.move(filling, max((len(q.prompt) for q in self._groups), default=0))
        for source, target in filling:
            self._groups[target] = self._groups[source]
            self._group[self._group == source] = target
        del self._groups[left:]
        self._layout = None

    def _copied_prompt(self, group: int, a: int, b: int) -> Tensor:
        return torch.stack(self._prompts.read(group, a, b))

    def _remember(self, k: int) -> None:
        """Stores what a row read and said, so that a chat that goes on from it need not be read again."""
        request, place = self._rows[k]
        group, start = int(self._group[k]), len(request.prompt)

        def read(a: int, b: int) -> Tensor:
            near = self._prompts.read(group, a, min(b, start))
            own = self._answers.read(k, max(a - start, 0), max(b - start, 0))
            return torch.stack([torch.cat(both, 1) for both in zip(near, own, strict=True)])

        said = request.answers[place].ids[:-1]  # the last token was never read
        self._known[request.policy].store((*request.prompt, *said), read)

    def _drop_abandoned(self) -> None:
        if any(request.abandoned for request in self._groups):
            self._leave([k for k, (request, _) in enumerate(self._rows) if request.abandoned], keep=False)
        self._waiting = deque(w for w in self._waiting if not w[0].abandoned)
