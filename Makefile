# `make demo`   train a small mixture of experts through a real expert server
# `make test`   the whole test suite
# `make check`  what CI runs: format, lint, types, generated code, tests, examples
# `make races`  the tests, with threads that take turns 250 times as often as they do by themselves
# `make bench`  every benchmark, each printing its table
SHELL := /bin/bash
PYTHON ?= python3
BIN := .venv/bin
# Of tests at once: many wait for a server, a signal or a clock, so two would leave two cores idle.
JOBS ?= 3

.PHONY: setup demo test races check lint types proto proto-check examples bench soak clean
.DEFAULT_GOAL := test

# The stamp is written last: an interrupted set-up is done again.
.venv/.ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv --clear .venv
	$(BIN)/python -m pip install --quiet --constraint constraints.txt torch
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[dev]'
	touch $@

# tritonclient wants another protobuf than we do. Where it cannot be installed, its test is skipped.
.venv-triton/.ready: Makefile
	-$(PYTHON) -m venv --clear .venv-triton && .venv-triton/bin/python -m pip install --quiet 'tritonclient[grpc]==2.73.0' && touch $@

setup: .venv/.ready

demo: setup
	$(BIN)/python examples/demo.py --out demo-out

# pytest-timeout needs the interpreter lock. A test that freezes with it is told of in C, and ends its process.
FROZEN := -o faulthandler_timeout=1200 -o faulthandler_exit_on_timeout=true

test: setup .venv-triton/.ready
	[ ! -e .venv-triton/.ready ] || export TRITONCLIENT_PYTHON=$(CURDIR)/.venv-triton/bin/python; \
	$(BIN)/python -m pytest --numprocesses $(JOBS) --dist worksteal $(FROZEN)

races: setup
	$(BIN)/python -m pytest --numprocesses $(JOBS) --dist worksteal $(FROZEN) --switch-interval 2e-5

lint: setup
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .

types: setup
	$(BIN)/mypy

proto: setup
	$(BIN)/python -m moe_autograd.wire.generate

proto-check: setup
	$(BIN)/python -m moe_autograd.wire.generate --check

examples: setup
	set -e; for example in examples/[0-9]*.py; do echo "== $$example"; $(BIN)/python -W error $$example; done

check: lint types proto-check test examples

bench: setup
	set -e; for folder in benchmarks/*/; do name=$$(basename $$folder); [ "$$name" = __pycache__ ] || { echo "== $$name"; $(BIN)/python -m benchmarks.$$name.main; }; done

soak: setup
	$(BIN)/python -m pytest -m soak --soak-minutes 20

clean:
	rm -rf .venv .venv-triton demo-out build dist *.egg-info
