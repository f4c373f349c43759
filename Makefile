# Everything a person or CI runs. The first target that needs it makes .venv; stamps in it remember
# what is installed, so that a second call costs nothing.

SHELL := /bin/bash
PYTHON ?= python3
PIP_ARGS ?=
CONFIG ?=
# Test processes at once; tests of clusters wait more than they compute.
JOBS ?= 3
# Files in the order of their names: those of clusters, with few long tests, must not come last.
BESIDE = -n $(JOBS) --dist loadfile --no-loadscope-reorder
# Every process of pytest reads all tests: what the first has compiled serves the others, too.
test nightly-test quick: export PYTHONDONTWRITEBYTECODE =
VENV := .venv
BIN := $(VENV)/bin
PACKAGES := deploy bench router prefill decode worker engine kv_transfer runtime
SOURCES := $(PACKAGES) tools tests
# Apart from .venv, with what kernels need and nothing else: none of them may come to need more.
KERNELS := .venv-kernels
# Apart as well: others' clients, with whatever they want to have beside them.
CLIENTS := .venv-clients
RUNS := $(KERNELS)/runs
KERNEL_TESTS := -m gpu tests/engine/attention tests/engine/formats tests/engine/kernels \
	tests/engine/ops tests/engine/parallel/nvlink tests/engine/sampling tests/bench/tuner/test_bench_gpu.py
INSTALL := $(BIN)/python -m pip install --disable-pip-version-check --progress-bar off \
	$(PIP_ARGS) -c constraints-cpu.txt

.DEFAULT_GOAL := help
.PHONY: help up down test nightly nightly-test mutants kernels-check quick check lint types imports budgets proto \
	proto-check api-docs api-docs-check chart-files format properties soak gpu-test clients-test install install-dev clean

help:
	@echo "make up         set up and start the default cluster (CONFIG=file.toml for another)"
	@echo "make down       stop it"
	@echo "make test       set up and run the tests that every change must pass"
	@echo "make nightly    run all that needs no GPU and is not in make test (hours)"
	@echo "make mutants    remove ten guards, one at a time: the tests must fail each time"
	@echo "make quick      run the quick tests of what a change touches"
	@echo "make clients-test  run litellm, lm-eval, guidellm and aiperf against a cluster"
	@echo "make kernels-check  run the Triton kernels on this CPU, in Triton's interpreter"
	@echo "make check      lint, types, import direction, size budgets, what is generated"
	@echo "make format     rewrite the code in the common style"
	@echo "make proto      generate runtime/pb from proto/"
	@echo "make api-docs   write the endpoints and fields of docs/api.md"
	@echo "make chart-files  write what the Helm chart has from elsewhere"
	@echo "make properties  run the property tests with examples of their own"
	@echo "make soak       the long tests        make gpu-test   the tests that need a GPU"
	@echo "make clean      remove .venv, .venv-kernels, .venv-clients, .prometheus-3 and caches"

up: install
	$(BIN)/tandem up $(CONFIG)

down: install
	$(BIN)/tandem down $(if $(CONFIG),--config $(CONFIG))

# Sizes are `make budgets`, a part of `make check`.
test: install-dev
	$(BIN)/python -m pytest -q -rfEs $(BESIDE) --ignore tests/test_budgets.py \
		--durations 25 --durations-min 8

# What is too dear for every change: run it before a release, and every night. tests/nightly.toml has
# which commit each part passed on last.
nightly: nightly-test kernels-check clients-test mutants

# Hosts, Ray and routers of several whole clusters: two of them keep two cores busy.
nightly-test: JOBS = 2
nightly-test: install-dev
	$(BIN)/python -m pytest -q -rfEs $(BESIDE) -m nightly --durations 40

mutants: install-dev
	$(BIN)/python scripts/mutants.py

quick: install-dev
	$(BIN)/python scripts/quick.py $(BESIDE)

# Of `make test`, with examples that no run before has drawn.
properties: install-dev
	TANDEM_OTHER_EXAMPLES=1 $(BIN)/python -m pytest -q -rfEs $(BESIDE) \
		-m 'hypothesis and not gpu and not nightly and not soak and not clients'

soak: install-dev
	$(BIN)/python -m pytest -q -m soak

gpu-test: install-dev
	$(BIN)/python -m pytest -q -m gpu

clients-test: install-dev $(CLIENTS)/.installed
	TANDEM_CLIENTS=$(CLIENTS) $(BIN)/python -m pytest -q -m clients tests/clients

