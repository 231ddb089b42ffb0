# make quick: while you work. make test: everything, before a change goes in. make demo: see it work. make bench: measure.
# Each sets up .venv on a fresh machine.
PYTHON ?= python3
BIN := .venv/bin
# Tests start hundreds of Pythons: none is to compile flatout again.
export PYTHONDONTWRITEBYTECODE :=

.PHONY: demo quick test lint types unit gpu bench clean
.DEFAULT_GOAL := test

# What running needs, and what working on it needs: twice as much.
.venv/.runs: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[workloads]'
	touch $@

.venv/.installed: .venv/.runs
	$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[dev]'
	touch $@

demo: .venv/.runs
	$(BIN)/python -m benchmarks.demo

# Tests that start no process and compile nothing: below a minute on two cores.
quick: .venv/.installed
	$(BIN)/ruff check .
	$(BIN)/pytest tests/unit --quick --numprocesses 2

test: lint types gpu unit

lint: .venv/.installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports

types: .venv/.installed
	$(BIN)/mypy

# Three at once fill two cores, because tests wait a lot.
unit: .venv/.installed
	$(BIN)/pytest --numprocesses 3 --ignore tests/gpu -r R

# One at a time: two tests on one GPU measure each other. Skipped without a GPU.
gpu: .venv/.installed
	$(BIN)/pytest tests/gpu

bench: .venv/.installed
	$(BIN)/python benchmarks/observe.py top --out benchmarks/results/observe-top.json

clean:
	rm -rf .venv .mypy_cache .ruff_cache .pytest_cache .hypothesis
