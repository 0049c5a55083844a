# Every target sets up what it needs in .venv; nothing has to be activated.
# PYTHON=/path/to/python chooses the interpreter (>= 3.12), VENV=dir another environment.

VENV ?= .venv
WORKERS ?= 2
PYTEST_ARGS ?=
BIN := $(VENV)/bin

.DEFAULT_GOAL := help
.PHONY: help setup test unit test-aot test-aot-tpu test-aot-gpu lint format types demo docs constraints clean

help: ## show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-12s %s\n", $$1, $$2 }' '$(firstword $(MAKEFILE_LIST))'

setup: ## make or complete the virtual environment
	@VENV='$(VENV)' sh scripts/setup.sh

test: lint types unit ## everything that has to pass: lint, types and the tests

unit: setup ## the tests alone; PYTEST_ARGS="-k snapkv" chooses some
	'$(BIN)/python' -m pytest -n $(WORKERS) --dist loadfile $(PYTEST_ARGS)

test-aot: test-aot-tpu test-aot-gpu ## compile every kernel for TPU v5e and v6e and for H200, without the devices

test-aot-tpu test-aot-gpu: test-aot-%: # side by side with make -j2 test-aot
	@sh scripts/setup_aot.sh $*
	KVJAX_KERNELS=$* .venv-aot-$*/bin/python -m pytest --confcutdir=tests/aot tests/aot

lint: setup ## ruff's rules and its formatting
	'$(BIN)/python' -m ruff check .
	'$(BIN)/python' -m ruff format --check .

types: setup ## mypy on kvjax and kernels_pallas
	'$(BIN)/python' -m mypy

format: setup ## let ruff rewrite the code
	'$(BIN)/python' -m ruff check --fix .
	'$(BIN)/python' -m ruff format .

demo: setup ## a real model answers from bounded caches; writes runs/demo/report.html
	'$(BIN)/python' -m kvjax.cli.main eval --config configs/demo.yaml

docs: setup ## the documentation as web pages, in build/site
	'$(BIN)/python' -m mkdocs build --strict

constraints: ## resolve constraints.txt anew
	sh scripts/constraints.sh

clean: ## remove the environment and all caches
	rm -rf '$(VENV)' '$(VENV).lock' .venv-peer .venv-aot-tpu .venv-aot-gpu build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis
