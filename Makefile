# Every verb of the project. `make help` lists them.
#
# Needs git, a C compiler, Rust >= 1.88 and Python >= 3.11; packaging/preflight.sh names what is missing. Python
# packages go to .venv; cargo builds in the user's cache with the profile `ci` (optimised, without the minutes that
# link-time optimisation costs); .venv/bin/gateway is a hard link to what cargo built for this checkout.

SHELL := /bin/sh
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:

PYTHON ?= python3
PORT ?= 8000
MODEL ?=
ARGS ?=
SEEDS ?= 20
SIMULATIONS ?= 100000
JOBS ?= 1

# In the checkout: of two checkouts that share one, cargo takes what was built from either for both.
export CARGO_TARGET_DIR ?= $(CURDIR)/target
export BALEEN_CARGO_PROFILE ?= ci
CARGO_FLAGS := --locked --profile $(BALEEN_CARGO_PROFILE)

VENV := .venv/bin
UV := $(VENV)/uv
UV_PIP_INSTALL := $(UV) pip install --python $(VENV)/python

# uv ignores PIP_FIND_LINKS, and a folder that does not exist is an error to it.
empty :=
space := $(empty) $(empty)
comma := ,
FOUND_LINKS := $(strip $(foreach place,$(PIP_FIND_LINKS),$(if $(findstring ://,$(place)),$(place),$(wildcard $(place)))))
ifneq ($(FOUND_LINKS),)
export UV_FIND_LINKS ?= $(subst $(space),$(comma),$(FOUND_LINKS))
endif

DEPENDENCIES := .venv/.dependencies
PACKAGES := .venv/.packages
BUILD_INPUTS := pyproject.toml kernels/pyproject.toml packaging/cargo_hook.py
BUILT_GATEWAY := $(CARGO_TARGET_DIR)/$(BALEEN_CARGO_PROFILE)/gateway

.PHONY: help setup serve serve-pd test test-all chaos chaos-ci simulate lint fmt e2e bench bench-gpu fuzz proto lock clean

help: ## list the verbs
	@awk -F ':.*## ' '/^[a-z0-9-]+:.*## / { printf "make %-9s %s\n", $$1, $$2 }' Makefile

# Always asks cargo, which knows best whether anything changed. Linked, not symlinked: several checkouts share the cargo
# cache, and the gateway finds its Python and its model beside its own executable. Renamed into place, so that a running
# gateway keeps the file it was started from.
setup: $(DEPENDENCIES) ## create .venv with every dependency, the worker and the gateway command
	@cargo build $(CARGO_FLAGS) --bin gateway
	@$(MAKE) --silent --no-print-directory $(PACKAGES)
	@if ! [ "$(BUILT_GATEWAY)" -ef $(VENV)/gateway ]; then \
		ln -f "$(BUILT_GATEWAY)" $(VENV)/.gateway 2>/dev/null || cp "$(BUILT_GATEWAY)" $(VENV)/.gateway; \
		mv -f $(VENV)/.gateway $(VENV)/gateway; \
	fi

$(DEPENDENCIES): requirements.lock constraints.txt packaging/make_venv.sh
	@python=$$(PYTHON="$(PYTHON)" sh packaging/preflight.sh) && sh packaging/make_venv.sh "$$python"
	$(UV_PIP_INSTALL) --requirement requirements.lock --constraint constraints.txt torch
	@touch $@

$(PACKAGES): $(DEPENDENCIES) $(BUILD_INPUTS)
	$(UV_PIP_INSTALL) --no-deps --no-build-isolation --editable ./kernels --editable .
	@touch $@

serve: setup ## serve MODEL (default: the micro model) on PORT (default 8000); more flags in ARGS
	@exec $(VENV)/gateway serve $(MODEL) --port $(PORT) $(ARGS)

serve-pd: setup ## serve MODEL with 2 prefill and 2 decode workers on PORT; more flags in ARGS
	@exec $(VENV)/gateway serve $(MODEL) --prefill-workers 2 --decode-workers 2 --port $(PORT) $(ARGS)

test: setup ## run the tests of all parts but the slow ones
	@$(VENV)/python tests/run.py

test-all: setup ## run every test
	@$(VENV)/python tests/run.py --all

e2e: setup ## run the end-to-end tests, slow ones included
	@$(VENV)/python tests/run.py --all e2e

simulate: setup ## play SIMULATIONS (100000) courses of faults on the state machines of transfers and of attempts
	@BALEEN_SIMULATION_SEEDS=$(SIMULATIONS) cargo test $(CARGO_FLAGS) --package baleen-gateway --lib simulation
	@BALEEN_SIMULATION_SEEDS=$(SIMULATIONS) $(VENV)/python -m pytest -q --timeout 0 worker/tests/core/test_transfer_simulation.py

chaos: simulate ## simulate, then break living stacks in every way, SEEDS (20) times each, JOBS (1) at a time; goes on where it was stopped
	@PYTHONPATH=tests $(VENV)/python -m chaos.run --seeds $(SEEDS) --jobs $(JOBS) --keep .venv/chaos; \
		$(VENV)/python bench/chaos_report.py .venv/chaos

chaos-ci: setup ## break living stacks in one way of each kind, twice, two stacks at a time: what CI runs, some minutes
	@PYTHONPATH=tests $(VENV)/python -m chaos.run --of-each-kind --seeds 2 --jobs 2 --slack 5

lint: $(DEPENDENCIES) ## check style, types, spelling, generated code and the README's tree
	$(VENV)/ruff check .
	$(VENV)/ruff format --check .
	$(VENV)/pyright
	cargo fmt --all --check
	cargo clippy $(CARGO_FLAGS) --workspace --all-targets -- -D warnings
	$(VENV)/typos
	$(VENV)/python proto/generate.py --check
	$(VENV)/python packaging/check_tree.py

fmt: $(DEPENDENCIES) ## format Python and Rust
	$(VENV)/ruff check --fix-only --quiet .
	$(VENV)/ruff format .
	cargo fmt --all

bench: setup ## measure, and write results and plots to bench/results
	@$(VENV)/python bench/run.py

fuzz: ## look for inputs that break the text path, FUZZ_SECONDS (60) a target; needs nightly Rust and cargo-fuzz
	@PYTHON="$(PYTHON)" CARGO_TARGET_DIR="$(CARGO_TARGET_DIR)/fuzz" gateway/fuzz/run.sh

bench-gpu: setup ## measure every kernel on this machine's GPU, and write results, table and plot to bench/results
	@PYTHONPATH=bench $(VENV)/python -m baleen_bench --out .venv/kernels.json --commit "$$(git rev-parse HEAD)"
	@$(VENV)/python bench/gpu_report.py .venv/kernels.json

proto: $(DEPENDENCIES) ## regenerate the Python code of the contract
	$(VENV)/python proto/generate.py

lock: $(DEPENDENCIES) ## resolve the newest dependencies into requirements.lock
	env -u UV_FIND_LINKS $(UV) pip compile --quiet --upgrade --universal --python-version 3.11 --all-extras \
		--no-annotate --no-header --no-emit-package baleen-kernels --no-emit-package torch --no-emit-package nixl-cu13 \
		--constraint constraints.txt pyproject.toml --output-file .venv/requirements.lock
	@{ echo '# Every Python dependency but PyTorch and what only its CUDA build needs. Made by `make lock`.'; \
		grep -Ev '^(cuda|nvidia|triton)\b' .venv/requirements.lock; } > requirements.lock

clean: ## remove .venv and caches of this checkout (the cargo cache is shared and stays)
	rm -rf .venv .hypothesis .pytest_cache .ruff_cache dist
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
