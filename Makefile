# Needs Python 3.11 or newer and make; everything else goes into .venv.
# Another interpreter: make test PYTHON=python3.12 · arguments for pytest: make test ARGS="-k ledger"

PYTHON := python3
VENV := .venv
ARGS :=
BIN := $(VENV)/bin
READY := $(VENV)/.ready
# Two workers a core: tests wait for servers more than they compute. A file stays together: what it sets up is set up once.
WORKERS := $(shell $(PYTHON) -c 'import os; print(2 * os.cpu_count())' 2>/dev/null)
TOGETHER := -n $(or $(WORKERS),auto) --dist loadfile
UNIT := config contract core dialects engine house http mock planners properties stores

.DEFAULT_GOAL := help
.PHONY: help setup test test-deep test-all unit walk check fix docs sim mutants demo clean test-sdks test-newest test-real test-slow fuzz test-uvicorn bench-pool bench-proxy bench-shared bench-recording bench-pressure bench-money bench-polls bench-caching

help: ## List the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "make %-11s %s\n", $$1, $$2 }' Makefile

setup: $(READY) ## Make the virtual environment (every other target does it when needed)

test: $(READY) ## Run the tests, but for the deep ones
	@$(BIN)/python -m pytest $(TOGETHER) -m 'not deep' $(ARGS)

test-deep: $(READY) ## Run the deep tests only: all crashes, more worlds, the docs, the demo; slow
	@$(BIN)/python -m pytest $(TOGETHER) -m deep $(ARGS)

test-all: test test-deep ## Run all tests: the quick ones, then the deep ones

unit: $(READY) ## Run the quick tests only: parts and contracts, no children, no worlds
	@$(BIN)/python -m pytest $(TOGETHER) $(ARGS) $(UNIT:%=tests/%)

check: $(READY) ## Lint, check format and types, and run the house rules
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy
	@$(BIN)/python -m pytest tests/house

fix: $(READY) ## Format, and mend what the linter can mend
	@$(BIN)/ruff check --fix .
	@$(BIN)/ruff format .

docs: $(READY) ## Redraw the generated parts of the docs
	@$(BIN)/python docs/draw.py

SEEDS := 200
SEED :=
sim: $(READY) ## Run simulated worlds: SEEDS=2000 for many, SEED=17 for the events of one
	@$(BIN)/python -m carpool.sim $(if $(SEED),--seed $(SEED),$(SEEDS)) $(ARGS)

mutants: $(READY) ## Break a copy of the tree in every known way: each must be noticed
	@$(BIN)/python -m tests.sim.mutants $(ARGS)

walk: $(READY) ## Show the modules that one call crosses, in the order in which it reaches them
	@$(BIN)/python -m tests.support.walk $(ARGS)

demo: $(READY) ## Watch a small fleet finish its calls against the mock provider
	@$(BIN)/carpool demo

clean: ## Remove the virtual environments, builds and caches
	@rm -rf $(VENV) .venvs build dist .demo .pytest_cache .mypy_cache .ruff_cache .hypothesis
	@find src tests docs -name __pycache__ -type d -prune -exec rm -rf {} +

# Made anew when pyproject.toml is newer; otherwise instant.
$(READY): pyproject.toml
	@command -v $(PYTHON) >/dev/null || { echo "There is no $(PYTHON) here. Install Python 3.11 or newer, or name one: make PYTHON=python3.12" >&2; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "$(PYTHON) is older than 3.11. Name a newer one: make PYTHON=python3.12" >&2; exit 1; }
	@test -x $(BIN)/pip || $(PYTHON) -c 'import ensurepip' 2>/dev/null || { echo "$(PYTHON) can't make virtual environments: ensurepip is missing. On Debian and Ubuntu: apt-get install python3-venv" >&2; exit 1; }
	@echo "Setting up $(VENV) ..."
	@test -x $(BIN)/pip || $(PYTHON) -m venv $(VENV)
	@$(BIN)/python -m pip install -qq --disable-pip-version-check --editable '.[dev]'
	@touch $@

# ---- every version of the SDK that is promised to work, each in an environment of its own; none is skipped

SDKS := 2.9 1.17 0.97
COMPATIBLE := openai-1.70 groq-1.7 mistralai-3.7
.SECONDARY: $(SDKS:%=.venvs/anthropic-%/.ready) $(COMPATIBLE:%=.venvs/compatible-%/.ready)

test-sdks: ## Run every frontend under every supported version of the anthropic SDK, and under those of OpenAI-compatible providers
	@$(MAKE) --no-print-directory -j3 $(SDKS:%=test-sdk-%) $(COMPATIBLE:%=test-compatible-%) test-newest test-uvicorn

test-sdk-%: .venvs/anthropic-%/.ready
	@.venvs/anthropic-$*/bin/python tests/sdk/matrix.py $*

