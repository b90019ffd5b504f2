# Every target first sets up what it needs: a virtual environment in .venv with the pinned versions of constraints.txt.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder

.PHONY: demo site quick test mutants lint format docs dist bench setup clean

demo: $(STAMP)
	$(BIN)/mtb demo --out runs/demo

# The explorer with the packaged router as a static site that needs no server, in runs/site.
site: $(STAMP)
	$(BIN)/mtb export --format web --out runs/site

# The tests that are not marked `slow`: at most 90 seconds on two cores.
quick: $(STAMP)
	$(PYTEST) -m "not slow" $(ARGS)

test: $(STAMP)
	$(PYTEST) $(ARGS)

# Breaks a copy of the package about 170 times, one edit each, and lists the edits that no quick test notices.
mutants: $(STAMP)
	$(BIN)/python tools/mutants.py $(ARGS)

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

format: $(STAMP)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# The documentation site in site/: a broken link or a page that is not in the navigation stops it.
docs: $(STAMP)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict
	@echo "Documentation: site/index.html. To search in it: $(BIN)/python -m http.server -d site"

# A wheel and a source distribution in dist/.
dist: $(STAMP)
	$(BIN)/python -m hatchling build

bench: $(STAMP)
	$(BIN)/python -m benchmarks

setup: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) .ci/install.py $(VENV)
	touch $(STAMP)

clean:
	rm -rf $(VENV) build dist site .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
