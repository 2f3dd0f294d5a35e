# `make demo` and `make test` need Python 3.11 and make, nothing else prepared.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INSTALL := $(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt

# Python keeps what it has compiled, whatever the caller's environment says: some hundred processes
# of the tests import the same modules.
export PYTHONDONTWRITEBYTECODE :=

.DEFAULT_GOAL := help
.PHONY: help demo docs test test-all test-browser test-faults test-mutants test-litellm test-gpu cpu-kernels short-tests lint format bench-peers bench-scaling \
	bench-control-plane bench-gpu report screenshots clean

help: ## Show the targets
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed 's/:.*## /\t/' | expand -t 22

$(VENV)/made:
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Nightjar needs Python 3.11 or newer; set PYTHON=")'
	$(PYTHON) -m venv $(VENV)
	touch $@

$(VENV)/installed: pyproject.toml constraints.txt | $(VENV)/made
	$(INSTALL) -e .
	touch $@

# pip would compile ten thousand modules one after the other; a few are imported, and then compiled.
$(VENV)/installed-dev: pyproject.toml constraints.txt | $(VENV)/made
	$(INSTALL) --no-compile -e '.[dev]'
	touch $(VENV)/installed $@

$(VENV)/installed-browser: pyproject.toml constraints.txt | $(VENV)/made
	$(INSTALL) --no-compile -e '.[browser]'
	touch $(VENV)/installed $(VENV)/installed-dev $@

$(VENV)/installed-mutants: pyproject.toml constraints.txt | $(VENV)/made
	$(INSTALL) -e '.[mutants]'
	touch $(VENV)/installed $(VENV)/installed-dev $@

demo: $(VENV)/installed ## Generate and rank with the demo model, through the whole system
	$(BIN)/python examples/demo.py

test: $(VENV)/installed-dev ## Lint, types and every test but the long ones, three files at a time
	$(MAKE) --jobs=2 lint short-tests

test-all: test ## The same, and the long tests but for the fault suite
	$(BIN)/python -m pytest -m "slow and not gpu" --ignore=tests/faults

# What needs a deployment that computes is one file, so that one process starts it.
test-browser: $(VENV)/installed-browser ## The web page in a real Chromium; it is skipped without one
	$(BIN)/python -m pytest tests/browser -n 2 --dist loadfile

test-faults: $(VENV)/installed-dev ## Kill, stop and starve every process; writes docs/reference/faults.md
	$(BIN)/python -m tests.faults

test-mutants: $(VENV)/installed-mutants ## Plant faults that the tests must notice; writes docs/reference/mutants.md
	$(BIN)/python -m pytest -q tests/unit/test_mutants.py tests/mutants/checks_of_making.py
	$(BIN)/python -m tests.mutants

# One core compiles what all tests use, and begins with the tests, while the other one lints.
cpu-kernels: $(VENV)/installed-dev
	$(BIN)/python -m tests.backends

# Most tests of whole systems wait, so that a third file keeps two cores busy. Planners and workers
# step back to a niceness of 10: the tests are as nice, or what they wait for would hardly run.
short-tests: cpu-kernels
	nice -n 9 $(BIN)/python -m pytest -m "not slow and not gpu" -n 3 --dist loadfile --no-loadscope-reorder

lint: $(VENV)/installed-dev ## Linter, formatter, types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(VENV)/installed-dev ## Format the code
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

# Each peer has an environment of its own. One that cannot be made does not stop the others: the
# comparison reports why.
PEERS := ctranslate2 llamacpp openvino transformers vllm
PEER_VENVS := benchmarks/.cache/venvs

# Packages ask for builds of these that do not load beside a CPU torch, and run without them.
$(PEER_VENVS)/vllm.made: UNWANTED := torchvision torchaudio torchcodec
$(PEER_VENVS)/openvino.made: UNWANTED := torchvision
# It is compiled: without its examples, and for the instructions of this machine (its default).
$(PEER_VENVS)/llamacpp.made: export CMAKE_ARGS := -DLLAVA_BUILD=OFF
$(PEER_VENVS)/%.made: benchmarks/peers/requirements-%.txt | $(VENV)/made
	rm -rf $(PEER_VENVS)/$* $@
	$(BIN)/python -m venv $(PEER_VENVS)/$*
	$(PEER_VENVS)/$*/bin/pip install --quiet --disable-pip-version-check -r $< 2> $(@:.made=.failed)
	$(if $(UNWANTED),$(PEER_VENVS)/$*/bin/pip uninstall --quiet --yes $(UNWANTED))
	touch $@

bench-peers: $(VENV)/installed-dev ## Nightjar and its peers on this machine, each in its own environment
	-$(MAKE) --keep-going $(PEERS:%=$(PEER_VENVS)/%.made)
	$(BIN)/python -m benchmarks.compare --models gpt2-small
	$(BIN)/python -m benchmarks.compare --models llama-0.44b --rounds 1 --scale 0.5 --apart \
		--workloads generate,rank,multi_turn,long_prompts

bench-scaling: $(VENV)/installed-dev ## How the engine's cost grows, with plots
	$(BIN)/python -m benchmarks.scaling

bench-control-plane: $(VENV)/installed-dev ## Requests/s without a model, beside plain Celery
	$(BIN)/python -m benchmarks.control_plane

# LiteLLM pins an older client than the tests use, and is large: it gets an environment of its own.
test-litellm: $(VENV)/installed-dev ## Files, batches, calls and rerank through a LiteLLM proxy
	$(PYTHON) -m venv .venv-litellm
	.venv-litellm/bin/pip install --quiet --disable-pip-version-check 'litellm[proxy]==1.106.2'
	NIGHTJAR_TEST_LITELLM=$(CURDIR)/.venv-litellm/bin/litellm \
		$(BIN)/python -m pytest -q -m slow tests/acceptance/test_litellm.py

test-gpu: ## Kernels, then engine, on a GPU; PYTHON= an environment with torch, CuPy, transformers, pytest
	@failed=0; for stage in 1 2; do $(PYTHON) tools/first_gpu_hour $$stage || failed=1; done; exit $$failed

bench-gpu: ## Every figure on a GPU in 8 minutes, with the same PYTHON=; nothing is installed
	$(PYTHON) -m benchmarks.gpu

report: $(VENV)/installed-dev ## Write the newest figures into docs/performance.md and docs/reference/measurements.md
	$(BIN)/python -m benchmarks.report

screenshots: $(VENV)/installed-browser ## Take the pictures in docs/images anew
	$(BIN)/python -m tests.browser.screenshots

docs: $(VENV)/installed-dev ## Build the documents as a site into build/site; a warning is an error
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

clean: ## Remove the environment and what the demo wrote
	rm -rf $(VENV) demo-output build dist *.egg-info
