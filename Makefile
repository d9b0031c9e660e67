# Two commands from a fresh machine: `make demo` and `make test`.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
EXTRAS := cli,litgpt,hf,test

.PHONY: setup demo test lint clean

setup: $(VENV)/.ready

$(VENV)/.ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	# torch first, and alone: what depends on it would otherwise bring another build
	$(BIN)/python -m pip install --quiet -c constraints.txt torch
	$(BIN)/python -m pip install --quiet -c constraints.txt -e ".[$(EXTRAS)]"
	touch $@

demo: setup
	$(BIN)/python examples/pretrain_text.py

test: setup
	$(BIN)/ruff check src tests examples benchmarks
	$(BIN)/python -m pytest tests

lint: setup
	$(BIN)/ruff check src tests examples benchmarks
	$(BIN)/ruff format --check src tests examples benchmarks

clean:
	rm -rf $(VENV) build dist src/*.egg-info
