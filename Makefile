# Many Devices, One Program. `make` alone says what there is; nothing but Python 3.11 to 3.13 is needed.
# PYTHON=/path/to/python3.12 chooses the Python, VENV=folder the virtual environment.

VENV ?= .venv
PYTHON ?=
PORT ?= 8000
LANGUAGE ?= en
WORKERS ?= 2
PIP_OPTIONS ?=
UV := uv==0.13.9
BIN := $(VENV)/bin
RUN := $(BIN)/python -m
INSTALLED := $(VENV)/.requirements-installed
TEST_INSTALLED := $(VENV)/.requirements-test-installed
EDITABLE := $(VENV)/.packages-installed
PACKAGES := pyproject.toml bookkit/pyproject.toml companion/pyproject.toml
export PIP_DISABLE_PIP_VERSION_CHECK = 1
# Where it is set, as in many containers, every kernel compiles 2,000 modules anew.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help site serve test faults lint sync po translations second-compiler upgrade publish-as \
	venv venv-test

help: ## say what there is
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "make %-16s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

site: venv ## build the site in both languages into _build/html, executing what changed
	@$(RUN) bookkit site

WATCHED := src/meshscope companion bookkit/src site locale _config.yml _toc.yml
UNWATCHED := _build notebooks tests .git $(VENV) __pycache__ *.pyc *.mo
serve: venv ## show the pages on http://localhost:8000, again after each save (LANGUAGE=zh_TW, PORT=…)
	@$(RUN) sphinx_autobuild --port $(PORT) $(WATCHED:%=--watch %) $(UNWATCHED:%=--ignore "$(CURDIR)/%") \
	  -q -j auto -c . -D language=$(LANGUAGE) -d _build/live/$(LANGUAGE)/doctrees . _build/live/$(LANGUAGE)/html

# Programs that are killed at certain moments come last, when nothing else makes them wait.
test: venv-test ## execute what changed, then run the tests (PAGE=02-variables: those of one page)
ifdef PAGE
	@$(RUN) pytest tests/book/test_$(subst -,_,$(PAGE)).py
else
	@.ci/browser || echo "The built site is not looked at without one; all else is checked."
	@$(RUN) bookkit execute
	@$(RUN) pytest tests -m "not kills and not faults and not slow" -n $(WORKERS) --dist loadfile --no-loadscope-reorder --maxfail 25
	@$(RUN) pytest tests/*/test_*_kills.py -n $(WORKERS) --dist loadfile --no-loadscope-reorder
endif

# A fault can end its process, or stop it for ever: then its worker is replaced, and it is tried once more.
# Plain: where CI is set, pytest would write out the difference of two files, for minutes.
PLANT = $(RUN) pytest --no-header --assert=plain tests/book/test_faults.py -n $(WORKERS) --dist worksteal \
  -o faulthandler_timeout=$(or $(LIMIT),600) -o faulthandler_exit_on_timeout=true \
  $(PAGE:%=--page %) -k "$(or $(NAME),test)" -m "$(or $(FAULT_MARKS),slow or not slow)"
faults: venv-test ## plant the listed mistakes in pages and see each one noticed (PAGE=… NAME=…: some, one)
	@$(PLANT) || { echo "Once more, those that failed:"; $(PLANT) --last-failed; }

WORKFLOWS := .github/workflows/*.yml .github/examples/*.yml
lint: venv-test ## the rules of pages, figures, ruff, mypy (as on Windows too), spelling, workflows
	$(RUN) ruff check .
	$(RUN) ruff format --check .
	$(RUN) mypy
	$(RUN) mypy --platform win32 --cache-dir .mypy_cache/win32
	$(BIN)/codespell
	$(RUN) bookkit lint
	$(RUN) bookkit figures --check
	$(RUN) bookkit second-compiler --check
	$(BIN)/check-jsonschema --quiet --builtin-schema vendor.github-workflows $(WORKFLOWS)
	$(BIN)/zizmor --offline --no-progress --quiet $(WORKFLOWS) .github/actions/*/action.yml

sync: venv ## write what is made from book/: notebooks, setup cells, lists
	@$(RUN) bookkit sync

