# Everything a person or CI runs. The first target that needs it makes .venv; stamps in it remember
# what is installed, so that a second call costs nothing.

SHELL := /bin/bash
PYTHON ?= python3
PIP_ARGS ?=
CONFIG ?=
# What `make fuzz` fuzzes, and for how long in all.
TARGET ?= all
SECONDS ?= 3600
# Whether `make locks` moves to the newest versions.
UPGRADE ?=
# Test processes at once; tests of clusters wait more than they compute.
JOBS ?= 3
# Files in the order of their names: those of clusters, with few long tests, must not come last.
BESIDE = -n $(JOBS) --dist loadfile --no-loadscope-reorder
# What the first process has compiled serves the others, too.
export PYTHONDONTWRITEBYTECODE =
VENV := .venv
BIN := $(VENV)/bin
PACKAGES := deploy bench router prefill decode worker engine kv_transfer experts grammar runtime
SOURCES := $(PACKAGES) tools scripts tests
# Apart from .venv, with what kernels need and nothing else: none of them may come to need more.
KERNELS := .venv-kernels
# Apart as well: others' clients, with whatever they want to have beside them.
CLIENTS := .venv-clients
# Apart as well: pip-audit.
SCAN := .venv-scan
# Apart, too: what runs, instrumented.
FUZZ := .venv-fuzz
# Has pip and uv, and makes and fills the others.
UV := .venv-uv
RUNS := $(KERNELS)/runs
KERNEL_TESTS := -m gpu tests/engine/attention tests/engine/formats tests/engine/kernels \
	tests/engine/ops tests/engine/parallel/nvlink tests/engine/sampling tests/bench/tuner/test_bench_gpu.py
INSTALL = $(UV)/bin/python -m scripts.install

.DEFAULT_GOAL := help
.PHONY: help up down test nightly nightly-test images-test mutants kernels-check quick check lint types imports \
	budgets model proto proto-check api-docs api-docs-check chart-files format properties soak gpu-test \
	clients-test fuzz locks locks-check sbom scan image-digests install install-dev clean

help:
	@echo "make up         set up and start the default cluster (CONFIG=file.toml for another)"
	@echo "make down       stop it"
	@echo "make test       set up and run the tests that every change must pass"
	@echo "make nightly    run all that needs no GPU and is not in make test (hours)"
	@echo "make images-test  build the CPU image, run it and the chart's pods in it"
	@echo "make mutants    remove ten guards, one at a time: the tests must fail each time"
	@echo "make quick      run the quick tests of what a change touches"
	@echo "make clients-test  run litellm, lm-eval, guidellm and aiperf against a cluster"
	@echo "make fuzz       fuzz the parsers (TARGET=a name, SECONDS=3600 of all of them together)"
	@echo "make kernels-check  run the Triton kernels on this CPU, in Triton's interpreter"
	@echo "make check      lint, types, import direction, size budgets, what is generated"
	@echo "make model      search the model of the hand-over with spin (docs/model)"
	@echo "make format     rewrite the code in the common style"
	@echo "make proto      generate runtime/pb from proto/, and golden bytes of what it says"
	@echo "make api-docs   write the endpoints and fields of docs/use/api.md"
	@echo "make chart-files  write what the Helm chart has from elsewhere"
	@echo "make properties  run the property tests with examples of their own"
	@echo "make soak       the long tests        make gpu-test   the tests that need a GPU"
	@echo "make locks      lock what pyproject.toml asks for (UPGRADE=1: at the newest versions)"
	@echo "make locks-check  whether the locks are up to date and the public index has all of them"
	@echo "make sbom       write bills of materials (CycloneDX) of what runs into build/sbom"
	@echo "make scan       look the locks up in PyPI's database of known vulnerabilities (needs pypi.org)"
	@echo "make image-digests  write the digests of the images' bases into the Dockerfiles"
	@echo "make clean      remove .venv, .venv-kernels, .venv-clients, .venv-scan, .venv-fuzz, .venv-uv, .prometheus-3 and caches"

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
nightly: nightly-test kernels-check clients-test images-test mutants

# Hosts, Ray and routers of several whole clusters: two of them keep two cores busy.
nightly-test: JOBS = 2
nightly-test: install-dev
	-@scripts/prometheus_3.sh
	$(BIN)/python -m pytest -q -rfEs $(BESIDE) -m nightly --durations 40

# The CPU image, built and run without a daemon, and the chart's pods in it; needs root, buildah and debootstrap.
images-test: install-dev
	$(BIN)/python -m tests.images.build build/image
	TANDEM_IMAGE=build/image $(BIN)/python -m pytest -q -rfEs -m "not soak" tests/images tests/pods

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

