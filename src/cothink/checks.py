"""Conformance kits: does your own workflow, reward, estimator, loss, engine or task loader keep the rules?

Each raises AssertionError with the rule that is broken. They cost milliseconds, so call them from a test.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
import json
import math
import random
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from cothink.resolve import bind, effective
from cothink.types import (
    FINISH_CODES,
    Completion,
    Episode,
    Finish,
    Message,
    PlayError,
    Role,
    Sample,
    Sampling,
    ScoredTurn,
    Task,
    Turn,
)

if TYPE_CHECKING:
    from cothink.engines import Engine

GOLD = "GOLD-4711"
CLOSE = 1e-5
TEXTS = ("It is \\boxed{7}.", "\\boxed{8}", "7", "", "\\boxed{", "\\boxed{" * 50, "9" * 5_000, "\x00 \ud800 ∑ [FINISH]")


def check_workflow(
    run: Callable[..., Any],
    *,
    roles: Iterable[str] | None = None,
    options: Mapping[str, Any] | None = None,
    replies: Sequence[str] = ("words", "", "\\boxed{7}", "[FINISH]", "words \\boxed{7} [FINISH]"),
) -> None:
    """Plays the workflow with every reply of `replies`, plain and cut at the token limit.

    Rules: it returns a Finish with a known reason, whose turn exists; the gold answer reaches no prompt; every call is
    a recorded turn; the same seed gives the same episode, whoever answers first; episodes do not see one another.
    """
    options = dict(options or {})
    bound = bind(run, options, "workflow")
    seats = {name: Role(name, name, system=f"You are {name}.") for name in roles or _declared_roles(run, options)}
    module = sys.modules.get(getattr(run, "__module__", ""))
    needed = getattr(module, "NEEDS", ())  # what the workflow reads of a task's meta
    tasks = [Task(f"kit/{k}", f"Question number {k}?", GOLD, {key: f"{key} {k}" for key in needed}) for k in range(3)]
    for reply in replies:
        for reason in ("stop", "length"):
            where = f"with every reply {reply!r} ({reason})"
            alone, calls = _play(bound, seats, tasks[:1], reply, reason)
            again, _ = _play(bound, seats, tasks[:1], reply, reason)
            crowd, _ = _play(bound, seats, tasks, reply, reason, hurry=False)
            _check_episode(alone[0], where, seats)
            sampled = sum(call.n for call in calls)
            recorded = sum(bool(turn.completion.output_ids) for turn in alone[0].turns)
            assert recorded == sampled, f"{where}: {sampled} completions were sampled and {recorded} turns recorded"
            for call in calls:
                leaked = any(GOLD in message.content for message in call.messages)
                assert not leaked, f"{where}: the gold answer is in a prompt; prompts may use task.question only"
            assert alone == again, f"{where}: the same seed gave another episode; draw nothing at random in a workflow"
            assert _shape(alone[0]) == _shape(crowd[0]), (
                f"{where}: the episode changed when others ran beside it or answers came in another order; "
                "keep state in local variables and pass after= where turns are gathered"
            )


def _declared_roles(run: Callable[..., Any], options: Mapping[str, Any]) -> list[str]:
    module = sys.modules[run.__module__]
    declare = getattr(module, "roles", None)
    found: Any = declare(**effective(run, options)) if callable(declare) else getattr(module, "ROLES", None)
    assert found, (
        f"{module.__name__} names no roles: write ROLES = {{'solver': 'You ...'}} beside run, or pass roles= to the kit"
    )
    return list(found)


def _play(
    workflow: Callable[..., Any],
    roles: Mapping[str, Role],
    tasks: Sequence[Task],
    text: str,
    reason: str,
    *,
    hurry: bool = True,
) -> tuple[list[Episode], list[Any]]:
    """Plays the tasks; unhurried answers come in a shuffled order."""
    from cothink import team
    from cothink.engines import scripted

    order = random.Random(len(text))

    async def reply(call: Any) -> Completion:
        if not hurry:
            await asyncio.sleep(order.choice((0.0, 1e-4, 3e-4)))
        return Completion(text, finish_reason=reason)  # type: ignore[arg-type]

    engine = scripted.engine(reply)
    jobs = [team.Job(task, task.id, seed=1) for task in tasks]
    where = f"the workflow failed on the reply {text!r} ({reason})"
    try:
        played = asyncio.run(team.play(jobs, workflow, roles, dict.fromkeys(roles, engine), deadline=60))
    except PlayError as error:
        raise AssertionError(f"{where}: {error}") from error
    assert not played.failures, f"{where}: {played.failures[0].message}"
    return list(played.episodes), engine.calls


def _check_episode(episode: Episode, where: str, roles: Mapping[str, Role]) -> None:
    finish, ids = episode.finish, [turn.id for turn in episode.turns]
    assert finish.reason in FINISH_CODES, f"{where}: finish reason {finish.reason!r}; write one of {[*FINISH_CODES]}"
    assert isinstance(finish.text, str), (
        f"{where}: Finish.text is a {type(finish.text).__name__}; write the graded text"
    )
    assert finish.turn is None or finish.turn in ids, f"{where}: Finish.turn {finish.turn!r} is no turn of the episode"
    assert episode.turns, f"{where}: nobody spoke"
    for place, turn in enumerate(episode.turns):
        assert turn.role in roles, f"{where}: turn {turn.id} is by {turn.role!r}, who is not in the team"
        assert set(turn.parents) <= set(ids[:place]), f"{where}: turn {turn.id} answers turns that come after it"


def _shape(episode: Episode) -> list[tuple[Any, ...]]:
    """An episode without token ids, which the crowd's shared codec numbers in another order."""
    turns = [(t.id, t.parents, t.role, t.text, t.completion.text, t.round) for t in episode.turns]
    return [*turns, (episode.finish.reason, episode.finish.text, episode.finish.turn)]


