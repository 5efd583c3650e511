# `make help` lists the targets. All files made here are in .venv and .cache, which git ignores.

PYTHON ?= python3
WORKERS ?= 2

VENV := .venv
BIN := $(VENV)/bin
CACHE := .cache
# pip shows its progress only at a terminal.
PIP := $(BIN)/python -m pip --disable-pip-version-check $(shell [ -t 2 ] || echo --quiet)

# The newest supported Transformers is the pinned one; the lowest has its own few pins.
NEWEST := $(shell sed -n 's/^transformers==//p' constraints.txt)
FLOOR_PINS := tests/compat/requirements-floor.txt
FLOOR := $(CACHE)/floor
APART_PINS := tests/models/requirements-apart.txt
APART := $(CACHE)/apart
SDIST := $(CACHE)/transformers-$(NEWEST)

# Test workers share the cores: one thread each. The tests compare with a CPU; those for a GPU are a part of `make gpu`.
ON_CPU := CUDA_VISIBLE_DEVICES= OMP_NUM_THREADS=1 MKL_NUM_THREADS=1 TOKENIZERS_PARALLELISM=false

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help quickstart test slow lint docs wheel matrix floors bench gpu clean

help: ## List the targets
	@awk -F ':.*## ' '/^[a-z]+:.*## / { printf "  make %-13s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

# Threads that wait for one another yield early: on a busy machine, spinning takes several times as long as the work.
quickstart: $(VENV)/installed ## Pretrain, fill masks and fine-tune on this machine's own docstrings (minutes, no download)
	@GOMP_SPINCOUNT=10000 $(BIN)/python examples/quickstart.py

test: $(VENV)/installed $(SDIST)/unpacked $(FLOOR)/installed $(APART)/installed ## Run the tests on the newest and the lowest supported Transformers
	@echo "Compatibility tests, $$(sed -n 's/==/ /p' $(FLOOR_PINS) | head -n 1)"
	@$(ON_CPU) PYTHONPATH=$(FLOOR) $(BIN)/python -m pytest -q tests/compat tests/models/test_generation.py
	@echo "All tests, transformers $(NEWEST)"
	@$(ON_CPU) $(BIN)/python -m pytest -q -n $(WORKERS) --dist worksteal -m "not slow"

slow: $(VENV)/installed ## Run the slow tests that make test leaves out
	@$(ON_CPU) $(BIN)/python -m pytest -q -n $(WORKERS) --dist worksteal -m slow

lint: $(VENV)/installed ## Check format, style and types
	@$(BIN)/ruff format --check --quiet . || { echo "Run '$(BIN)/ruff format .'"; exit 1; }
	@$(BIN)/ruff check --quiet .
	@$(BIN)/mypy

docs: $(VENV)/installed ## Build the documentation into build/docs, without network; a broken link fails
	@NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build  # with --quiet, a broken link would not fail
	@echo "Open build/docs/index.html, or see it with its search: $(BIN)/python -m http.server --directory build/docs"

wheel: $(VENV)/installed ## Build the package into dist, check it, and use the wheel in an empty environment
	@rm -rf dist
	@$(BIN)/python -m build --no-isolation
	@$(BIN)/python -m twine check --strict dist/*
	@$(BIN)/python -m tests.packaging.wheel dist/*.whl

matrix: ## Run the tests on every supported Python that is found, with the newest versions of all packages (long)
	@$(PYTHON) tests/matrix.py

floors: $(VENV)/installed ## Run the tests with the lowest version of every dependency (long)
	@$(BIN)/python -m tests.packaging.floors

bench: $(VENV)/installed ## Measure attention and models against the alternatives
	@$(BIN)/python -m benchmarks run

gpu: $(VENV)/installed ## On a GPU: tests, sanitizers, kernels, attention, encoders, training; PART=... runs some of them
	@$(BIN)/python -m benchmarks gpu $(if $(PART),--part $(PART))

clean: ## Remove the environment, caches and outputs
	rm -rf $(VENV) $(CACHE) build dist outputs .pytest_cache .ruff_cache .mypy_cache .hypothesis src/*.egg-info
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(VENV)/installed: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "The pinned environment needs Python 3.11 or newer: make PYTHON=python3.11")'
	@echo "Installing into $(VENV) (once, some minutes)"
	@$(PYTHON) -m venv --clear $(VENV)
	@$(PIP) install --constraint constraints.txt setuptools wheel
	@$(PIP) install --constraint constraints.txt --no-build-isolation --editable ".[train,bench,dev,onnx,cli,docs]"
	@touch $@

# Transformers' common model tests are only in its source distribution.
$(SDIST)/unpacked: $(VENV)/installed
	@echo "Fetching the source distribution of transformers $(NEWEST)"
	@rm -rf $(SDIST) && mkdir -p $(CACHE)
	@$(PIP) download --no-deps --no-binary :all: --no-build-isolation --dest $(CACHE) transformers==$(NEWEST)
	@tar -xzf $(SDIST).tar.gz -C $(CACHE) && rm $(SDIST).tar.gz
	@touch $@

# Put first on PYTHONPATH, these hide the newest versions in .venv.
$(FLOOR)/installed: $(VENV)/installed $(FLOOR_PINS)
	@echo "Fetching the lowest supported Transformers"
	@rm -rf $(FLOOR)
	@$(PIP) install --no-deps --target $(FLOOR) --requirement $(FLOOR_PINS)
	@touch $@

$(APART)/installed: $(VENV)/installed $(APART_PINS)
	@echo "Fetching torchao, bitsandbytes and Opacus"
	@rm -rf $(APART)
	@$(PIP) install --no-deps --target $(APART) --requirement $(APART_PINS)
	@touch $@
