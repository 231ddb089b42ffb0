# One way in: `make demo`, `make test`, `make bench`. Each sets up .venv by itself on a fresh machine.
PYTHON ?= python3
BIN := .venv/bin

.PHONY: demo test lint types unit gpu bench clean
.DEFAULT_GOAL := test

# What it takes to run, and what it takes to work on it: twice as much.
.venv/.runs: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[workloads]'
	touch $@

.venv/.installed: .venv/.runs
	$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[dev]'
	touch $@

demo: .venv/.runs
	$(BIN)/python -m benchmarks.demo

test: lint types gpu unit

lint: .venv/.installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports

types: .venv/.installed
	$(BIN)/mypy

# Three at once fill two cores: tests wait a lot. Many are about time, and cores are shared: what fails is run once
# more, and listed.
unit: .venv/.installed
	$(BIN)/pytest --numprocesses 3 --ignore tests/gpu --reruns 1 -r R

# One at a time: two tests on one card measure each other. Skipped without a GPU.
gpu: .venv/.installed
	$(BIN)/pytest tests/gpu

bench: .venv/.installed
	$(BIN)/python benchmarks/observe.py top --out benchmarks/results/observe-top.json

clean:
	rm -rf .venv .mypy_cache .ruff_cache .pytest_cache .hypothesis