# In the interpreter; then what needs Triton's compiler and no GPU, and whether every kernel was run.
kernels-check: $(KERNELS)/.installed
	rm -rf $(RUNS)
	TANDEM_KERNEL_RUNS=$(RUNS) TRITON_INTERPRET=1 \
		$(KERNELS)/bin/python -m pytest -q -n $(JOBS) $(KERNEL_TESTS)
	TANDEM_KERNEL_RUNS=$(RUNS) $(KERNELS)/bin/python -m pytest -q -n $(JOBS) $(KERNEL_TESTS)

check: lint types imports budgets proto-check api-docs-check

lint: install-dev
	$(BIN)/ruff check $(SOURCES)
	$(BIN)/ruff format --check $(SOURCES)

# What mypy found out stays outside the tree, for the next clone as well.
MYPY_CACHE ?= $(or $(XDG_CACHE_HOME),$(HOME)/.cache)/tandem-mypy

types: install-dev
	$(BIN)/mypy --cache-dir $(MYPY_CACHE)

imports: install-dev
	$(BIN)/lint-imports

budgets: install-dev
	$(BIN)/python -m pytest -q tests/test_budgets.py

format: install-dev
	$(BIN)/ruff check --fix $(SOURCES)
	$(BIN)/ruff format $(SOURCES)

proto: install-dev
	scripts/proto.sh .

proto-check: install-dev
	scripts/proto.sh --check

api-docs: install-dev
	$(BIN)/python scripts/api_docs.py

api-docs-check: install-dev
	$(BIN)/python scripts/api_docs.py --check

chart-files: install-dev
	$(BIN)/python scripts/chart_files.py

install: $(VENV)/.installed

install-dev: $(VENV)/.installed-dev

$(VENV)/.made $(KERNELS)/.made $(CLIENTS)/.made:
	@command -v $(PYTHON) >/dev/null || \
		{ echo "error: no $(PYTHON); install Python 3.11 or later, or: make PYTHON=/path/to/python" >&2; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "error: $(PYTHON) is $$($(PYTHON) -V 2>&1), 3.11 or later is needed;" \
			"make PYTHON=/path/to/python" >&2; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || \
		{ echo "error: $(PYTHON) cannot make virtual environments; on Debian:" \
			"apt-get install python3-venv" >&2; exit 1; }
	@echo "making $(@D)"
	$(PYTHON) -m venv $(@D)
	@touch $@

$(KERNELS)/.installed: constraints-kernels.txt | $(KERNELS)/.made
	@echo "installing Triton into $(KERNELS) (a minute the first time)"
	$(KERNELS)/bin/python -m pip install --disable-pip-version-check --progress-bar off $(PIP_ARGS) \
		-c constraints-kernels.txt -q torch triton numpy safetensors psutil \
		hypothesis pytest pytest-asyncio pytest-timeout pytest-xdist
	@touch $@

# By uv, which is several times as fast with so many, from the index that pip is set up for; torch by pip, as above.
$(CLIENTS)/.installed: requirements-clients.txt | $(CLIENTS)/.made
	@echo "installing clients into $(CLIENTS) (a minute or two the first time)"
	@index="$${PIP_INDEX_URL:-$$($(CLIENTS)/bin/python -m pip config get global.index-url 2>/dev/null || true)}"; \
	export $${index:+UV_DEFAULT_INDEX="$$index"} UV_LINK_MODE=copy; \
	$(CLIENTS)/bin/python -m pip install --disable-pip-version-check --progress-bar off $(PIP_ARGS) \
		-c requirements-clients.txt -q uv==0.13.9 torch==2.13.0 && \
	$(CLIENTS)/bin/uv pip install -q --no-deps --python $(CLIENTS)/bin/python $(PIP_ARGS) \
		-r requirements-clients.txt || \
		{ echo "error: the package index does not give what requirements-clients.txt names (above: which);" \
			"make clients-test PIP_ARGS=\"--index-url URL\" takes another one" >&2; exit 1; }
	@touch $@

$(VENV)/.installed: pyproject.toml constraints-cpu.txt | $(VENV)/.made
	@echo "installing dependencies into $(VENV) (minutes the first time)"
	$(INSTALL) -q -e .
	@touch $@

$(VENV)/.installed-dev: pyproject.toml constraints-cpu.txt constraints-dev.txt | $(VENV)/.made
	@echo "installing dependencies and tools into $(VENV) (minutes the first time)"
	$(INSTALL) -c constraints-dev.txt -q -e '.[dev]'
	@touch $@ $(VENV)/.installed

clean:
	rm -rf $(VENV) $(KERNELS) $(CLIENTS) .prometheus-3 build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis \
		.import_linter_cache
	find $(SOURCES) -name __pycache__ -type d -prune -exec rm -rf {} +
