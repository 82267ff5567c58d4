"""A stand-in for vLLM, with the names that the engine uses: a transformers model, PEFT adapters, a token a step."""

from __future__ import annotations

import contextlib
import sys
from types import ModuleType
from types import SimpleNamespace as NS
from typing import Any

import torch


class Params(NS):
    """SamplingParams and StructuredOutputsParams: what was given, by name."""


class LoRARequest:
    def __init__(self, lora_name: str, lora_int_id: int, lora_path: str):
        self.lora_name, self.lora_int_id, self.lora_path = lora_name, lora_int_id, lora_path


class Engine:
    """vLLM's LLMEngine. `given` holds the engine arguments, `requests` every sampling setting that was asked for."""

    def __init__(self, given: Params):
        from transformers import AutoModelForCausalLM, AutoTokenizer

        self.given, self.requests, self.steps, self.resets = given, [], 0, 0
        self.model: Any = AutoModelForCausalLM.from_pretrained(given.model, dtype=torch.float32).eval()
        self.tokenizer: Any = AutoTokenizer.from_pretrained(given.model)
        limit = getattr(given, "max_model_len", None)
        self.model_config = NS(max_model_len=limit or self.model.config.max_position_embeddings)
        self.adapters: dict[int, str] = {}
        self._running: dict[str, NS] = {}

    @classmethod
    def from_engine_args(cls, given: Params) -> Engine:
        return cls(given)

    def add_lora(self, request: LoRARequest) -> bool:
        from peft import PeftModel

        if len(self.adapters) >= self.given.max_loras:
            raise RuntimeError("no place for another adapter")
        inside = request.lora_name.replace(".", "-")
        if isinstance(self.model, PeftModel):
            self.model.load_adapter(request.lora_path, inside)
        else:
            self.model = PeftModel.from_pretrained(self.model, request.lora_path, adapter_name=inside)
        self.adapters[request.lora_int_id] = inside
        return True

    def remove_lora(self, number: int) -> bool:
        self.model.delete_adapter(self.adapters.pop(number))
        return True

    def collective_rpc(self, method: Any, timeout: Any = None, args: tuple = (), kwargs: Any = None) -> list[None]:
        from transformers import AutoModelForCausalLM

        if callable(method):
            return [method(NS(model_runner=NS(get_model=lambda: self.model)))]
        assert method == "reload_weights", method
        fresh = AutoModelForCausalLM.from_pretrained(kwargs["weights_path"], dtype=torch.float32)
        self.model.load_state_dict(fresh.state_dict())
        return [None]

    def reset_prefix_cache(self) -> bool:
        self.resets += 1
        return not self._running

    def abort_request(self, names: list[str]) -> None:
        for name in names:
            self._running.pop(name, None)

    def add_request(self, name: str, prompt: dict, params: Params, lora_request: LoRARequest | None = None) -> None:
        self.requests.append(params)
        if params.max_tokens == 13:
            raise ValueError("thirteen")
        number = None if lora_request is None else lora_request.lora_int_id
        dice = torch.Generator().manual_seed(params.seed)
        self._running[name] = NS(ids=list(prompt["prompt_token_ids"]), out=[], rows=[], how=params, dice=dice,
                                 adapter=number)  # fmt: skip

    def step(self) -> list[NS]:
        self.steps += 1
        done = []
        for name, one in list(self._running.items()):
            token, logprob = self._draw(one)
            one.out.append(token)
            one.rows.append({token: NS(logprob=logprob)})
            reason = self._over(one)
            output = NS(token_ids=one.out, logprobs=one.rows, finish_reason=reason)
            done.append(NS(request_id=name, finished=reason is not None, outputs=[output]))
            if reason is not None:
                del self._running[name]
        return done

    @torch.no_grad()
    def _draw(self, one: NS) -> tuple[int, float]:
        ids = torch.tensor([[*one.ids, *one.out]])
        if self.adapters:
            self.model.set_adapter(self.adapters.get(one.adapter, next(iter(self.adapters.values()))))
        silent = self.adapters and one.adapter is None
        with self.model.disable_adapter() if silent else contextlib.nullcontext():
            logits = self.model(input_ids=ids).logits[0, -1].float()
        if one.how.temperature == 0:
            logp = logits.log_softmax(-1)
            return int(logp.argmax()), float(logp.max())  # vLLM tells the log-prob at temperature 1
        logits = logits / one.how.temperature
        if one.how.top_k:
            logits[logits < logits.topk(one.how.top_k).values[-1]] = float("-inf")
        logp = logits.log_softmax(-1)
        noise = torch.empty_like(logp).exponential_(generator=one.dice)
        token = int((logp.exp() / noise).argmax())
        return token, float(logp[token])

    def _over(self, one: NS) -> str | None:
        text = self.tokenizer.decode(one.out, skip_special_tokens=True)
        if one.out[-1] in one.how.stop_token_ids or any(stop in text for stop in one.how.stop):
            return "stop"
        return "length" if len(one.out) == one.how.max_tokens else None


@contextlib.contextmanager
def installed():
    """`import vllm` finds this one."""
    fake: Any = ModuleType("vllm")
    fake.LLMEngine, fake.EngineArgs, fake.SamplingParams, fake.TokensPrompt = Engine, Params, Params, dict
    fake.platforms = NS(current_platform=NS(is_cpu=lambda: True))
    fake.lora, fake.sampling_params = ModuleType("vllm.lora"), ModuleType("vllm.sampling_params")
    fake.lora.request = ModuleType("vllm.lora.request")
    fake.lora.request.LoRARequest, fake.sampling_params.StructuredOutputsParams = LoRARequest, Params
    names = {"vllm": fake, "vllm.lora": fake.lora, "vllm.lora.request": fake.lora.request,
             "vllm.sampling_params": fake.sampling_params}  # fmt: skip
    kept = {name: sys.modules.get(name) for name in names}
    sys.modules.update(names)
    try:
        yield fake
    finally:
        for name, module in kept.items():
            if module is None:
                del sys.modules[name]
            else:
                sys.modules[name] = module
