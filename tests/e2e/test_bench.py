"""Every benchmark runs in its smallest size and prints its table of ratios; what it counts is right."""

from __future__ import annotations

import importlib
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

BENCH = Path(__file__).parents[2] / "bench"
NAMES = ("common", "generation", "step", "turns", "memory", "training", "gpu")
SMALL = {
    "generation": "--prompts 2 --siblings 2 --shortest 2 --longest 4",
    "step": "--prompts 2 --siblings 2 --longest 4",
    "turns": "--tasks 1 --tokens 3 --turns 1 2 --branches 1 2",
    "training": "--prompts 2 --siblings 2 --shortest 2 --longest 4",
    "memory": "--prompts 2 --siblings 2 --shortest 2 --longest 4",
}
RATIO = re.compile(r"^.*\bratio\b.*\n(?:.+\n)*?.* (\d+\.\d\d)x", re.M)


@pytest.fixture
def bench(monkeypatch):
    """The scripts as modules, gone again afterwards: their names are plain words."""
    monkeypatch.syspath_prepend(str(BENCH))
    threads = torch.get_num_threads()
    monkeypatch.setenv("OMP_NUM_THREADS", "1")  # the scripts set it for their children
    yield importlib.import_module
    torch.set_num_threads(threads)
    for name in NAMES:
        sys.modules.pop(name, None)


@pytest.fixture
def script(bench, monkeypatch, capsys):
    """Runs one script in this process and returns what it printed."""

    def run(name: str, words: str) -> str:
        monkeypatch.setattr(sys, "argv", [f"{name}.py", *words.split(), "--threads", "1"])
        module = bench(name)
        monkeypatch.setattr(bench("common"), "CEILING_SECONDS", 0.02)
        module.main()
        return capsys.readouterr().out

    return run


def test_prefixes_count_what_must_be_computed(bench):
    prefixes = bench("common").Prefixes()
    prefixes.add((1, 2, 3), (4, 5))
    assert prefixes.least == 3
    prefixes.add((1, 2, 3), (6,))  # a sibling reads nothing new
    assert prefixes.least == 3
    prefixes.add((1, 2, 3, 4, 5, 7))  # 4 was read when 5 was sampled, 5 itself never: 5 and 7 are new
    assert prefixes.least == 5
    prefixes.add((1, 9))
    assert prefixes.least == 6


def test_a_table_shows_numbers_a_person_can_read(bench, capsys):
    common = bench("common")
    common.table(("system", "n", "ratio"), [("ours", 12345, common.times(1.5)), ("theirs", 0.01234, float("nan"))])
    assert capsys.readouterr().out.splitlines() == [
        "system       n  ratio",
        "ours    12,345  1.50x",
        "theirs  0.0123      -",
    ]


def test_the_ceiling_weighs_shapes_by_their_flops(bench):
    common = bench("common")
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Linear(64, 256))
    assert 1e7 < common.ceiling(model, "float32", seconds=0.02) < 1e13  # FLOP/s, neither GFLOP/s nor seconds


@pytest.mark.parametrize("name", ["turns", "training"])
def test_a_benchmark_prints_its_ratios(script, name):
    out = script(name, f"{SMALL[name]} --repeats 1")
    assert RATIO.search(out), out
    assert f"torch {torch.__version__}" in out and "1 threads" in out and "GFLOP/s" in out


def test_a_step_is_compared_with_trl(script):
    pytest.importorskip("trl")
    out = script("step", f"{SMALL['step']} --repeats 1")
    assert RATIO.search(out), out
    assert re.search(r"^trl \d", out, re.M) and re.search(r"^cothink rl ", out, re.M)


def test_a_memory_case_counts_what_is_held(script, bench, monkeypatch):
    memory = bench("memory")
    held = []
    work = (lambda: None, lambda: held.append(torch.ones(16 << 20)))  # 64 MiB of float32
    monkeypatch.setattr(memory, "prepared", lambda case, options: work)
    found = json.loads(script("memory", f"{SMALL['memory']} --case generation/cothink"))
    assert 60 < (found["peak"] - found["before"]) / memory.MIB < 100


@pytest.mark.parametrize("words", ["--repeats 0", "--prompts -1"])
def test_sizes_that_measure_nothing_are_refused(script, capsys, words):
    with pytest.raises(SystemExit):
        script("training", words)
    assert "it must be at least 1" in capsys.readouterr().err


def test_generation_is_compared_and_a_vllm_that_cannot_start_is_skipped(script):
    out = script("generation", f"{SMALL['generation']} --repeats 1 --vllm {sys.executable}")
    assert RATIO.search(out), out
    assert all(re.search(f"^{re.escape(n)} .*x", out, re.M) for n in ("cothink local", "model.generate")), out
    assert "vllm: skipped, vllm stopped: ModuleNotFoundError" in out, out


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has the GPU it asks for")
def test_the_gpu_benchmark_says_what_it_needs(bench, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["gpu.py"])
    with pytest.raises(SystemExit, match="needs a CUDA GPU"):
        bench("gpu").main()


@pytest.mark.slow
@pytest.mark.parametrize("name", list(SMALL))
def test_a_script_runs_from_the_command_line(name):
    command = [sys.executable, str(BENCH / f"{name}.py"), *SMALL[name].split(), "--repeats", "1", "--threads", "1"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr
    assert RATIO.search(done.stdout), done.stdout


@pytest.mark.slow
def test_the_gpu_parts_run_on_a_random_model(bench, monkeypatch, tmp_path, capsys):
    gpu = bench("gpu")
    small = {"hidden_size": 32, "intermediate_size": 64, "layers": 2, "heads": 2, "groups": 1}
    monkeypatch.setitem(gpu.SHAPES, "135m", small)
    monkeypatch.setattr(gpu, "VOCABULARY", 512)
    monkeypatch.delenv("COTHINK_VLLM_PYTHON", raising=False)
    tiny = {"prompts": 2, "siblings": 2, "longest": 4, "threads": 1, "repeats": 1}
    gpu.run(gpu.random_model("135m", str(tmp_path)), ["generation", "step", "training"], dict.fromkeys(SMALL, tiny))
    out = capsys.readouterr().out
    assert all(RATIO.search(part) for part in re.split(r"^\(\w+: \d+ s\)$", out, flags=re.M)[:3]), out
