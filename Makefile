# Two commands for newcomers: `make quickstart` and `make test`. CI runs `make check`, `make test` and `make test-all`.
# The benchmarks measure time: run nothing else beside them. They write docs/benchmarks.md.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

.PHONY: quickstart test test-all check bench bench-quick bench-learning clean

$(VENV)/.installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet -c constraints.txt -e .
	touch $@

$(VENV)/.installed-test: $(VENV)/.installed
	$(BIN)/python -m pip install --quiet -c constraints.txt -e ".[test]"
	touch $@

$(VENV)/.installed-bench: $(VENV)/.installed
	$(BIN)/python -m pip install --quiet -c constraints.txt -e ".[bench]"
	touch $@

quickstart: $(VENV)/.installed
	$(BIN)/grupo train

# Two processes, each with one thread (tests/conftest.py); a file's tests share what they have trained.
test: $(VENV)/.installed-test
	$(BIN)/python -m pytest -n 2 --dist loadfile -m "not slow and not model"

# The rest: kills, long runs, and tests with the default model.
test-all: $(VENV)/.installed-test
	$(BIN)/python -m pytest -n 2 --dist loadfile -m "slow or model"

check: $(VENV)/.installed-test
	$(BIN)/ruff check src tests examples benchmarks tools
	$(BIN)/ruff format --check src tests examples benchmarks tools
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python tools/draw_data_flow.py --check

bench: $(VENV)/.installed-bench
	$(BIN)/python benchmarks/bench.py recipes parts sweeps
	$(BIN)/python benchmarks/report.py

bench-quick: $(VENV)/.installed-bench
	$(BIN)/python benchmarks/bench.py recipes
	$(BIN)/python benchmarks/report.py

bench-learning: $(VENV)/.installed-bench
	$(BIN)/python benchmarks/bench.py learning
	$(BIN)/python benchmarks/report.py

clean:
	rm -rf $(VENV)
