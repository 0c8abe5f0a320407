# Many Devices, One Program. `make` alone says what there is; nothing but Python 3.11 to 3.13 is needed.
# PYTHON=/path/to/python3.12 chooses the Python, VENV=folder the virtual environment.

VENV ?= .venv
PYTHON ?=
PORT ?= 8000
LANGUAGE ?= en
WORKERS ?= 2
PIP_OPTIONS ?=
BIN := $(VENV)/bin
RUN := $(BIN)/python -m
INSTALLED := $(VENV)/.requirements-installed
EDITABLE := $(VENV)/.packages-installed
PACKAGES := pyproject.toml bookkit/pyproject.toml companion/pyproject.toml
export PIP_DISABLE_PIP_VERSION_CHECK = 1
# Where it is set, as in many containers, every kernel compiles 2,000 modules anew.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help venv site test serve live figures sync lint faults kills processes launchers po \
	translations second-compiler linkcheck upgrade publish-as release-ref hooks clean

help: ## say what there is
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "make %-18s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

# The environment is rebuilt from nothing when requirements.txt differs from the one it was built
# from, which is noted last: an interrupted installation is never taken for a complete one. The two
# packages of this repository are installed again when what they say of themselves changed; an edit
# of their code needs nothing.
venv: ## make the virtual environment (every other target does so when needed)
	@cmp -s requirements.txt $(INSTALLED) || { \
	  set -e; \
	  python=$$(bookkit/find_python.sh "$(PYTHON)"); \
	  echo "installing requirements.txt into $(VENV) with $$python (some minutes, once)"; \
	  rm -f $(INSTALLED); \
	  "$$python" -m venv --clear $(VENV); \
	  $(BIN)/pip install --quiet $(PIP_OPTIONS) -r requirements.txt; \
	  cp requirements.txt $(INSTALLED); \
	}
	@cat $(PACKAGES) | cmp -s - $(EDITABLE) || { \
	  set -e; \
	  $(BIN)/pip install --quiet --no-deps -e . -e ./bookkit -e ./companion; \
	  cat $(PACKAGES) > $(EDITABLE); \
	}

site: venv ## build the site in both languages into _build/html, executing what changed
	@$(RUN) bookkit site

# Programs that are killed at certain moments come last, when nothing else makes them wait.
test: venv ## execute what changed, then run the tests (PAGE=02-variables: those of one page)
ifdef PAGE
	@$(RUN) pytest tests/book/test_$(subst -,_,$(PAGE)).py
