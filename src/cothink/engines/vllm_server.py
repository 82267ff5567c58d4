"""A vLLM that somebody else started with `vllm serve`: token ids in and out, adapters loaded while it runs.

What the server must be told is in docs/cluster.md; whatever can be asked of it is asked once, at the beginning.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from cothink.engines.vllm_core import LOGPROBS, Answer, Hosted, schema_of
from cothink.types import PlayError

CERTAIN = -1e-3
"""A token that was the only one left (top_k 1) has log-prob 0, if log-probs are of what was sampled."""
WAIT = 0.5
"""Seconds before the first retry; twice as many before each further one."""


class Server:
    """Speaks to one vLLM server; PlayError with what to change where it cannot serve these policies."""

    def __init__(self, url: str, what: Hosted, timeout: float, retries: int):
        import httpx

        self._http = httpx
        self.url, self._timeout, self._retries = url.rstrip("/").removesuffix("/v1"), timeout, retries
        self._clients: dict[Any, Any] = {}
        cards = self._call("GET", "/v1/models")["data"]
        bases = [card for card in cards if not card.get("parent")]
        self._base = next((card for card in bases if what.model in (card["id"], card.get("root"))), None)
        if self._base is None:
            found = ", ".join(str(card.get("root") or card["id"]) for card in bases)
            raise PlayError(f"the server at {self.url} has {found}; start it with: vllm serve {what.model}")
        self.context = int(self._base["max_model_len"])
        self._what = what
        self._look_at_logprobs()

    async def ask(
        self, adapter: str | None, prompt: tuple[int, ...], settings: Mapping[str, Any], schema: str | None
    ) -> Answer:
        """One answer; the same request again after a broken connection, which its seed makes harmless."""
        body = self._request(adapter, prompt, settings)
        if schema is not None:
            body["structured_outputs"] = {"json": schema_of(schema)}
        for attempt in range(self._retries + 1):
            try:
                reply = await self._client().post(f"{self.url}/v1/completions", json=body)
                if reply.status_code < 500 or attempt == self._retries:
                    return _answer(self._read(reply))
            except self._http.TransportError as error:
                if attempt == self._retries:
                    raise PlayError(f"the vLLM server at {self.url} does not answer: {error!r}") from error
            await asyncio.sleep(WAIT * 2**attempt)
        raise AssertionError("the last attempt returns or raises")

    def adapter(self, name: str, folder: Path, old: str | None) -> None:
        """Loads an adapter from a folder that the server can read, then lets the old one go."""
        try:
            self._call("POST", "/v1/load_lora_adapter", {"lora_name": name, "lora_path": str(folder)})
        except PlayError as error:
            raise PlayError(
                f"{error}\nto load adapters the server needs VLLM_ALLOW_RUNTIME_LORA_UPDATING=1 and --enable-lora "
                f"--max-loras {self._what.adapters + 1} --max-lora-rank {self._what.rank}, and it must be able to read "
                f"{folder} (engine.folder names another place)"
            ) from None
        if old is not None:
            self._call("POST", "/v1/unload_lora_adapter", {"lora_name": old})

    def weights(self, folder: Path) -> None:
        """Refused: what a server reads anew it may go on computing with old (docs/cluster.md)."""
        raise PlayError(
            "a vLLM server takes adapters, not full weights; give the policy lora_r: 16, or leave engine.server out"
        )

    def _request(self, adapter: str | None, prompt: tuple[int, ...], settings: Mapping[str, Any]) -> dict[str, Any]:
        assert self._base is not None
        return {"model": adapter or self._base["id"], "prompt": list(prompt), "return_token_ids": True, **settings}

    def _look_at_logprobs(self) -> None:
        """A server that tells the log-probs of the model, not of what was sampled, would spoil training in silence."""
        only = {"max_tokens": 1, "temperature": 1.0, "top_k": 1, "logprobs": 0, "seed": 0}
        said = _answer(self._call("POST", "/v1/completions", self._request(None, (0, 1, 2, 3), only)))
        if not said.ids or not said.logprobs or said.logprobs[0] < CERTAIN:
            raise PlayError(
                f"the server at {self.url} tells other log-probs than those of what was sampled; "
                f"start it with --logprobs-mode {LOGPROBS}"
            )

    def _call(self, method: str, path: str, body: Any = None) -> Any:
        try:
            reply = self._http.request(method, self.url + path, json=body, timeout=self._timeout)
        except self._http.TransportError as error:
            raise PlayError(f"no vLLM server at {self.url}: {error}; start vllm serve, or write its address") from error
        return self._read(reply)

    def _read(self, reply: Any) -> Any:
        if reply.status_code >= 400:
            path = reply.request.url.path
            raise PlayError(f"the vLLM server at {self.url} said {reply.status_code} to {path}: {reply.text[:300]}")
        return reply.json() if reply.headers.get("content-type", "").startswith("application/json") else None

    def _client(self) -> Any:
        """One client for each event loop: its connections belong to the loop that opened them."""
        loop = asyncio.get_running_loop()
        self._clients = {known: client for known, client in self._clients.items() if not known.is_closed()}
        if loop not in self._clients:
            many = self._http.Limits(max_connections=None)
            self._clients[loop] = self._http.AsyncClient(timeout=self._timeout, limits=many)
        return self._clients[loop]


def _answer(reply: Any) -> Answer:
    """The first choice of a reply; one without token ids has none."""
    choice = reply["choices"][0]
    logprobs = (choice.get("logprobs") or {}).get("token_logprobs") or ()
    return Answer(tuple(choice.get("token_ids") or ()), tuple(map(float, logprobs)), choice["finish_reason"])
