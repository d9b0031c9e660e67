# From an empty machine with Python 3.10 or newer: `make demo`, `make test`.
PYTHON ?= python3
VENV ?= .venv
# On a CPU-only Linux machine a smaller torch: make setup TORCH_OPTIONS="--index-url https://download.pytorch.org/whl/cpu"
TORCH_OPTIONS ?=
BIN := $(VENV)/bin
EXTRAS := cli,litgpt,hf,test
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt
SOURCES := src tests examples benchmarks

.PHONY: setup demo test lint clean

setup: $(VENV)/.ready

$(VENV)/.ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(PIP) torch $(TORCH_OPTIONS)
	$(PIP) --editable ".[$(EXTRAS)]"
	touch $@

demo: setup
	$(BIN)/python examples/pretrain_text.py

test: setup
	$(BIN)/ruff check $(SOURCES)
	$(BIN)/python -m pytest tests

lint: setup
	$(BIN)/ruff check $(SOURCES)
	$(BIN)/ruff format --check $(SOURCES)

clean:
	rm -rf $(VENV) build dist src/*.egg-info