else
	@.ci/browser || echo "The built site is not looked at without one; all else is checked."
	@$(RUN) bookkit execute
	@$(RUN) pytest tests -m "not kills and not faults" -n $(WORKERS) --dist loadfile --no-loadscope-reorder
	@$(RUN) pytest tests/*/test_*_kills.py -n $(WORKERS) --dist loadfile --no-loadscope-reorder
endif

serve: site ## build the site and serve it on http://localhost:8000 (PORT=…)
	@echo "http://localhost:$(PORT)/"
	@$(RUN) http.server --bind 127.0.0.1 --directory _build/html $(PORT)

WATCHED := src/meshscope companion bookkit/src site locale _config.yml _toc.yml
UNWATCHED := _build notebooks tests .git $(VENV) __pycache__ *.pyc *.mo
live: venv ## rebuild and reload pages as files are saved (LANGUAGE=zh_TW for Chinese)
	@$(RUN) sphinx_autobuild --port $(PORT) $(WATCHED:%=--watch %) $(UNWATCHED:%=--ignore "$(CURDIR)/%") \
	  -q -c . -D language=$(LANGUAGE) -d _build/live/$(LANGUAGE)/doctrees . _build/live/$(LANGUAGE)/html

figures: venv ## draw the figures whose program, or what it reads, changed
	@$(RUN) bookkit figures

sync: venv ## write notebooks/ and setup cells from book/
	@$(RUN) bookkit sync

lint: venv ## the rules of pages, ruff, mypy (as on Windows too), codespell, actionlint, zizmor
	$(RUN) ruff check .
	$(RUN) ruff format --check .
	$(RUN) mypy
	$(RUN) mypy --platform win32 --cache-dir .mypy_cache/win32
	$(BIN)/codespell
	$(RUN) bookkit lint
	$(RUN) bookkit second-compiler --check
	bookkit/check_workflows.sh $(VENV)

faults: venv ## plant the listed mistakes in pages and see each one noticed (PAGE=… NAME=…: some, one)
	@$(RUN) pytest tests/book/test_faults.py -n $(WORKERS) --dist loadgroup -k "$(or $(PAGE),test) and $(or $(NAME),test)"

kills: venv ## kill the training program of examples/ twenty times, and see that nothing is lost
	@TRAIN_KILLS=20 $(RUN) pytest -s tests/examples/test_train_kills.py

processes: venv ## the same with two processes, one of which is killed twenty times
	@TRAIN_PROCESS_KILLS=20 $(RUN) pytest -s tests/examples/test_train_processes_kills.py

# An environment of its own: Ray is large, and the book needs neither it nor Kubernetes' object models.
launchers: ## check the files of examples/launch with Ray and with the object models of Kubernetes
	@$(MAKE) --no-print-directory venv VENV=_build/launch
	@_build/launch/bin/pip install --quiet $(PIP_OPTIONS) -r requirements-launch.txt
	@_build/launch/bin/python -m pytest examples/launch/checks

po: venv ## write the catalogues for translators, locale/*.po, from the English text
	@$(RUN) bookkit po

translations: venv ## how much of each page is translated, and what is broken (LIST=yes: every message)
	@$(if $(MSGFMT),.ci/need msgfmt gettext)
	@$(RUN) bookkit translations $(if $(LIST),--list) $(if $(MSGFMT),--msgfmt)

# They lie in a folder of their own: nothing that is installed in $(VENV) sees them.
COMPILERS := _build/compilers
second-compiler: venv ## compile the book's programs for TPU and GPU too (COMPARE=yes: write nothing; ONLY="NAME …")
	@cmp -s requirements-compilers.txt $(COMPILERS)/requirements-compilers.txt || { \
	  set -e; \
	  echo "installing compilers (470 MB, under the terms in requirements-compilers.txt) into $(COMPILERS)"; \
	  rm -rf $(COMPILERS); \
	  $(BIN)/pip install --quiet $(PIP_OPTIONS) --no-deps --target $(COMPILERS) -r requirements-compilers.txt; \
	  cp requirements-compilers.txt $(COMPILERS)/; \
	}
	@$(RUN) bookkit second-compiler --compilers $(COMPILERS) $(if $(ONLY),--only $(ONLY)) $(if $(COMPARE),--compare)

OPENERS := https://colab.research.google.com/github,https://mybinder.org/v2/gh
linkcheck: venv ## try the links to other sites
	@$(RUN) sphinx -q -b linkcheck -D linkcheck_anchors_ignore='^!,^L[0-9],^issuecomment-,^discussion' \
	  -D linkcheck_ignore="$$(sed -n 's/^ *\(baseurl\|url\): //p' _config.yml | paste -sd,),$(OPENERS)" \
	  -D linkcheck_timeout=30 -D linkcheck_retries=3 -c . . _build/linkcheck

upgrade: venv ## take the newest releases that requirements.in allows, and list the outputs that changed
	@$(RUN) bookkit execute --out _build/outputs-before
	@$(BIN)/pip install --quiet uv
	@{ echo "# Compiled from requirements.in for Python 3.11 to 3.13 by \`make upgrade\`: do not edit."; \
	  $(BIN)/uv pip compile --quiet --universal --python-version 3.11 --upgrade --no-header --no-annotate \
	    --fork-strategy requires-python --no-emit-package bookkit --no-emit-package many-devices requirements.in && \
	  printf '.\n./bookkit\n./companion\n'; } > _build/requirements.new
	@cp _build/requirements.new requirements.txt
	@$(MAKE) --no-print-directory venv
	@$(RUN) bookkit execute --out _build/outputs-after
	@$(RUN) bookkit compare _build/outputs-before _build/outputs-after

publish-as: venv ## write another address everywhere: URL=https://me.github.io/book/ REPO=https://github.com/me/book
	@$(RUN) bookkit publish-as --site "$(URL)" --repo "$(REPO)"

release-ref: venv ## write another branch or tag everywhere: REF=v1.0
	@$(RUN) bookkit publish-as --ref "$(REF)"

hooks: venv ## check a commit before it is made: `make lint` without what is slow (git's own hooks)
	@git config core.hooksPath .githooks
	@echo "git runs .githooks/pre-commit before each commit; git commit --no-verify passes it over"

clean: ## remove what was built, executions included; the virtual environment stays
	rm -rf _build .pytest_cache .hypothesis .mypy_cache .ruff_cache
