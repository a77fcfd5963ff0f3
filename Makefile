# Everything one does with Moiety from a checkout. `make` alone lists it.
# Each target makes what it needs (.venv and the packages in it), and is quick when that is there.

PYTHON ?= python3
ARGS ?=
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check install -qq --prefer-binary --constraint constraints.txt
INPUTS := pyproject.toml constraints.txt
RELEASE := $(VENV)/release

export PYTHONDONTWRITEBYTECODE := # else each of the hundreds of processes that the tests start compiles our modules again

.DEFAULT_GOAL := help
.PHONY: help serve test tests test-fast test-all checks style types contracts docs bench bench-gpu chaos soak clients fuzz images locks sbom audit fmt clean
.DELETE_ON_ERROR:

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-9s %s\n", $$1, $$2}' $(MAKEFILE_LIST)
	@echo '  Flags are passed on in ARGS: make serve ARGS="--port 18000"; another Python: make PYTHON=python3.12 serve'

serve: $(VENV)/.serve ## serve the bundled demo model (or ARGS="--model …") to tenants with keys
	@exec $(BIN)/moiety serve $(ARGS)

test: $(VENV)/.dev ## all that CI runs: lint, format, types, import contracts, tests
	@$(MAKE) --no-print-directory --jobs=2 checks tests

checks: style contracts types

tests:
	@$(BIN)/python -m pytest --workers=$$(($$(getconf _NPROCESSORS_ONLN) + 4)) $(ARGS) || \
	{ [ $$? = 1 ] || exit 2; echo 'FAILED BESIDE OTHERS: now alone, and named, since one that passes so is a defect too'; \
	$(BIN)/python -m pytest --last-failed --last-failed-no-failures=none --maxfail=1 --verbose $(ARGS); }

test-fast: export MOIETY_TEST_FAST := 1
test-fast: $(VENV)/.dev ## lint and each test function once, without servers and browsers: before a commit
	@$(MAKE) --no-print-directory style
	@$(BIN)/python -m pytest --workers=$$(getconf _NPROCESSORS_ONLN) -q $(ARGS)

test-all: export MOIETY_TEST_ALL := 1
test-all: test ## the same with every combination, every GPU kernels compile for, and more random examples

style:
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .

types:
	@$(BIN)/mypy

contracts:
	@$(BIN)/lint-imports

docs: $(VENV)/.docs ## build the documentation site into dist/docs; a dead link fails (ARGS=--clean)
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet $(ARGS)
	@echo 'dist/docs/index.html is the documentation'

bench: $(VENV)/.serve ## measure the engine's throughput on the demo model (or ARGS="--model … --json")
	@exec $(BIN)/moiety bench engine $(ARGS)

bench-gpu: ## check and measure the kernels on the GPU of this machine, in under 8 minutes
	@exec $$(test -x $(BIN)/python && echo $(BIN)/python || echo $(PYTHON)) benchmarks/bench_gpu.py $(ARGS)

chaos: $(VENV)/.dev ## break a small cluster under load in every way, for 14 minutes, and check the books (ARGS=--short)
	@PYTHONPATH="$(CURDIR)/benchmarks$${PYTHONPATH:+:$$PYTHONPATH}" exec nice $(BIN)/python -m chaos $(ARGS)

soak: $(VENV)/.dev ## a day in 20 minutes: 100 tenants, something restarted every three (ARGS="--hours 6 --rate 4")
	@PYTHONPATH="$(CURDIR)/benchmarks$${PYTHONPATH:+:$$PYTHONPATH}" exec nice $(BIN)/python -m chaos.soak $(ARGS)

clients: $(VENV)/.dev ## run the tasks of real clients and coding agents against a gateway; needs PyPI and npm (ARGS="--only openai")
	@PYTHONPATH="$(CURDIR)/benchmarks$${PYTHONPATH:+:$$PYTHONPATH}" exec $(BIN)/python -m clients $(ARGS)

fuzz: $(VENV)/.fuzz ## mutated input for all that reads what strangers send (ARGS="chat wire --seconds 600", ARGS=--list)
	@exec nice -n 19 $(BIN)/python -m tests.fuzz $(ARGS)

images: ## build the images with docker or podman (IMAGES="gateway …", TORCH=cpu, REGISTRY=…/)
	@helm/images/build.sh

locks: $(RELEASE)/.made ## lock what the images install to versions and hashes (ARGS=--upgrade for the newest)
	@PATH="$(CURDIR)/$(RELEASE)/bin:$$PATH" helm/images/lock.sh $(ARGS)

sbom: $(RELEASE)/.made ## write each image's bill of materials into dist/
	@PATH="$(CURDIR)/$(RELEASE)/bin:$$PATH" helm/images/sbom.sh

audit: $(RELEASE)/.made ## look for known vulnerabilities in what the images install, and lint the Dockerfile
	@PATH="$(CURDIR)/$(RELEASE)/bin:$$PATH" helm/images/audit.sh

fmt: $(VENV)/.dev ## format the code and mend what lint can mend
	@$(BIN)/ruff check --fix .
	@$(BIN)/ruff format .

clean: ## remove the virtual environment and every cache, but no data
	rm -rf $(VENV) .fuzz build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# The stamps: newer than what they were made from, so that a second run does nothing.
$(VENV)/.made:
	@$(PYTHON) -c 'import sys; sys.exit(0 if sys.version_info >= (3, 11) else \
	  "Moiety needs Python 3.11 or newer, and $(PYTHON) is %d.%d; try: make PYTHON=python3.12" % sys.version_info[:2])'
	@echo 'making $(VENV) …'
	@$(PYTHON) -m venv $(VENV)
	@$(PIP) --upgrade pip # that of Python 3.11 takes 50 s to choose versions, and a new one 20 s
	@touch $@

$(VENV)/.serve: $(VENV)/.made $(INPUTS)
	@echo 'installing Moiety into $(VENV); this takes a few minutes the first time …'
	@$(PIP) --editable '.[all]'
	@$(BIN)/moiety precompile # here and not at the first start, which would take longer
	@touch $@

$(VENV)/.dev: $(VENV)/.made $(INPUTS)
	@echo 'installing Moiety and its tests into $(VENV); this takes a few minutes the first time …'
	@$(PIP) --no-compile --editable '.[dev]' # Python compiles what is imported, a tenth of it
	@touch $@ $(VENV)/.serve

$(VENV)/.docs: $(VENV)/.made $(INPUTS)
	@echo 'installing MkDocs into $(VENV) …'
	@$(PIP) --editable '.[docs]'
	@touch $@

$(VENV)/.fuzz: $(VENV)/.dev
	@echo 'installing atheris, a fuzzer, into $(VENV) …'
	@$(PIP) --editable '.[dev,fuzz]'
	@touch $@

$(RELEASE)/.made: $(VENV)/.made helm/images/tools.txt
	@echo 'installing what releases are made with into $(RELEASE) …'
	@$(PYTHON) -m venv $(RELEASE)
	@$(RELEASE)/bin/python -m pip --disable-pip-version-check install -qq --requirement helm/images/tools.txt
	@touch $@
