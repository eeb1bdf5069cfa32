# jaggrl. `make help` lists the targets.

SHELL := /bin/bash
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

# The first interpreter that is new enough (3.11+); give another one with `make setup PYTHON=...`.
PYTHON ?= $(shell for p in python3 python3.12 python3.11 python3.13; do \
	$$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$p && break; done)

# Two torch processes with two threads each run many times slower than with one each on two cores.
JOBS ?= 2
# The hpsv2 package asks for old libraries, so it lies outside the environment; only its parity test sees it.
REFERENCE := $(CURDIR)/$(VENV)/reference
PYTEST := OMP_NUM_THREADS=1 WANDB_MODE=disabled HF_HUB_OFFLINE=1 PYTHONPATH=$(REFERENCE) $(BIN)/python -m pytest

.PHONY: help setup train train-seeds test test-slow test-all smoke format check clean
.DEFAULT_GOAL := help

help: ## print this list
	@grep -hE '^[a-z][a-z0-9-]*:.*## ' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  %-14s %s\n", $$1, $$2}'

setup: $(STAMP) ## make the local environment .venv (quick when nothing changed)

$(STAMP): pyproject.toml constraints.txt
	@test -n "$(PYTHON)" || { echo "no Python 3.11 or newer found: install one, or make setup PYTHON=/path/to/python" >&2; exit 1; }
	@$(BIN)/python -m pip --version >/dev/null 2>&1 || $(PYTHON) -m venv $(VENV) \
		|| { echo "cannot make a virtual environment with $(PYTHON): install its venv module" \
			"(on Debian and Ubuntu: apt install python3-venv)" >&2; exit 1; }
	@echo "Installing into $(VENV) (torch is large: the first time takes minutes)"
	$(BIN)/python -m pip install --disable-pip-version-check --quiet -c constraints.txt -e '.[dev]'
	$(BIN)/python -m pip install --disable-pip-version-check --quiet --no-deps --upgrade --target $(REFERENCE) hpsv2==1.2.0 \
		|| echo "the hpsv2 package is not available: its parity test will be skipped"
	@touch $(STAMP)

train: setup ## fine-tune the shapes world's FLUX with DanceGRPO and JAGG (a few minutes on two cores)
	$(BIN)/python -m jaggrl.train experiment=shapes_dance resume=none

train-seeds: setup ## the same with three seeds, one after another, and a summary
	$(BIN)/python -m jaggrl.train -m experiment=shapes_dance resume=none seed=0,1,2

test: setup ## the default tests (minutes)
	$(PYTEST) -n $(JOBS) --dist worksteal

test-slow: setup ## only the slow tests: whole trainings, several ranks (up to an hour)
	$(PYTEST) -m slow

test-all: setup ## all tests, the slow ones too
	$(PYTEST) -m 'slow or not slow'

smoke: setup ## every algorithm with every backward strategy, what is refused and why, and a whole small run
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.test_matrix
	$(BIN)/python -m jaggrl.train debug=smoke resume=none

format: setup ## format the code and mend what the linter can
	$(BIN)/ruff check --fix . ; $(BIN)/ruff format .

check: setup ## linter, formatter and type checker, changing nothing
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

clean: ## remove caches and builds (neither .venv nor outputs)
	rm -rf build dist *.egg-info .pytest_cache .ruff_cache .mypy_cache
	find . -name __pycache__ -type d -not -path './$(VENV)/*' -prune -exec rm -rf {} +
