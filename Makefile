# Two commands do everything on a machine with Python >= 3.11 and make: `make demo` and `make test`.

PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
PIP    := $(BIN)/python -m pip --quiet --disable-pip-version-check
# What is in .venv: the package as a user has it, and with it everything for work on Interlock itself.
USER   := $(VENV)/.user
DEV    := $(VENV)/.dev
# For a release: only what the wheel asks for.
CLEAN   := $(VENV)/release
VERSION := $(shell sed -n 's/^version = "\(.*\)"/\1/p' pyproject.toml)

# mkdocs-material prints an advertisement otherwise.
export NO_MKDOCS_2_WARNING := 1

.PHONY: install demo up test chaos coverage pictures check bench docs sql site release clean help

help:            ## list the targets
	@grep -hE '^[a-z]+:.*##' $(MAKEFILE_LIST) | awk -F':.*## ' '{printf "  make %-8s %s\n", $$1, $$2}'

install: $(DEV)  ## make .venv with the `interlock` command and the tools for development

$(USER): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "Interlock needs Python 3.11 or newer; set PYTHON=python3.x"; exit 1; }
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "Installing Interlock into $(VENV) ..."
	@$(PIP) install -c constraints.txt -e .
	@touch $@

# The pip that comes with Python 3.11 cannot read dependency groups.
$(DEV): $(USER)
	@echo "Installing the tools for development into $(VENV) ..."
	@$(PIP) install -c constraints.txt --upgrade "pip>=25.1"
	@$(PIP) install -c constraints.txt --group dev
	@touch $@

demo: $(USER)    ## a refund that stops for a person, on the embedded database
	@$(BIN)/interlock demo $(ARGS)

up: $(USER)      ## API and one worker on the embedded database
	@$(BIN)/interlock up $(ARGS)

test: $(DEV)     ## the promises, against a real PostgreSQL; AT='2026-12-31 23:59:50' moves the clock; see also chaos
	@$(BIN)/python -m tests.browser.chromium
	@$(if $(AT),$(BIN)/python -m tests.faketime '$(AT)') $(BIN)/python -m pytest -n 2 --dist worksteal -m "not chaos" $(ARGS)

chaos: $(DEV)    ## SIGKILL, SIGSTOP and database restarts under load, for minutes
	@$(BIN)/python -m pytest -m chaos $(ARGS)

coverage: $(DEV) ## which lines and branches the tests execute
	@$(BIN)/python -m pytest -n 2 --dist worksteal -m "not chaos" --cov --cov-report=html $(ARGS)
	@echo "Covered: $$($(BIN)/coverage report --format=total) % of lines and branches; htmlcov/index.html has the details"

pictures: $(DEV) ## the pictures of the console in README and guides, taken again
	@$(BIN)/python -m tests.browser.chromium
	@KEEP_PICTURES=yes $(BIN)/python -m pytest tests/browser/test_pictures.py $(ARGS)

check: $(DEV)    ## lint, types, import contracts, generated code and documents, the documentation site
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy
	@$(BIN)/lint-imports
	@$(BIN)/python -m codegen.statements --check
	@$(BIN)/python -m docs.generate --check
	@$(BIN)/python -m mkdocs build --quiet --strict

bench: $(DEV)    ## throughput and latency as ratios to a hand-written ceiling
	@$(BIN)/python -m bench $(ARGS)

docs: $(DEV)     ## regenerate docs/reference
	@$(BIN)/python -m docs.generate

sql: $(DEV)      ## regenerate the typed functions of the statements in store/sql
	@$(BIN)/python -m codegen.statements

site: $(DEV)     ## the documentation as a website, in site/
	@$(BIN)/python -m mkdocs build --quiet --strict
	@echo "open site/index.html"

release: $(DEV)  ## wheel, source archive and SBOM in dist/, tried in an environment of their own
	@rm -rf dist $(CLEAN)
	@$(BIN)/python -m build --no-isolation > $(VENV)/build.log 2>&1 || { cat $(VENV)/build.log; exit 1; }
	@$(PYTHON) -m venv --without-pip $(CLEAN)
	@$(PIP) --python $(CLEAN) install --no-deps --no-index --find-links dist interlock==$(VERSION)
	@$(PIP) --python $(CLEAN) install -c constraints.txt interlock==$(VERSION)
	@INTERLOCK_DATA_DIR=$(CLEAN)/data $(CLEAN)/bin/interlock demo --yes > $(VENV)/demo.log || { cat $(VENV)/demo.log; exit 1; }
	@$(BIN)/cyclonedx-py environment --pyproject pyproject.toml --output-reproducible --output-file dist/interlock-$(VERSION).cdx.json $(CLEAN)
	@ls -l dist

clean:           ## forget the virtual environment and the embedded database
	rm -rf $(VENV) .interlock