# By coverage; tests/fuzz keeps what is found, and any crash.
fuzz: $(FUZZ)/.installed
	$(FUZZ)/bin/python -m tests.fuzz $(TARGET) $(SECONDS)

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

model: install-dev
	$(BIN)/python scripts/model.py

format: install-dev
	$(BIN)/ruff check --fix $(SOURCES)
	$(BIN)/ruff format $(SOURCES)

proto: install-dev
	scripts/proto.sh .
	$(BIN)/python -m tests.runtime.golden

proto-check: install-dev
	scripts/proto.sh --check

api-docs: install-dev
	$(BIN)/python scripts/api_docs.py

api-docs-check: install-dev
	$(BIN)/python scripts/api_docs.py --check

chart-files: install-dev
	$(BIN)/python scripts/chart_files.py

locks: $(UV)/.installed
	$(UV)/bin/python -m scripts.locks $(if $(UPGRADE),--upgrade)

locks-check: $(UV)/.installed
	$(UV)/bin/python -m scripts.locks --check

# The warning: from a list it is not known what needs what.
sbom: install-dev
	mkdir -p build/sbom
	for lock in runtime gpu; do \
		$(BIN)/python -W ignore::UserWarning -m cyclonedx_py requirements --pyproject pyproject.toml \
			--output-reproducible -o build/sbom/$$lock.cdx.json requirements/$$lock.txt || exit 1; \
	done

# All locks, also behind one with a finding. Strict: a package that the database does not know is a failure,
# as it is where an index answers in the place of pypi.org.
scan: $(SCAN)/.installed
	@status=0; for lock in requirements/*.txt; do \
		echo "$$lock"; \
		$(SCAN)/bin/pip-audit --strict --require-hashes --disable-pip --progress-spinner off \
			-r $$lock || status=1; \
	done; exit $$status

image-digests:
	scripts/image_digests.sh

install: $(VENV)/.installed

install-dev: $(VENV)/.installed-dev

$(UV)/.installed: requirements/uv.txt
	@command -v $(PYTHON) >/dev/null || \
		{ echo "error: no $(PYTHON); install Python 3.11 or later, or: make PYTHON=/path/to/python" >&2; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "error: $(PYTHON) is $$($(PYTHON) -V 2>&1), 3.11 or later is needed;" \
			"make PYTHON=/path/to/python" >&2; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || \
		{ echo "error: $(PYTHON) cannot make virtual environments; on Debian:" \
			"apt-get install python3-venv" >&2; exit 1; }
	@echo "installing uv into $(UV)"
	@$(PYTHON) -m venv $(UV)
	@$(UV)/bin/python -m pip install --disable-pip-version-check --progress-bar off -q $(PIP_ARGS) \
		--require-hashes -r requirements/uv.txt
	@touch $@

$(KERNELS)/.installed: requirements/kernels.txt | $(UV)/.installed
	@echo "installing Triton into $(KERNELS)"
	@$(INSTALL) $(KERNELS) requirements/kernels.txt $(PIP_ARGS)
	@touch $@

$(CLIENTS)/.installed: requirements/clients.txt | $(UV)/.installed
	@echo "installing clients into $(CLIENTS)"
	@$(INSTALL) $(CLIENTS) requirements/clients.txt $(PIP_ARGS)
	@touch $@

# It asks for no PyTorch: --cuda leaves a CPU build of it out.
$(SCAN)/.installed: requirements/scan.txt | $(UV)/.installed
	@echo "installing pip-audit into $(SCAN)"
	@$(INSTALL) $(SCAN) requirements/scan.txt --cuda $(PIP_ARGS)
	@touch $@

$(FUZZ)/.installed: requirements/fuzz.txt | $(UV)/.installed
	@echo "installing Atheris and what it fuzzes into $(FUZZ)"
	@$(INSTALL) $(FUZZ) requirements/fuzz.txt $(PIP_ARGS)
	@touch $@

$(VENV)/.installed: pyproject.toml requirements/runtime.txt | $(UV)/.installed
	@echo "installing dependencies into $(VENV) (a minute or more the first time)"
	@$(INSTALL) $(VENV) requirements/runtime.txt --editable . $(PIP_ARGS)
	@touch $@

$(VENV)/.installed-dev: pyproject.toml requirements/dev.txt | $(UV)/.installed
	@echo "installing dependencies and tools into $(VENV) (a minute or more the first time)"
	@$(INSTALL) $(VENV) requirements/dev.txt --editable . $(PIP_ARGS)
	@touch $@ $(VENV)/.installed

clean:
	rm -rf $(VENV) $(KERNELS) $(CLIENTS) $(SCAN) $(FUZZ) $(UV) .prometheus-3 build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis \
		.import_linter_cache
	find $(SOURCES) -name __pycache__ -type d -prune -exec rm -rf {} +
