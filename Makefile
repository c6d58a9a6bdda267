# Two commands do everything on a machine with Python >= 3.11 and make: `make demo` and `make test`.

PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed

.PHONY: install demo up test check chaos bench docs sql pictures clean help

help:            ## list the targets
	@grep -hE '^[a-z]+:.*##' $(MAKEFILE_LIST) | awk -F':.*## ' '{printf "  make %-8s %s\n", $$1, $$2}'

install: $(STAMP) ## make .venv with the `interlock` command in it

$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "Interlock needs Python 3.11 or newer; set PYTHON=python3.x"; exit 1; }
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "Installing Interlock into $(VENV) ..."
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e . $(DEV)
	@touch $@

DEV := boto3 hypothesis import-linter mcp "moto[s3,server]" mypy opentelemetry-sdk playwright "pydantic-ai-slim[anthropic,google,openai]" pytest pytest-asyncio pytest-xdist ruff schemathesis types-PyYAML

demo: install    ## a refund that stops for a person, on the embedded database
	@$(BIN)/interlock demo $(ARGS)

up: install      ## API and one worker on the embedded database
	@$(BIN)/interlock up $(ARGS)

test: install    ## the promises, against a real PostgreSQL; AT='2026-12-31 23:59:50' moves the clock; see also chaos
	@$(BIN)/python -m tests.browser.chromium
	@$(if $(AT),$(BIN)/python -m tests.faketime '$(AT)') $(BIN)/python -m pytest -n 2 --dist worksteal -m "not chaos" $(ARGS)

chaos: install   ## SIGKILL, SIGSTOP and database restarts under load, for minutes
	@$(BIN)/python -m pytest -m chaos $(ARGS)

pictures: install ## the console's pictures in the README and guides, made anew by the browser tests
	@$(BIN)/python -m tests.browser.chromium
	@KEEP_PICTURES=yes $(BIN)/python -m pytest tests/browser/test_pictures.py $(ARGS)

check: install   ## lint, types, import contracts, generated code and docs
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy
	@$(BIN)/lint-imports
	@$(BIN)/python -m codegen.statements --check
	@$(BIN)/python -m docs.generate --check

bench: install   ## throughput and latency as ratios to a hand-written ceiling
	@$(BIN)/python -m bench $(ARGS)

docs: install    ## regenerate docs/reference
	@$(BIN)/python -m docs.generate

sql: install     ## regenerate the typed functions of the statements in store/sql
	@$(BIN)/python -m codegen.statements

clean:           ## forget the virtual environment and the embedded database
	rm -rf $(VENV) .interlock
