# One command each, on a machine with only make, Python 3.10 or newer with its venv module, and,
# the first time, a network.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
READY := $(VENV)/ready
# More options for pytest: make test ARGS="-k resume -x"
ARGS ?=
# make chaos ROUNDS=200 SEED=7; one round again: ROUNDS=1 SEED=7 FIRST=12
ROUNDS ?= 20
SEED ?=
FIRST ?= 1

# In an emptied environment the shell has a PATH of its own, and make, which runs simple lines
# without a shell, has none.
PATH ?= /usr/local/bin:/usr/bin:/bin
export PATH

.DEFAULT_GOAL := help
.PHONY: help demo test check bench chaos

help:  ## list these commands
	@sed -n 's/^\([a-z]*\):.*## \(.*\)/make \1	\2/p' $(MAKEFILE_LIST)

demo: $(READY)  ## index the standard library, with a retry and a killed child on the way
	@$(BIN)/python examples/index_files.py

# Most of the time tests wait, for processes and servers, so two files are run at a time.
test: $(READY)  ## everything that a machine without services can run
	@$(BIN)/python -m pytest -n 3 --dist loadfile tests/unit tests/integration tests/acceptance $(ARGS)

check: $(READY)  ## format, lint, layers, types, unit tests
	@$(BIN)/python -m ruff format --check .
	@$(BIN)/python -m ruff check .
	@$(BIN)/lint-imports
	@$(BIN)/python -m mypy
	@$(BIN)/python -m pytest tests/unit $(ARGS)

bench: $(READY)  ## what set_progress costs, beside Task.update_state on Redis, and what iterate costs
	@$(BIN)/python bench/set_progress.py
	@$(BIN)/python bench/iterate.py

chaos: $(READY)  ## break workers, brokers and database at random; needs redis-server and rabbitmq-server
	@$(BIN)/python -m tests.chaos --rounds $(ROUNDS) --first $(FIRST) $(if $(SEED),--seed $(SEED))

# The stamp is written last: a set-up that was interrupted is done again.
$(READY): pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' 2>/dev/null || { \
	    echo "needs Python 3.10 or newer, and $(PYTHON) is not: make PYTHON=/path/to/python3" >&2; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || { \
	    echo "$(PYTHON) cannot make environments: install its venv module (Debian: apt install python3-venv)" >&2; exit 1; }
	@echo "setting up $(VENV), about a minute"
	@$(PYTHON) -m venv $(VENV)
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[dev]' || { \
	    echo "the set-up of $(VENV) failed: pip needs a network for it; run make again" >&2; exit 1; }
	@touch $@
