# `make demo` and `make test` each work as the first command in a fresh clone: they make .venv, install the versions that
# constraints.txt pins, and run. Only Python 3.11 or newer is needed.

VENV := .venv
PY := $(VENV)/bin/python
STAMP := $(VENV)/.installed
PIP := $(PY) -m pip install -qq --disable-pip-version-check --no-input -c constraints.txt

# Tried in this order; the first that is new enough and can make a virtual environment is used.
PYTHON ?= python3.11 python3

.PHONY: setup demo test test-all test-fast loops zoo lint bench screenshots clean
.DELETE_ON_ERROR:

# Where the environment says not to write bytecode, each of the many processes would compile the package anew: 3 s of 7
unexport PYTHONDONTWRITEBYTECODE

setup: $(STAMP)

demo: $(STAMP)
	$(PY) examples/demo.py

test: $(STAMP)
	$(PY) -m pytest -n auto --dist worksteal -m "not thorough" $(ARGS)

# With the longest tests, and further cases of laws that `make test` checks on others
test-all: $(STAMP)
	$(PY) -m pytest -n auto --dist worksteal $(ARGS)

# Laws and unit tests, without those that start processes or plan whole models
test-fast: $(STAMP)
	$(PY) -m pytest -n auto --dist worksteal -m "not slow and not thorough" $(ARGS)

# Under the loops of other libraries, which it installs: transformers and accelerate, lightning
loops: $(STAMP)
	@$(PIP) --no-build-isolation --editable '.[loops]'
	$(PY) -m pytest -n 0 --timeout 600 -W default examples/loops $(ARGS)

# Models that people train, captured, planned and run; make zoo ARGS="llama dit" for some. Writes docs/coverage.md
zoo: $(STAMP)
	@$(PIP) --no-build-isolation --editable '.[zoo]'
	$(PY) -m benchmarks.zoo --write docs/coverage.md $(ARGS)

lint: $(STAMP)
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m mypy

bench: $(STAMP)
	$(PY) benchmarks/plan.py $(ARGS)

screenshots: $(STAMP)
	$(PY) docs/screenshots.py

clean:
	rm -rf $(VENV) build dist .demo .pytest_cache .mypy_cache .ruff_cache .hypothesis *.egg-info
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# setuptools first and no build isolation: an isolated build would fetch versions that nothing pins.
$(STAMP): pyproject.toml constraints.txt
	@for python in $(PYTHON); do \
	  if "$$python" -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1; then \
	    echo "Setting up $(VENV) with $$("$$python" --version) (once; one to five minutes)"; \
	    exec "$$python" -m venv $(VENV); \
	  fi; \
	done; \
	echo "autoshard needs Python 3.11 or newer with the modules venv and ensurepip. Found:" >&2; \
	for python in $(PYTHON); do echo "  $$python: $$("$$python" --version 2>&1)" >&2; done; \
	echo "Install one (on Debian: python3.11 and python3.11-venv), or name it: make PYTHON=/path/to/python3.11" >&2; \
	exit 1
	@$(PIP) setuptools
	@$(PIP) --no-build-isolation --editable '.[plan,cli,report,dev]'
	@touch $@