po: venv ## update the catalogues for translators, locale/*/LC_MESSAGES/book.po (needs gettext)
	@$(RUN) bookkit po

translations: venv ## which messages are left to translate, and what is broken
	@$(RUN) bookkit translations

# They are in a folder of their own: nothing that is installed in $(VENV) sees them.
COMPILERS := _build/compilers
second-compiler: venv ## compile the book's programs for TPU and GPU too (ONLY="NAME …": some)
	@cmp -s requirements-compilers.txt $(COMPILERS)/requirements-compilers.txt || { \
	  set -e; \
	  echo "installing compilers (470 MB, under the terms in requirements-compilers.txt) into $(COMPILERS)"; \
	  rm -rf $(COMPILERS); \
	  $(BIN)/pip install --quiet $(PIP_OPTIONS) --no-deps --target $(COMPILERS) -r requirements-compilers.txt; \
	  cp requirements-compilers.txt $(COMPILERS)/; \
	}
	@$(RUN) bookkit second-compiler --compilers $(COMPILERS) $(if $(ONLY),--only $(ONLY))

COMPILE := uv pip compile --quiet --universal --python-version 3.11 --upgrade --no-header --no-annotate \
	--fork-strategy requires-python --no-emit-package bookkit --no-emit-package many-devices
COMPILED := for Python 3.11 to 3.13 by \`make upgrade\`: do not edit.
upgrade: venv ## take the newest releases that requirements*.in allow, and show the outputs that changed
	@$(RUN) bookkit execute --out _build/outputs-before
	@{ echo "# Compiled from requirements.in $(COMPILED)"; $(BIN)/$(COMPILE) requirements.in && \
	  printf '.\n./bookkit\n./companion\n'; } > _build/requirements.new
	@grep == _build/requirements.new > _build/constraints.txt
	@{ echo "# Compiled from requirements-test.in $(COMPILED)"; \
	  $(BIN)/$(COMPILE) -c _build/constraints.txt requirements-test.in; } > _build/requirements-test.new
	@cp _build/requirements.new requirements.txt; cp _build/requirements-test.new requirements-test.txt
	@$(MAKE) --no-print-directory venv
	@$(RUN) bookkit execute --out _build/outputs-after
	@git --no-pager diff --no-index _build/outputs-before _build/outputs-after || true

publish-as: venv ## write another address everywhere: URL=https://me.github.io/book/ REPO=https://github.com/me/book; or REF=v1.0
	@$(RUN) bookkit publish-as $(if $(URL),--site "$(URL)") $(if $(REPO),--repo "$(REPO)") $(if $(REF),--ref "$(REF)")

# The environment is rebuilt from nothing when requirements.txt differs from the one it was built
# from, which is noted last: an interrupted installation is never taken for a complete one. The
# packages of this repository are installed again when what they say of themselves changed; an edit
# of their code needs nothing. uv is quicker; where it cannot reach what pip can, pip does it.
install = { $(BIN)/pip install --quiet $(UV) && \
	VIRTUAL_ENV=$(abspath $(VENV)) $(BIN)/uv pip install --quiet -r $(1); } || $(BIN)/pip install --quiet $(PIP_OPTIONS) -r $(1)
venv:
	@cmp -s requirements.txt $(INSTALLED) || { \
	  set -e; \
	  python=$$(bookkit/find_python.sh "$(PYTHON)"); \
	  echo "installing requirements.txt into $(VENV) with $$python (a minute or more, once)"; \
	  rm -f $(INSTALLED); \
	  "$$python" -m venv --clear $(VENV); \
	  $(call install,requirements.txt); \
	  cp requirements.txt $(INSTALLED); \
	}
	@cat $(PACKAGES) | cmp -s - $(EDITABLE) || { \
	  set -e; \
	  $(BIN)/pip install --quiet --no-deps -e . -e ./bookkit -e ./companion; \
	  cat $(PACKAGES) > $(EDITABLE); \
	}

venv-test: venv
	@cmp -s requirements-test.txt $(TEST_INSTALLED) || { \
	  set -e; \
	  $(call install,requirements-test.txt); \
	  cp requirements-test.txt $(TEST_INSTALLED); \
	}
