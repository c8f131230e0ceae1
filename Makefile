# Two commands do everything on a fresh machine with Python 3.11+ and a C++ compiler: `make chat` and `make test`.
# Stamps remember what was done, so that a second run starts in seconds and needs no network.

PYTHON ?= $(shell for p in python3 python3.13 python3.12 python3.11 python; do \
	$$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$p && break; done)
VENV := .venv
BIN := $(VENV)/bin
STAMPS := $(VENV)/.stamps
PIP := $(BIN)/python -m pip --disable-pip-version-check
MODEL ?= smollm2
ARGS ?=
PYTEST_ARGS ?=
# An index with CPU wheels of torch, for machines whose usual index carries only those with CUDA.
TORCH_INDEX ?=
HAS_GPU = $(shell command -v nvidia-smi >/dev/null 2>&1 && nvidia-smi -L 2>/dev/null | grep -q GPU && echo yes)
TORCH_PIN = $(shell sed -n 's/^torch==//p' constraints.txt)

.PHONY: chat serve test check setup format lint types imports clean help

chat: setup  ## Set up and chat in the terminal.
	@$(BIN)/metrale chat $(MODEL) $(ARGS)

serve: setup  ## Set up and serve API and page.
	@$(BIN)/metrale serve $(MODEL) $(ARGS)

test: setup  ## Set up and run all tests.
	@$(BIN)/python -m pytest $(PYTEST_ARGS)

check: setup  ## Format, lint, strict types, import contracts, tests.
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python -m pytest $(PYTEST_ARGS)

format: $(STAMPS)/packages  ## Format the code.
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

setup: $(STAMPS)/packages $(STAMPS)/native $(STAMPS)/model  ## .venv, packages, kernels and the model; starts nothing.

$(STAMPS)/venv:
	@test -n "$(PYTHON)" || { echo "Python 3.11 or later is needed; install it, or name it with PYTHON=."; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "$(PYTHON) is too old; 3.11 or later is needed (PYTHON=/path/to/it)."; exit 1; }
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV) || \
		{ echo "The virtual environment could not be made; install the venv package of your Python."; exit 1; }
	$(PIP) install -qq --upgrade pip
	@mkdir -p $(STAMPS) && touch $@

# Where there is no GPU a CPU wheel spares gigabytes; where none is at hand the usual one does as well.
$(STAMPS)/torch: constraints.txt $(STAMPS)/venv
ifeq ($(HAS_GPU),yes)
	$(PIP) install -qq "torch==$(TORCH_PIN)" -c constraints.txt
else
	@$(BIN)/python -c 'import importlib.metadata as m, sys; sys.exit(m.version("torch").split("+")[0] != "$(TORCH_PIN)")' 2>/dev/null || \
		$(PIP) install -qq "torch==$(TORCH_PIN)+cpu" -c constraints.txt $(if $(TORCH_INDEX),--extra-index-url $(TORCH_INDEX)) 2>/dev/null || \
		$(PIP) install -qq "torch==$(TORCH_PIN)" -c constraints.txt
endif
	@touch $@

$(STAMPS)/packages: pyproject.toml constraints.txt $(STAMPS)/torch
	$(PIP) install -qq -e ".[dev,grammar]" -c constraints.txt
	@touch $@

NATIVE := $(wildcard engine/model/native/*.cpp engine/model/native/*.h engine/model/native/*.py)

$(STAMPS)/native: $(NATIVE) $(STAMPS)/packages
	@if [ -f engine/model/native/build.py ]; then \
		$(BIN)/python -m engine.model.native.build || \
		echo "The fast kernels could not be built (no C++ compiler?); the slower ones in plain torch are used."; fi
	@touch $@

$(STAMPS)/model: $(STAMPS)/packages
	@$(BIN)/metrale pull $(MODEL) >/dev/null
	@touch $@

clean:  ## Remove what set-up made.
	rm -rf $(VENV) .mypy_cache .pytest_cache .ruff_cache .hypothesis .import_linter_cache build *.egg-info

help:  ## This list.
	@sed -n 's/^\([a-z]*\):.*##/\1:/p' $(MAKEFILE_LIST)
