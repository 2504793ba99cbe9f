# `make demo` and `make test` need Python 3.11+ with venv, and nothing else.
PYTHON ?= python3
BIN := .venv/bin

.PHONY: demo test lint types check wheel-test clean

.venv/.core: pyproject.toml
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --editable .
	touch $@

.venv/.test: pyproject.toml
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --editable '.[test]'
	touch $@ .venv/.core

demo: .venv/.core
	$(BIN)/stree-jax generate "def fibonacci(n):" --max-new-tokens 128 --compare

test: .venv/.test
	$(BIN)/pytest -n 2 --dist loadfile -q

lint: .venv/.test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: .venv/.test
	$(BIN)/mypy

# The built wheel, in a virtual environment and a folder of its own.
wheel-test: .venv/.test
	tests/wheel_smoke.sh $(PYTHON)

check: lint types test wheel-test

clean:
	rm -rf .venv build dist *.egg-info