def check_reward(
    function: Callable[..., Any], *, options: Mapping[str, Any] | None = None, task: Task | None = None
) -> None:
    """Grades right, wrong, empty, cut and junk texts, on every turn of an episode.

    Rules: the value is a finite number or None, the same each time; no text whatever raises.
    """
    bound = bind(function, dict(options or {}), "reward")
    task = task or Task("kit/0", "What is 3 + 4?", "7", {"kind": "number", "level": 1})
    for text in TEXTS:
        episode = _chain(task, text)
        for turn in episode.turns:
            where = f"on the text {text[:30]!r} of turn {turn.id} ({turn.role})"
            try:
                value, again = _value(bound, task, turn, episode), _value(bound, task, turn, episode)
            except Exception as error:
                raise AssertionError(f"{where}: raised {type(error).__name__}: {error}") from error
            number = isinstance(value, int | float) and math.isfinite(value)
            assert value is None or number, f"{where}: returned {value!r}; return a finite number, or None"
            assert value == again, f"{where}: returned {value!r}, then {again!r}; a reward may not draw at random"


def _value(function: Callable[..., Any], task: Task, turn: Turn, episode: Episode) -> Any:
    found = function(task, turn, episode)
    return asyncio.run(_awaited(found)) if inspect.isawaitable(found) else found


async def _awaited(value: Any) -> Any:
    return await value