.venvs/anthropic-%/.ready: pyproject.toml
	@mkdir -p .venvs && echo '*' > .venvs/.gitignore
	@echo "Setting up anthropic $* ..."
	@test -x $(@D)/bin/pip || $(PYTHON) -m venv $(@D)
	@$(@D)/bin/python -m pip install -qq --disable-pip-version-check --editable . 'anthropic==$*.*'
	@touch $@

test-newest: $(READY) ## Run every frontend under the newest openai SDK, which is among the tools here
	@$(BIN)/python tests/sdk/openai_compatible.py openai 3.51

test-compatible-%: .venvs/compatible-%/.ready
	@.venvs/compatible-$*/bin/python tests/sdk/$(if $(findstring mistralai,$*),under,openai_compatible).py $(subst -, ,$*)

.venvs/compatible-%/.ready: pyproject.toml
	@mkdir -p .venvs && echo '*' > .venvs/.gitignore
	@echo "Setting up $(subst -, ,$*) ..."
	@test -x $(@D)/bin/pip || $(PYTHON) -m venv $(@D)
	@$(@D)/bin/python -m pip install -qq --disable-pip-version-check --editable . '$(subst -,==,$*).*'
	@touch $@

# ---- the oldest uvicorn that pyproject.toml admits: its private classes carry the proxy's fast path

UVICORN := 0.53

test-uvicorn: .venvs/uvicorn-$(UVICORN)/.ready ## Run the tests of the proxy's connections under the oldest supported uvicorn
	@.venvs/uvicorn-$(UVICORN)/bin/python -m pytest -k 'not newest' tests/house/test_dependencies.py tests/frontends/proxy/http/test_connection.py

.venvs/uvicorn-%/.ready: pyproject.toml
	@mkdir -p .venvs && echo '*' > .venvs/.gitignore
	@echo "Setting up uvicorn $* ..."
	@test -x $(@D)/bin/pip || $(PYTHON) -m venv $(@D)
	@$(@D)/bin/python -m pip install -qq --disable-pip-version-check --editable '.[dev]' 'uvicorn==$*.*'
	@touch $@

# ---- real clients, as processes of their own; their versions stand in tests/real/versions.toml; none is skipped

test-real: $(READY) ## Run SDKs and agents against the proxy: ARGS="--only Codex" for some
	@$(BIN)/python -m tests.real $(ARGS)

test-slow: $(READY) ## The same against batches of twenty minutes, in real time
	@$(BIN)/python -m tests.real --slow $(ARGS)

# ---- the parsers under bytes that nobody would write; what breaks one is kept in tests/fuzz/corpus

SECONDS :=
RUNS := 5000
fuzz: .venvs/fuzz/.ready ## Fuzz every parser: SECONDS=600 for ten minutes, RUNS=5000 for so many tries each
	@.venvs/fuzz/bin/python -m tests.fuzz $(if $(SECONDS),--seconds $(SECONDS),--runs $(RUNS)) $(ARGS)

.venvs/fuzz/.ready: pyproject.toml
	@mkdir -p .venvs && echo '*' > .venvs/.gitignore
	@echo "Setting up atheris ..."
	@test -x $(@D)/bin/pip || $(PYTHON) -m venv $(@D)
	@$(@D)/bin/python -m pip install -qq --disable-pip-version-check --editable . 'atheris>=2.3'
	@touch $@

bench-pool: $(READY) ## Measure the pool beside its peers; takes about 20 minutes, ARGS="--plans 1000 10000" less
	@$(BIN)/python bench/pool $(ARGS)

bench-proxy: $(READY) ## Measure the proxy beside nginx and its peers; takes about 15 minutes, ARGS="--rounds 2 --quick" less
	@$(BIN)/python bench/proxy $(ARGS)

bench-shared: $(READY) ## Measure 1 to 8 processes on one PostgreSQL; takes about 10 minutes, ARGS="--processes 1 8 --rounds 1" less
	@$(BIN)/python bench/shared $(ARGS)

bench-recording: $(READY) ## Measure what the record of calls costs on `now`; takes about 5 minutes, ARGS="--rounds 4 --seconds 2" less
	@$(BIN)/python bench/recording $(ARGS)

bench-money: $(READY) ## Simulate what each policy would have paid; takes about 10 minutes, ARGS="--quick" less than one
	@$(BIN)/python bench/money $(ARGS)

bench-polls: $(READY) ## Measure in real time how late answers are after their batch ended; takes about 10 minutes
	@$(BIN)/python bench/polls $(ARGS)

bench-caching: $(READY) ## Measure what following prompt caches costs: hashing, look-ups, memory; takes a minute
	@$(BIN)/python bench/caching $(ARGS)

bench-pressure: $(READY) ## Run 200 agents at 1,000 requests a minute with bursts of 429, in real time; takes 3 minutes
	@CARPOOL_MINUTE_S=60 $(BIN)/python -m pytest -s tests/frontends/proxy/test_pressure.py -k two_hundred $(ARGS)
