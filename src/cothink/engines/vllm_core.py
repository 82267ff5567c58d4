"""What is said to vLLM and what it says back: settings, completions, and weights on their way through a folder.

Nothing here imports vLLM, so all of it is tested without one.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cothink.types import Completion, PlayError, Sampling

if TYPE_CHECKING:
    from cothink.chat import TemplateCodec
    from cothink.engines.requests import Stops
    from cothink.policy import Policy

RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""The adapter ranks that vLLM makes room for (`vllm.config.lora`)."""
LOGPROBS = "processed_logprobs"
"""vLLM's name for log-probs after temperature, top-k, top-p and grammar: those of what was sampled."""


@dataclass(frozen=True, slots=True)
class Answer:
    """One answer of vLLM; `reason` is its own word for why it ended."""

    ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    reason: str | None


@dataclass(frozen=True, slots=True)
class Hosted:
    """What one vLLM has to hold: a model, the policy of its full weights (or of the bare base), the adapters' rank."""

    model: str
    dtype: str
    whole: str | None
    adapters: int
    rank: int


def moved(what: Hosted, place: Path) -> Hosted:
    """The same, with the model read from a folder."""
    return replace(what, model=str(place))


def place_seed(seed: int, place: int) -> int:
    """The 63-bit seed of the answer at one place: its own stream, whatever runs beside it."""
    digest = hashlib.blake2b(f"{seed}/{place}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


def settings(sampling: Sampling, codec: TemplateCodec, room: int, seed: int) -> dict[str, Any]:
    """The sampling parameters of one answer, by the names that vLLM's SamplingParams and its server share."""
    stop = list(dict.fromkeys((*sampling.stop, *codec.stop_strings)))
    return {
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        "max_tokens": room,
        "seed": seed,
        "stop": stop,
        "stop_token_ids": list(codec.stop_ids),
        "include_stop_str_in_output": bool(stop),
        "logprobs": 0,  # that of the sampled token alone
    }


def schema_of(text: str) -> dict[str, Any]:
    """A JSON schema with the layout our own grammar uses, in llguidance's words; vLLM passes them on."""
    from cothink.grammar import LAYOUT

    return {**json.loads(text), "x-guidance": dict(LAYOUT)}


def keep_grammar(policy: Policy, schema: str) -> None:
    """Makes the grammar that vLLM follows for a schema, once, for the policy's trainer."""
    if schema not in policy.grammars:
        from cothink.attention import head
        from cothink.grammar import Grammar

        width = head(policy.model).weight.shape[0]
        # vLLM ends such an answer with the tokenizer's own end token alone
        policy.grammars[schema] = Grammar(policy.tokenizer, schema, size=width)


def check_schema(policy: Policy, said: Completion) -> None:
    """PlayError where vLLM followed another grammar than ours: its log-probs would not be those that are trained."""
    from cothink.grammar import replay

    assert said.schema is not None
    try:
        replay(policy.grammars[said.schema], said.output_ids)
    except ValueError as error:
        raise PlayError(
            f"vLLM followed another grammar than ours ({error}); "
            'start the server with --structured-outputs-config \'{"backend": "guidance"}\''
        ) from None


def completion(
    answer: Answer,
    prompt_ids: tuple[int, ...],
    sampling: Sampling,
    codec: TemplateCodec,
    stops: Stops,
    version: int,
) -> Completion:
    """The completion of one answer: our own decoding of its ids, cut at the first stop string.

    Raises PlayError for an answer that vLLM did not finish.
    """
    if len(answer.ids) != len(answer.logprobs):
        raise PlayError(f"vLLM answered with {len(answer.ids)} token ids and {len(answer.logprobs)} log-probs")
    if answer.reason not in ("stop", "length"):
        raise PlayError(f"vLLM ended an answer with {answer.reason!r} after {len(answer.ids)} tokens; its log says why")
    text = None
    if answer.reason == "stop" and answer.ids[-1:] and answer.ids[-1] not in codec.stop_ids:
        text = stops.cut(answer.ids, tuple(dict.fromkeys((*sampling.stop, *codec.stop_strings))))
    if text is None or (codec.stop_strings and text.endswith(codec.stop_strings)):
        text = codec.decode(answer.ids)  # the layout's own stop is no text
    # A greedy answer is certain: vLLM tells the log-prob that its token would have had at temperature 1.
    logprobs = answer.logprobs if sampling.temperature > 0 else (0.0,) * len(answer.ids)
    return Completion(text, prompt_ids, answer.ids, logprobs, answer.reason, version, schema=sampling.schema)  # type: ignore[arg-type]


def hosted(policies: Mapping[str, Policy], dtype: str, max_lora_rank: int | None) -> Hosted:
    """What these policies need; PlayError where one vLLM cannot hold them."""
    from cothink.attention import causal

    sources = {name: str(causal(p.model).config._name_or_path) for name, p in policies.items()}
    kinds = {(sources[name], sampled_dtype(p, dtype)) for name, p in policies.items()}
    if len(kinds) > 1:
        said = "; ".join(sorted(f"{source} in {how}" for source, how in kinds))
        raise PlayError(f"engine vllm holds one model, and these policies have {said}: use one, or engine: local")
    ((model, how),) = kinds
    whole = [name for name, p in policies.items() if p.adapter is None]
    if len(whole) > 1:
        raise PlayError(
            f"engine vllm holds one set of full weights, and {', '.join(whole)} have one each; "
            "write lora_r: 16 for each policy, let the roles share one policy, or use engine: local"
        )
    adapted = [p for p in policies.values() if p.adapter is not None]
    for name in whole if adapted else ():
        _same_base(name, policies[name], adapted[0])
    needed = max((p.model.peft_config[p.adapter].r for p in adapted), default=1)
    return Hosted(model, how, whole[0] if whole else None, len(adapted), lora_rank(needed, max_lora_rank))


def lora_rank(needed: int, asked: int | None) -> int:
    """The smallest rank that vLLM makes room for which holds the adapters; PlayError for one it does not know."""
    if asked is not None and asked not in RANKS:
        raise PlayError(f"engine vllm: max_lora_rank={asked}; vLLM takes one of {', '.join(map(str, RANKS))}")
    found = next((rank for rank in RANKS if rank >= max(needed, asked or 0)), None)
    if found is None:
        raise PlayError(f"an adapter of rank {needed} is more than vLLM holds ({RANKS[-1]}); lower lora_r")
    return found


def sampled_dtype(policy: Policy, dtype: str) -> str:
    """The precision a policy is sampled in: its own, or the one that the engine was given."""
    if dtype != "own":
        return dtype
    return "bfloat16" if policy.mixed else str(policy.model.dtype).removeprefix("torch.")


def _same_base(name: str, whole: Policy, adapted: Policy) -> None:
    """A policy that speaks through the bare base of others' adapters must have that base's very weights."""
    base = adapted.model.get_base_model().state_dict()
    base = {key.replace(".base_layer.", "."): value for key, value in base.items() if "lora_" not in key}
    own = whole.model.state_dict()
    if own.keys() != base.keys() or any(not bool((own[k] == base[k]).all()) for k in own):
        raise PlayError(
            f"policy {name}: its full weights have been trained, so vLLM cannot hold them beside the adapters of the "
            "other policies; give it lora_r too, or use engine: local"
        )


def write(policy: Policy, folder: Path) -> None:
    """Writes a policy's weights as vLLM reads them: a PEFT adapter, or a model folder with its tokenizer."""
    folder.mkdir(parents=True)
    if policy.adapter is None:
        policy.model.save_pretrained(folder)
        policy.tokenizer.save_pretrained(folder)
    else:
        from peft import get_peft_model_state_dict
        from safetensors.torch import save_file

        found = get_peft_model_state_dict(policy.model, adapter_name=policy.adapter)
        config = policy.model.peft_config[policy.adapter]
        save_file({k: v.detach().contiguous().cpu() for k, v in found.items()}, folder / "adapter_model.safetensors")
        config.save_pretrained(str(folder))
    for file in folder.glob("*.safetensors"):
        file.chmod(0o644)  # safetensors writes 0600, and a server may be another user


class Handover:
    """The folders through which weights reach vLLM, a new one each time; the one before is removed after the next.

    They lie inside `folder`, or where temporary files do, and go when the program ends.
    """

    def __init__(self, folder: str | None = None):
        if folder is not None:
            Path(folder).mkdir(parents=True, exist_ok=True)
        self._holder = tempfile.TemporaryDirectory(prefix="cothink-", dir=folder)
        self.root = Path(self._holder.name).resolve()
        self.root.chmod(0o755)  # a server may be another user
        self._serial = 0
        self._last: dict[str, Path] = {}

    def put(self, policy: Policy) -> tuple[str, Path]:
        """Writes the weights under a name that was never used: vLLM keeps what it computed under a name."""
        self._serial += 1
        place = self.root / f"{policy.name}.{self._serial}"
        write(policy, place)
        return f"{self.root.name}.{place.name}", place

    def done(self, policy: str, place: Path) -> None:
        """The weights in `place` have been taken: those of this policy from before are no longer needed."""
        last = self._last.pop(policy, None)
        if last is not None:
            shutil.rmtree(last)
        self._last[policy] = place
