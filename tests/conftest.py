"""Fixtures shared by all tests: a tiny random model with a tokenizer, real data where it is present."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("OMP_NUM_THREADS", "1")  # small matrices: more threads only wait for each other

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory) -> Path:
    """A random two-layer Llama with a byte-level tokenizer, saved as an ordinary model folder."""
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=["<|pad|>", "<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    bpe.train_from_iterator(["system user assistant question answer [FINISH] plan solve"] * 10, trainer)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=bpe, eos_token="<|im_end|>", pad_token="<|pad|>", chat_template=CHATML
    )
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        initializer_range=0.3,
    )
    folder = tmp_path_factory.mktemp("tiny")
    LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def data_root() -> Path:
    """Real questions; the test is skipped where they are absent."""
    root = Path(os.environ.get("COTHINK_DATA", Path(__file__).parents[2] / "shared" / "data"))
    if not root.is_dir():
        pytest.skip("real data is not here: set COTHINK_DATA")
    return root


RECIPE = """
name: {name}
seed: 0
team:
  workflow: {{name: rema, max_turns: 1}}
  roles: {{meta: {{policy: p, system: Plan.}}, reasoning: {{policy: p}}}}
policies: {{p: {{model: builtin:tiny, learning_rate: {rate}}}}}
tasks: {{train: {{name: wordsums}}, test: {{name: wordsums, split: test}}}}
stages:
- {{kind: evaluate, on: test, label: before}}
- {{kind: rl, on: train, steps: 4}}
"""


@pytest.fixture
def made_run():
    """Writes a run folder by hand: `made_run(folder, metrics=rows, episodes={"01-rl/000001": rows}, ...)`."""

    def make(folder: Path, *, metrics=(), episodes=None, results=None, state=None, rate=0.001, **files: Any) -> Path:
        folder.mkdir(parents=True)
        (folder / "recipe.yaml").write_text(RECIPE.format(name=folder.name, rate=rate))
        manifest = {"seed": 0, "started": "2026-01-02T03:04:05+0000", "command": ["cothink", "run"], "versions": {}}
        written = {"manifest": manifest, "results": results or {}, "state": state or {"stage": 1, "step": 0}, **files}
        for name, value in written.items():
            (folder / f"{name}.json").write_text(json.dumps(value))
        (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in metrics))
        for name, rows in (episodes or {}).items():
            path = folder / "episodes" / f"{name}.jsonl"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        return folder

    return make


@pytest.fixture
def made_episode():
    """A stored episode: `made_episode("t1", ("meta", "add"), ("reasoning", "\\boxed{4}"), gold="4", accuracy=1.0)`."""

    def make(task: str, *said: tuple[str, str], gold: str = "4", accuracy: float = 1.0, **more: Any) -> dict[str, Any]:
        turns = [
            {"id": str(k), "parents": [str(k - 1)] if k else [], "role": role, "policy": "p", "round": k // 2,
             "text": text, "tokens": len(text.split()), "finish_reason": "stop", "return": accuracy,
             "advantage": accuracy - 0.5}
            for k, (role, text) in enumerate(said)
        ]  # fmt: skip
        rewards = [{"turn": str(len(turns) - 1), "name": "answer.correct", "value": accuracy, "to": "team"}]
        return {"id": f"{task}#0", "task": task, "question": f"question {task}", "gold": gold, "level": 2,
                "finish": "finished", "graded": str(len(turns) - 1), "accuracy": accuracy,
                "verdict": "right" if accuracy == 1.0 else "wrong", "rewards": rewards, "turns": turns,
                "set": "test", "play": 0, **more}  # fmt: skip

    return make
