# Many Devices, One Program. `make` alone says what there is; nothing but Python 3.11 to 3.13 is needed.
# PYTHON=/path/to/python3.12 chooses the Python, VENV=folder the virtual environment.

VENV ?= .venv
PYTHON ?=
PORT ?= 8000
LANGUAGE ?= en
BIN := $(VENV)/bin
RUN := $(BIN)/python -m
INSTALLED := $(VENV)/.requirements-installed
export PIP_DISABLE_PIP_VERSION_CHECK = 1

.DEFAULT_GOAL := help
.PHONY: help venv site test serve live sync bench lint wheel mutants mutants-meshscope coverage offline po translations \
	new-language linkcheck colab matrix canary upgrade publish-as release-ref clean

help: ## say what there is
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "make %-12s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

# The environment is rebuilt from nothing when requirements.txt differs from the one it was built
# from, which is noted last: an interrupted installation is never taken for a complete one.
venv: ## make the virtual environment (every other target does so when needed)
	@cmp -s requirements.txt $(INSTALLED) || { \
	  set -e; \
	  python=$$(tools/find_python.sh "$(PYTHON)"); \
	  echo "installing requirements.txt into $(VENV) with $$python (some minutes, once)"; \
	  rm -f $(INSTALLED); \
	  "$$python" -m venv --clear $(VENV); \
	  $(BIN)/pip install --quiet -r requirements.txt; \
	  $(BIN)/pip install --quiet --no-deps -e .; \
	  cp requirements.txt $(INSTALLED); \
	}

site: venv ## build the site in both languages into _build/html, executing what changed
	@$(RUN) tools.site

test: venv ## execute what changed, then check the book, its tools and meshscope
	@$(RUN) tools.execute
	@$(RUN) pytest tests

serve: site ## build the site and serve it on http://localhost:8000 (PORT=…)
	@echo "http://localhost:$(PORT)/"
	@$(RUN) http.server --bind 127.0.0.1 --directory _build/html $(PORT)

live: venv ## rebuild and reload pages as files are saved (LANGUAGE=zh_TW for Chinese)
	@$(RUN) tools.live --port $(PORT) --language $(LANGUAGE)

sync: venv ## write notebooks/ and shared cells from book/
	@$(RUN) tools.sync

bench: site ## seconds and memory of each chapter, seconds to build, bytes of pages
	@$(RUN) tools.bench

lint: venv ## ruff, mypy (as on Windows too), codespell, and actionlint and zizmor on workflows
	@$(RUN) ruff check .
	@$(RUN) ruff format --check .
	@$(RUN) mypy
	@$(RUN) mypy --platform win32 --cache-dir .mypy_cache/win32
	@$(BIN)/codespell
	@tools/check_workflows.sh $(VENV)

wheel: venv ## build meshscope twice, compare, check, install it alone and run its examples there
	@$(RUN) tools.wheel

mutants: venv ## apply every planted fault and see that its cell fails
	@$(RUN) tools.mutants

coverage: venv ## check that each row of the coverage table is asserted or argued
	@$(RUN) tools.coverage

offline: venv ## execute every chapter again without network, and compare outputs
	@$(RUN) tools.offline_pass

po: venv ## write the catalogues for translators, locale/*.po, from the English text
	@$(RUN) tools.po

translations: venv ## how much of each page is translated, and what is broken (LIST=yes: every message)
	@$(RUN) tools.translations $(if $(LIST),--list) $(if $(MSGFMT),--msgfmt)

new-language: venv ## begin a translation: CODE=ja NAME=日本語
	@$(RUN) tools.new_language "$(CODE)" "$(NAME)"

colab: venv ## run every notebook, in both languages, as Colab would (IMAGE=… in its own image)
	@$(RUN) tools.colab $(if $(IMAGE),--image $(IMAGE))

matrix: venv ## run every notebook on Python 3.11, 3.12, 3.13, Colab's packages, the newest releases
	@$(RUN) tools.matrix $(if $(ONLY),--only $(ONLY))

linkcheck: venv ## try the links to other sites
	@$(RUN) tools.linkcheck

canary: venv ## build with the newest Sphinx, myst-parser and theme, beside the site
	@$(RUN) tools.canary

upgrade: venv ## take the newest releases, re-execute, and list the outputs that changed
	@tools/upgrade.sh $(VENV)

publish-as: venv ## write another address everywhere: URL=https://me.github.io/book/ REPO=https://github.com/me/book
	@$(RUN) tools.publish_as --site "$(URL)" --repo "$(REPO)"

release-ref: venv ## write another branch or tag everywhere: REF=v1.0
	@$(RUN) tools.publish_as --ref "$(REF)"

clean: ## remove what was built, executions included; the virtual environment stays
	rm -rf _build .pytest_cache .hypothesis .mypy_cache .ruff_cache
