# From an empty machine with Python 3.10 or newer: `make demo`, `make test`.
PYTHON ?= python3
VENV ?= .venv
# On a CPU-only Linux machine a smaller torch: make setup TORCH_OPTIONS="--index-url https://download.pytorch.org/whl/cpu"
TORCH_OPTIONS ?=
BIN := $(VENV)/bin
EXTRAS := cli,litgpt,hf,test
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt
SOURCES := src tests examples benchmarks
OPTIONS ?=
CONFORMANCE_NEEDS := cloudpickle scikit-learn tensorboardX omegaconf requests
INDUCTOR_OPS := add exp softmax cumsum cat where var_mean linalg.vector_norm nn.functional.linear \
	nn.functional.layer_norm nn.functional.cross_entropy nn.functional.embedding

.PHONY: setup demo test tensor faults conformance opinfo triton fuzz soak lint clean

setup: $(VENV)/.ready

$(VENV)/.ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(PIP) torch $(TORCH_OPTIONS)
	$(PIP) --editable ".[$(EXTRAS)]"
	touch $@

demo: setup
	$(BIN)/python examples/pretrain_text.py

# JOBS processes, each with files of its own; one thread each, as many of them start processes too.
JOBS ?= 2
test: setup
	$(BIN)/ruff check $(SOURCES)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest tests -n $(JOBS) --dist loadfile --no-loadscope-reorder --durations 40

# Lightning's own tests with our strategies: make conformance LIGHTNING_SRC=<a checkout of Lightning>
conformance: setup
	@test -d "$(LIGHTNING_SRC)/tests" || { echo "set LIGHTNING_SRC to a checkout of Lightning"; exit 2; }
	$(PIP) --upgrade --target build/conformance/site $(CONFORMANCE_NEEDS)
	PYTHONPATH=$(CURDIR)/build/conformance/site $(BIN)/python -m tests.conformance.run "$(LIGHTNING_SRC)" $(OPTIONS)

# More of tensor parallelism than `make test` runs
tensor: setup
	$(BIN)/python -m tests.distributed.run 2 tensor
	$(BIN)/python -m tests.distributed.run 4 tensor_2d

# A rank that is killed, raises or cannot write; training that torchrun starts again
faults: setup
	$(BIN)/python -m pytest tests/distributed/test_faults.py tests/distributed/restarts.py

# PyTorch's own operator samples through the compiler
opinfo: setup
	$(BIN)/python -m tests.opinfo.sweep --dtypes float32 float64 bfloat16 --output build/opinfo-eager.json
	$(BIN)/python -m tests.opinfo.sweep --executors inductor --ops $(INDUCTOR_OPS) --output build/opinfo-inductor.json

# Our Triton kernels and Liger's: values in Triton's interpreter; ours compiled for GPUs too; no GPU is needed
TRITON_VERSION ?= 3.9.0
LIGER_VERSION ?= 0.8.5
triton: setup
	$(PIP) --no-deps --target build/triton/site triton==$(TRITON_VERSION) liger-kernel==$(LIGER_VERSION)
	TRITON_INTERPRET=1 PYTHONPATH=$(CURDIR)/build/triton/site $(BIN)/python -m pytest tests/executors/test_triton.py \
		tests/executors/test_liger.py tests/optimizers tests/strategies/test_compile_optimizer.py
	PYTHONPATH=$(CURDIR)/build/triton/site $(BIN)/python -m tests.executors.compile_kernels

# FUZZ_EXAMPLES random examples for each property; make test runs a few, always the same.
FUZZ_EXAMPLES ?= 300
fuzz: setup
	FUZZ_EXAMPLES=$(FUZZ_EXAMPLES) $(BIN)/python -m pytest tests/properties -o timeout=0

# A long fit with changing shapes, validation and checkpoints: nothing may grow
STEPS ?= 2000
EXECUTORS ?= eager
soak: setup
	$(BIN)/python -m tests.soak.run --steps $(STEPS) --executors $(EXECUTORS) --output build/soak.json

lint: setup
	$(BIN)/ruff check $(SOURCES)
	$(BIN)/ruff format --check $(SOURCES)

clean:
	rm -rf $(VENV) build dist src/*.egg-info
