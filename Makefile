# make run | demo | test | lint | proto | clean. Everything lives in .venv; nothing is installed elsewhere.
#
# Which torch is installed is decided by pip's own configuration: on plain PyPI a Linux machine gets the CUDA build,
# which works on a CPU too but is 2 GB larger. To save that, put the CPU build of the pinned version into .venv first.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
ARGS ?=

.PHONY: run demo test lint proto install clean

run: $(INSTALLED)
	@exec $(BIN)/pdserve up $(ARGS)

demo: $(INSTALLED)
	@exec $(BIN)/pdserve demo $(ARGS)

test: $(INSTALLED)
	$(BIN)/python -m pytest $(ARGS)

lint: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

proto: $(INSTALLED)
	PYTHON=$(CURDIR)/$(BIN)/python scripts/generate_pb.sh

install: $(INSTALLED)

# Again only when what is to be installed has changed.
$(INSTALLED): pyproject.toml constraints.txt | $(BIN)/python
	@echo "installing into $(VENV); the first time takes some minutes"
	@$(BIN)/python -m pip install --disable-pip-version-check --constraint constraints.txt --editable '.[dev]'
	@touch $@

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "pdserve needs Python 3.11 or newer as $(PYTHON); name another with: make PYTHON=python3.12 ..." >&2; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || \
	  { echo "$(PYTHON) cannot make virtual environments: on Debian and Ubuntu, apt install python3-venv" >&2; exit 1; }
	@$(PYTHON) -m venv $(VENV)

clean:
	rm -rf $(VENV) build *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
