# `make train` and `make test` are all the set-up there is: each creates .venv first if it is missing or out of date.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

# Tests start hundreds of processes, and each would compile every module again.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: train test test-all full lint oracle fuzz clean install
install: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "mtrain needs Python 3.11 or newer; set PYTHON=")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -q -c constraints.txt -e '.[dev]'
	touch $(STAMP)

train: install
	$(BIN)/python launch.py

# Files in the order of their names: those that start ranks come first, and the two processes end together.
PYTEST := $(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder

test: install
	$(PYTEST)

# What `make test` leaves out: whole products, all sizes of the interpreted kernels, the oracle and the fuzz
test-all: full
	$(MAKE) -j 2 oracle fuzz

full: install
	$(PYTEST) -m full

lint: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# 500 random configurations: `check` says yes exactly where the model builds and makes a step. CASES= and SEED=
oracle: install
	$(BIN)/python -m tests.support.oracle --cases $(or $(CASES),500) --seed $(or $(SEED),1)

# 10,000 mutated recipes and 500 hostile inputs: no traceback, nothing slow, nothing done
fuzz: install
	$(BIN)/python -m tests.support.fuzz --seed $(or $(SEED),1)

clean:
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache
