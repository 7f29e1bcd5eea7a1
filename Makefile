# One door for each habit; `make` alone prints this page. Needs make, a shell and Python 3.11, 3.12 or 3.13.

VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
PYTEST = $(BIN)/python -m pytest $(PYTEST_ARGS)
# Two processes by default: more only help where there are more cores.
JOBS ?= 2

# The machine's own Python if it will do, else a newer one beside it. PYTHON=… names another.
PYTHON ?= $(shell for python in python3 python3.13 python3.12 python3.11 python; do \
	$$python -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] < (3, 14))' 2>/dev/null \
	&& echo $$python && break; done)

.DEFAULT_GOAL := help
.PHONY: help setup demo up test test-fast test-fleet test-matrix coverage soak fmt lint types arch docs docs-check wheel ci clean

help: ## print this page
	@echo 'make TARGET, where TARGET is one of'
	@sed -n 's/^\([a-z-]*\):[^#]*## \(.*\)$$/  \1	\2/p' $(firstword $(MAKEFILE_LIST)) | expand -t 16
	@echo 'PYTEST_ARGS="-k approve -x" narrows the tests; JOBS=4 runs more of them at once.'

setup: $(STAMP) ## make .venv and install everything into it (again when pyproject.toml has changed)

$(STAMP): pyproject.toml
	@set -e; echo 'Installing into $(VENV): about half a minute.'; \
	if command -v uv >/dev/null 2>&1; then \
	    $(BIN)/python -c '' 2>/dev/null || uv venv --quiet --clear --python '>=3.11,<3.14' $(VENV); \
	    VIRTUAL_ENV=$(VENV) uv pip install --quiet --editable . --group dev; \
	else \
	    if [ -z '$(PYTHON)' ]; then \
	        echo 'Python 3.11, 3.12 or 3.13 is needed and none was found: PYTHON=/path/to/python3 names one.' >&2; exit 1; \
	    fi; \
	    $(BIN)/python -m pip --version >/dev/null 2>&1 || $(PYTHON) -m venv --clear $(VENV); \
	    $(BIN)/python -m pip install --quiet --upgrade 'pip>=25.1'; \
	    $(BIN)/python -m pip install --quiet --editable . --group dev; \
	fi
	@touch $@

demo: setup ## show the main job: two workers, one killed in a tool call, every run ends once
	@$(BIN)/cortex-workers demo

up: setup ## run the whole stack in this terminal until Ctrl-C
	@$(BIN)/cortex-workers up

test: setup ## every test: the quick floors at once, then the fleet
	$(PYTEST) -n $(JOBS) -m 'not fleet and not soak' tests
	$(PYTEST) -m 'fleet and not soak' tests

test-fast: setup ## what tells most in the least time: everything without processes of its own
	$(PYTEST) -n $(JOBS) -m 'not fleet and not soak' --ignore=tests/embedded tests

test-fleet: setup ## real workers, a real broker, real signals
	$(PYTEST) -m 'fleet and not soak' tests

test-matrix: setup ## the tests that depend on it against another PostgreSQL, Redis and RabbitMQ
	$(BIN)/python -m tests.matrix -n $(JOBS)

coverage: setup ## which lines the quick floors reach
	$(BIN)/coverage erase
	$(BIN)/coverage run -m pytest -n $(JOBS) -m 'not fleet and not soak' $(PYTEST_ARGS) tests
	$(BIN)/coverage combine --quiet
	$(BIN)/coverage report --skip-covered

soak: setup ## minutes of load
	$(PYTEST) -m soak tests

fmt: setup ## bring the code into its form
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

lint: setup ## style and form
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: setup ## mypy, strict
	$(BIN)/mypy

arch: setup ## who may import whom
	$(BIN)/lint-imports --no-logo

docs: setup ## write the generated parts of the documentation anew
	$(BIN)/python -m cortex_workers.docs

docs-check: setup ## fail when a generated part is stale
	$(BIN)/python -m cortex_workers.docs --check

wheel: setup ## build the sdist and the wheel into dist/
	$(BIN)/python -m build --no-isolation --outdir dist

ci: setup ## what CI runs, the quick checks first
	@for step in lint types arch docs-check test wheel; do \
	    echo "== $$step"; $(MAKE) --no-print-directory $$step || exit $$?; \
	done

clean: ## delete what was made here, the data of the embedded servers included; .venv stays
	rm -rf .cortex dist build .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache .coverage*
	find cortex_workers tests -name __pycache__ -type d -prune -exec rm -rf {} +