def _chain(task: Task, text: str) -> Episode:
    """A plan, an answer, a placeholder and a last answer, all with the same text; the last one is graded."""

    def turn(k: int, role: str, ids: tuple[int, ...]) -> Turn:
        completion = Completion(text if ids else "", (1, 2), ids, (-0.5,) * len(ids), "stop" if ids else "void")
        parents = (str(k - 1),) if k else ()
        return Turn(str(k), parents, role, role, completion, completion.text, k // 2)

    turns = (turn(0, "meta", (3, 4)), turn(1, "reasoning", (5,)), turn(2, "meta", ()), turn(3, "reasoning", (6, 7, 8)))
    return Episode("kit/0#0", task, turns, Finish("finished", text, "3"), accuracy=1.0, verdict="right")


def check_estimator(
    function: Callable[..., Any], *, options: Mapping[str, Any] | None = None, ordered: bool = False
) -> None:
    """Gives the estimator ragged groups, alone, equal and shuffled.

    Rules: one finite number per turn, or one per trained token; a turn alone and a group without spread get 0; names
    mean nothing; nor does the order of the turns, unless the estimator keeps a running average (`ordered`).
    """
    bound = bind(function, dict(options or {}), "estimator")
    turns = _scored()
    values = bound(turns)
    assert list(bound([])) == [], "of no turns: it must return an empty list"
    assert len(values) == len(turns), f"it returned {len(values)} advantages for {len(turns)} turns"
    for turn, value in zip(turns, values):
        numbers = _numbers(value)
        fits = isinstance(value, int | float) or len(numbers) == turn.tokens
        assert fits, f"a turn of {turn.tokens} tokens got {len(numbers)} numbers; return one, or one for each token"
        assert all(map(math.isfinite, numbers)), f"an advantage is not finite: {value}"
    alone = _numbers(bound(turns[:1])[0])
    assert all(a == 0 for a in alone), f"a turn without company got advantage {alone}, not 0: nothing to compare with"
    flat = bound([replace(t, value=0.3, components={"a": 0.3}) for t in turns])
    assert all(abs(a) < CLOSE for v in flat for a in _numbers(v)), f"equal returns gave advantages {flat}, not 0"
    renamed = bound([replace(t, task=f"z-{t.task}", episode=f"a-{t.episode}", turn=f"q{t.turn}") for t in turns])
    _same(renamed, values, "renaming tasks, episodes and turns changed the advantages")
    if not ordered:
        order = random.Random(7).sample(range(len(turns)), len(turns))
        shuffled = bound([turns[k] for k in order])
        _same(shuffled, [values[k] for k in order], "shuffling the turns changed more than their order")


def _scored() -> list[ScoredTurn]:
    """Two tasks, four episodes each, one to three turns of two roles, of one to three tokens."""
    dice, turns = random.Random(3), []
    for task in ("a", "b"):
        for play in range(4):
            for k in range(1 + play % 3):
                for role in ("meta", "reasoning"):
                    value = dice.choice((0.0, 0.25, 1.0))
                    keys = {"turn": f"{k}{role}", "prefix": f">{role}", "anchor": f"state {k}"}
                    tokens = dice.randint(1, 3)
                    made = ScoredTurn(task, f"{task}#{play}", role, "main", k, value, tokens, components={"a": value})
                    turns.append(replace(made, **keys))
    return turns


def _numbers(value: Any) -> list[float]:
    return [float(value)] if isinstance(value, int | float) else [float(v) for v in value]


def _same(one: Sequence[Any], two: Sequence[Any], message: str) -> None:
    for a, b in zip(one, two, strict=True):
        assert all(abs(x - y) < CLOSE for x, y in zip(_numbers(a), _numbers(b), strict=True)), message


def check_loss(
    function: Callable[..., Any], *, options: Mapping[str, Any] | None = None, on_policy: bool = True
) -> None:
    """Gives the loss ragged batches, whole and split, on and far off policy.

    Rules: a finite scalar with a gradient on trained tokens only; metrics are (sum, count) pairs; the parts of a batch
    add up to the whole; nothing trained gives 0; an absurd log-ratio stays finite; and (`on_policy`) where the policy
    has not moved, the gradient is -weight x advantage.
    """
    import torch

    bound = bind(function, dict(options or {}), "loss")
    whole, parts = _batch(slice(None)), [_batch(slice(0, 2)), _batch(slice(2, None))]
    trained = whole.turns >= 0
    loss, gradient, metrics = _loss(bound, whole, shift=0.1)
    assert loss.ndim == 0 and bool(loss.isfinite()), f"the loss is {loss}, not one finite number"
    assert bool((gradient[~trained] == 0).all()), "tokens that are not trained (batch.turns < 0) have a gradient"
    for name, pair in metrics.items():
        fits = isinstance(pair, tuple) and len(pair) == 2 and all(math.isfinite(float(p)) for p in pair)
        assert fits, f"metric {name!r} is {pair!r}; write a pair (sum, count) of finite numbers"
    pieces = sum(float(_loss(bound, part, shift=0.1)[0]) for part in parts)
    difference = abs(pieces - float(loss))
    assert difference < CLOSE, (
        f"two micro-batches differ from the whole by {difference:.2g}; use batch.weights as given"
    )
    for far in (800.0, -800.0):
        value, slope, _ = _loss(bound, whole, shift=far)
        finite = bool(value.isfinite()) and bool(slope.isfinite().all())
        assert finite, f"a log-ratio of {far:g} gives the loss {float(value)}; clamp exponents"
    nothing = replace(whole, turns=torch.full_like(whole.turns, -1))
    value, slope, _ = _loss(bound, nothing, shift=0.1)
    assert float(value) == 0 and bool((slope == 0).all()), f"a batch without trained tokens has the loss {float(value)}"
    if on_policy:
        slope = _loss(bound, whole, shift=0.0)[1]
        wanted = -(whole.weights * whole.advantages)
        worst = float((slope - wanted)[trained].abs().max())
        assert worst < CLOSE, f"where nothing has moved the gradient is off -weight x advantage by {worst:.2g}"


def _batch(rows: slice) -> Any:
    from cothink.batch import pad, weights_for

    dice, samples = random.Random(5), []
    for k in range(4):
        turns = (-1, 0, 0, -1, *((1,) * k))
        advantage = [dice.choice((-0.5, 1.0)) for _ in range(2)]
        samples.append(
            Sample(
                policy="main",
                role=("meta", "reasoning")[k % 2],
                unit=f"kit#{k}/{k % 2}",
                ids=tuple(range(1, len(turns) + 1)),
                turns=turns,
                logprobs=tuple(-dice.random() if t >= 0 else 0.0 for t in turns),
                advantages=tuple(advantage[t] if t >= 0 else 0.0 for t in turns),
            )
        )
    weights = weights_for(samples, "const_turn", turns_ref=2.0)
    return pad(samples[rows], weights[rows])


def _loss(function: Callable[..., Any], batch: Any, shift: float) -> tuple[Any, Any, Mapping[str, Any]]:
    """Loss, gradient and metrics with the policy's log-probs `shift` away from the behaviour's."""
    import torch

    logprobs = (batch.logprobs + shift * (batch.turns >= 0)).detach().requires_grad_(True)
    ready = replace(batch, ref_logprobs=batch.logprobs.clone(), entropy=torch.ones_like(batch.logprobs))
    found = function(logprobs, ready)
    assert isinstance(found, tuple) and len(found) == 2, "a loss returns (loss, metrics)"
    loss, metrics = found
    assert loss.requires_grad, "the loss has no gradient; compute it from `logprobs`"
    loss.backward()
    gradient = torch.zeros_like(logprobs) if logprobs.grad is None else logprobs.grad
    return loss.detach(), gradient, metrics


def check_engine(engine: Engine, policy: str, *, repeatable: bool = True, tokens: bool = True) -> None:
    """Samples a few prompts, alone and together.

    Rules: n completions of the very prompt; ids and log-probs of one length, log-probs <= 0, the text is the decoded
    ids; max_tokens holds. `repeatable`: a completion depends on (weights, prompt, sampling, seed, its place) alone.
    `tokens=False` for engines behind an API that returns no ids.
    """
    codec = engine.codec(policy)
    sampling = Sampling(max_tokens=5)
    prompts = [[Message("system", "Solve."), Message("user", f"What is {k} + 1?")] for k in range(3)]

    async def ask(messages: Sequence[Message], n: int = 2, seed: int = 1, how: Sampling = sampling) -> list[Completion]:
        return await engine.generate(policy, messages, codec.start(messages), how, n, seed)

    async def together() -> list[list[Completion]]:
        return list(await asyncio.gather(*(ask(messages) for messages in prompts)))

    crowd = asyncio.run(together())
    for messages, found in zip(prompts, crowd):
        assert len(found) == 2, f"asked for 2 completions, got {len(found)}"
        for completion in found:
            _check_completion(completion, codec, codec.start(messages), sampling, tokens)
    if repeatable:
        for messages, found in zip(prompts, crowd):
            ids = [c.output_ids for c in found]
            assert [c.output_ids for c in asyncio.run(ask(messages))] == ids, "the same seed sampled something else"
            first = asyncio.run(ask(messages, n=1))[0].output_ids
            assert first == ids[0], "the first of 2 completions differs from the first of 1; seed each place by itself"
    greedy = asyncio.run(ask(prompts[0], how=replace(sampling, temperature=0.0)))
    if tokens and repeatable:
        assert greedy[0].output_ids == greedy[1].output_ids, "at temperature 0 two completions differ"


def _check_completion(c: Completion, codec: Any, prompt: Sequence[int], sampling: Sampling, tokens: bool) -> None:
    reasons = ("stop", "length", "void", "error")
    assert c.finish_reason in reasons, f"finish reason {c.finish_reason!r}; write one of {reasons}"
    if not tokens:
        return
    assert tuple(c.prompt_ids) == tuple(prompt), "prompt_ids are not the ids that were asked; never encode anew"
    assert len(c.logprobs) == len(c.output_ids), f"{len(c.output_ids)} ids came with {len(c.logprobs)} log-probs"
    assert all(p <= 1e-6 for p in c.logprobs), f"a log-prob is above 0: {max(c.logprobs)}"
    assert len(c.output_ids) <= sampling.max_tokens, f"{len(c.output_ids)} tokens, max_tokens is {sampling.max_tokens}"
    assert c.text == codec.decode(c.output_ids), f"the text {c.text!r} is not the decoded ids"


def check_tasks(load: Callable[..., Any], *, options: Mapping[str, Any] | None = None) -> None:
    """Loads twice. Rules: Tasks with unique ids, non-empty question and answer, the same each time, plain metadata."""
    bound: functools.partial[Any] = bind(load, dict(options or {}), "tasks")  # type: ignore[assignment]
    tasks = list(bound())
    assert tasks, "the loader returned no tasks"
    seen: set[str] = set()
    for task in tasks:
        assert isinstance(task, Task), f"the loader returned a {type(task).__name__}; return cothink.types.Task"
        assert task.id not in seen, f"the id {task.id!r} is used twice"
        seen.add(task.id)
        for name in ("question", "answer"):
            text = getattr(task, name)
            assert isinstance(text, str) and text.strip(), f"task {task.id!r}: {name} is {text!r}; skip such rows"
        try:
            json.dumps(dict(task.meta))
        except TypeError as error:
            raise AssertionError(f"task {task.id!r}: meta holds what JSON cannot: {error}") from None
    assert tasks == list(bound()), "a second load gave other tasks; shuffle with a seed of your own"


def check_conversations(
    load: Callable[..., Any], *, options: Mapping[str, Any] | None = None, roles: Mapping[str, Role] | None = None
) -> None:
    """Loads twice, for a team of meta and reasoning. Rules: chats of these roles with something to learn in each."""
    from cothink.conversations import Conversation, fault

    roles = roles or {"meta": Role("meta", "main", "Guide."), "reasoning": Role("reasoning", "main", "Follow.")}
    bound = bind(load, dict(options or {}), "conversations")
    examples = list(bound(roles))
    assert examples, "the source returned no examples"
    for k, example in enumerate(examples):
        where = f"example {k} ({getattr(example, 'id', '')!r})"
        assert isinstance(example, Conversation | Sample), f"{where} is a {type(example).__name__}; return Conversation"
        assert example.role in roles, f"{where} is of the role {example.role!r}; it was asked for {', '.join(roles)}"
        if isinstance(example, Conversation):
            assert fault(example.messages) is None, f"{where}: {fault(example.messages)}"
            assert example.first < len(example.messages), f"{where}: nothing in it is to be learned"
    assert examples == list(bound(roles)), "a second load gave other examples; shuffle with a seed of your own"
