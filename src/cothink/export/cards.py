"""Model cards: of an exported team, and of each policy in it."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

Team = Mapping[str, Any]

KINDS = {
    "full": "full weights",
    "merged": "full weights, the adapter merged in",
    "adapter": "a LoRA adapter",
    "outside": "a model behind a server",
}


def team(facts: Team, results: Mapping[str, Any]) -> str:
    """The card of the whole team; `facts` is what team.json says, `results` the run's evaluations by label."""
    block = facts["workflow"]
    options = ", ".join(f"{k}={v}" for k, v in block.items() if k != "name")
    lines = [
        *_head(facts, [p["base"] for p in facts["policies"].values() if p.get("base")], "transformers"),
        f"# {facts['name']}",
        "",
        f"A team of language-model agents trained with cothink. They talk as the workflow `{block['name']}` says"
        + (f" ({options})" if options else "") + ".",
        "",
        "| role | weights | temperature | at most |",
        "|---|---|---|---|",
        *(_seat(name, role, facts) for name, role in facts["roles"].items()),
        "",
        "`team.json` holds the system prompts, `recipe.yaml` plays the team, `training/` says how it was trained.",
        "",
        "```bash",
        "pip install 'cothink[serve]'",
        "cothink solve 'a question' --team .   # in this folder",
        "cothink serve .                       # an OpenAI-compatible endpoint",
        "```",
        "",
        "Each role on its own: see the card in its folder of `policies/`.",
        *_evaluations(results),
        *_made(facts),
    ]  # fmt: skip
    return "\n".join(lines)


def policy(name: str, facts: Team) -> str:
    """The card of one policy."""
    part = facts["policies"][name]
    roles = {role: seat for role, seat in facts["roles"].items() if seat["policy"] == name}
    adapter = part["kind"] == "adapter"
    lines = [
        *_head(facts, [part["base"]] if part["base"] else [], "peft" if adapter else "transformers"),
        f"# {facts['name']}: {name}",
        "",
        f"The weights of {_listed(roles)} in a team trained with cothink ({KINDS[part['kind']]}, from "
        f"`{part['model']}`). Alone it plays one part of the work: the card of the team says how the roles talk.",
        *(line for role, seat in roles.items() for line in _prompt(role, seat)),
        "",
        "```python",
        *(_peft(part["base"], name) if adapter else _transformers(name)),
        *_asking(next(iter(roles.values()), {})),
        "inputs = tokenizer.apply_chat_template(",
        '    chat, add_generation_prompt=True, return_dict=True, return_tensors="pt"',
        ")",
        "ids = model.generate(**inputs, max_new_tokens=256)",
        'print(tokenizer.decode(ids[0, inputs["input_ids"].shape[1]:], skip_special_tokens=True))',
        "```",
        "",
        "In vLLM: " + (
            f"`vllm serve {part['base']} --enable-lora --max-loras 2 --lora-modules {name}=policies/{name}`"
            if adapter else f"`vllm serve policies/{name}`"
        ) + ".",
        *_made(facts),
    ]  # fmt: skip
    return "\n".join(lines)


def _head(facts: Team, bases: list[str], library: str) -> Iterator[str]:
    """The YAML that the hub reads; bases that lie beside the card have no name there."""
    yield "---"
    yield f"library_name: {library}"
    yield "pipeline_tag: text-generation"
    hub = sorted({base for base in bases if not base.startswith("bases/")})
    if hub:
        yield f"base_model: {json.dumps(hub if len(hub) > 1 else hub[0])}"
    yield "tags: [cothink, multi-agent, reinforcement-learning]"
    yield "---"
    yield ""


def _seat(name: str, role: Mapping[str, Any], facts: Team) -> str:
    part = facts["policies"][role["policy"]]
    place = f"`{part['model']}`" if role["folder"] is None else f"[{role['folder']}]({role['folder']})"
    return f"| {name} | {place}, {KINDS[part['kind']]} | {role['temperature']:g} | {role['max_tokens']} tokens |"


def _prompt(role: str, seat: Mapping[str, Any]) -> list[str]:
    told = f"`{role}` speaks at temperature {seat['temperature']:g}, at most {seat['max_tokens']} tokens"
    if not seat["system"]:
        return ["", f"{told}, without a system prompt."]
    return ["", f"{told}, under this system prompt:", "", "````text", seat["system"], "````"]


def _asking(seat: Mapping[str, Any]) -> list[str]:
    asked = '{"role": "user", "content": "a question"}'
    if not seat.get("system"):
        return [f"chat = [{asked}]"]
    return [f"system = {json.dumps(seat['system'])}", f'chat = [{{"role": "system", "content": system}}, {asked}]']


def _transformers(name: str) -> list[str]:
    return [
        "from transformers import AutoModelForCausalLM, AutoTokenizer  # in the team's folder",
        f'model = AutoModelForCausalLM.from_pretrained("policies/{name}")',
        f'tokenizer = AutoTokenizer.from_pretrained("policies/{name}")',
    ]


def _peft(base: str, name: str) -> list[str]:
    return [
        "from peft import PeftModel  # in the team's folder",
        "from transformers import AutoModelForCausalLM, AutoTokenizer",
        f'model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained("{base}"), "policies/{name}")',
        f'tokenizer = AutoTokenizer.from_pretrained("policies/{name}")',
    ]


def _evaluations(results: Mapping[str, Any]) -> Iterator[str]:
    found = {label: v for label, v in results.items() if {"accuracy", "low", "high", "n"} <= v.keys()}
    if not found:
        return
    yield from (
        "",
        "## Evaluations during training",
        "",
        "| | accuracy | 95 % interval | questions |",
        "|---|---|---|---|",
    )
    for label, v in found.items():
        yield f"| {label} | {v['accuracy']:.3f} | {v['low']:.3f} to {v['high']:.3f} | {v['n']} |"


def _made(facts: Team) -> Iterator[str]:
    yield ""
    known = ", ".join(f"{k} {v}" for k, v in facts["versions"].items() if v != "not installed")
    yield f"Checkpoint `{facts['checkpoint']}`, made with {known}. The licence of the base model holds."
    yield ""


def _listed(roles: Mapping[str, Any]) -> str:
    names = [f"`{name}`" for name in roles]
    if not names:
        return "no role"
    return f"the role {names[0]}" if len(names) == 1 else f"the roles {', '.join(names[:-1])} and {names[-1]}"
