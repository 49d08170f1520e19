# `make test` is exactly what CI runs. Every target may be repeated; a second run only does what has become necessary.

PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
HOUSE  := build/house/understudy

# The folders that install as understudy.<folder>. One that does not exist yet is left out by itself.
FLOORS := $(wildcard model store actors bpmn simulations console)

# What people run and read beside the package; checked for types like it.
BESIDE := $(foreach folder,tests benchmarks examples,$(if $(shell find $(folder) -name '*.py' 2>/dev/null),$(folder)))

.DEFAULT_GOAL := help
.PHONY: help demo test lint house types floors unit gate mutants soak bench format clean

help:  ## show these lines
	@sed -n 's/^\([a-z]*\):.*  ## /\1\t/p' $(MAKEFILE_LIST) | expand -t 10

demo: $(VENV)/installed  ## install into .venv and run the demonstration
	$(BIN)/understudy demo

test: lint types floors unit  ## everything that CI checks

lint: $(VENV)/installed-dev  ## style and format
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

# mypy and import-linter do not see editable installs, so they get a folder that looks like the installed package.
# Links are only added, and removed when their target is gone: nobody at work in the house is disturbed.
# A new file in api/ needs another `make house`; new files in the other folders show through their folder's link.
house:  ## link the folders to build/house/understudy
	@mkdir -p $(HOUSE)
	@for link in $(HOUSE)/*; do if [ -L "$$link" ] && [ ! -e "$$link" ]; then rm -f "$$link"; fi; done
	@for entry in $(filter-out api/__pycache__,$(wildcard api/*)) $(FLOORS); do \
	  link=$(HOUSE)/$${entry##*/}; [ -L "$$link" ] || ln -s "../../../$$entry" "$$link" || [ -L "$$link" ] || exit 1; \
	done

types: $(VENV)/installed-dev house  ## mypy, strict
	MYPYPATH=$(dir $(HOUSE)) $(BIN)/mypy --package understudy
	MYPYPATH=$(dir $(HOUSE)):benchmarks $(BIN)/mypy --explicit-package-bases $(BESIDE)

floors: $(VENV)/installed-dev house  ## who may import whom
	PYTHONPATH=$(dir $(HOUSE)) $(BIN)/lint-imports --no-logo

unit: $(VENV)/installed-dev  ## the tests
	$(BIN)/pytest

gate: $(VENV)/installed-dev  ## 300 seeds twice, as in the tests, with figures
	$(BIN)/python -m understudy.simulations gate

mutants: $(VENV)/installed-dev  ## whether simulation finds every seeded bug
	$(BIN)/python tests/mutants/run.py

soak: $(VENV)/installed-dev  ## about an hour of simulation, kills and torn files, then the seeded bugs
	$(BIN)/python -m understudy.simulations soak --minutes $(or $(MINUTES),60)
	$(BIN)/python tests/mutants/run.py

bench: $(VENV)/installed  ## every benchmarks/bench_*.py, one after the other
	@for script in $(sort $(wildcard benchmarks/bench_*.py)); do echo "== $$script"; $(BIN)/python $$script || exit 1; done

format: $(VENV)/installed-dev  ## mend what can be mended by itself
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:  ## remove what the tools wrote; .venv stays
	rm -rf build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
	find . -path ./$(VENV) -prune -o -name __pycache__ -type d -prune -exec rm -rf {} +

# A stamp is older than pyproject.toml exactly when the dependencies or the list of packages may have changed.
$(VENV)/installed: pyproject.toml | $(BIN)/pip
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable .
	@touch $@

$(VENV)/installed-dev: pyproject.toml | $(BIN)/pip
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[dev]'
	@touch $@ $(VENV)/installed

$(BIN)/pip:
	$(PYTHON) -m venv $(VENV)
