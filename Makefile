# Each target works alone on a fresh machine; what is already there is used again.
#   make quickstart   install, then compare two models, from scratch and self-pretrained, on the embedded digits
#   make test         install with the test extra, then the test suite
#   make slow         the tests that take minutes, or build and install the project
#   make gpu          what a GPU is asked that has not run this code before, in gpu/ (25 minutes)
#   make lint types   ruff; mypy on the wheel
#   make docs         the pages of docs/ that are made from the code
#   make site         docs/ as a site that works offline, in build/site/
#   make lock         requirements.lock and requirements-cuda.lock, from constraints.txt; needs uv
#   make wheel        wheel and source archive, in dist/
#   make release      the same, checked by twine; needs uv
#   make clean        remove everything made here but runs/

PYTHON ?= python3
JOBS ?= 2
ARGS ?=

VENV := .venv
BIN := $(VENV)/bin
PIP_INSTALL := $(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt
PYTEST := $(BIN)/python -u -m pytest --numprocesses $(JOBS) --dist worksteal

.PHONY: quickstart test slow gpu lint types docs site lock wheel release clean
.DELETE_ON_ERROR:

quickstart: $(VENV)/.installed
	$(BIN)/spt compare quickstart quickstart-dlr $(ARGS)

test: $(VENV)/.installed-test
	$(PYTEST) $(ARGS)

slow: $(VENV)/.installed-test
	$(PYTEST) -m "slow and not (gpu or flash or browser or slurm or chaos)" $(ARGS)

gpu: $(VENV)/.installed-test
	$(BIN)/spt bench gpu $(ARGS)

lint: $(VENV)/.installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/python -m compileall -q spt models tasks recipes tests spt_cli.py

# In a checkout mypy looks for models in spt/models and does not find it. So: the wheel unpacked, seen from elsewhere.
types: wheel
	rm -rf build/types && mkdir -p build/types
	$(BIN)/python -m pip install --quiet --no-deps --target build/types dist/*.whl
	cd build/types && MYPYPATH=. ../../$(BIN)/mypy --config-file ../../pyproject.toml \
	  --cache-dir ../../.mypy_cache -p spt -m spt_cli

docs: $(VENV)/.installed
	$(BIN)/python docs/build.py

site: $(VENV)/.installed-docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet

lock:
	$(PYTHON) .ci/lock.py $(ARGS)

wheel: $(VENV)/.installed-dev
	rm -rf build dist
	$(BIN)/python -m build --quiet --outdir dist .

release: wheel
	uv tool run twine check --strict dist/*

clean:
	rm -rf $(VENV) build dist __pycache__ *.egg-info .pytest_cache .hypothesis .mypy_cache .ruff_cache
	find spt models tasks recipes tests -name __pycache__ -prune -exec rm -rf {} +

# The environment, and what was installed into it when; an extra includes the plain installation.
$(BIN)/pip:
	@$(PYTHON) -c "import sys; sys.exit(sys.version_info < (3, 11) and 'the pinned set needs Python 3.11 or newer')"
	$(PYTHON) -m venv --clear $(VENV)

$(VENV)/.installed: pyproject.toml constraints.txt | $(BIN)/pip
	@echo "Installing into $(VENV): a few minutes the first time."
	$(PIP_INSTALL) --editable .
	@touch $@

$(VENV)/.installed-test: pyproject.toml constraints.txt | $(BIN)/pip
	@echo "Installing into $(VENV), with what the tests need: a few minutes the first time."
	$(PIP_INSTALL) --editable ".[test]"
	@touch $@ $(VENV)/.installed

$(VENV)/.installed-dev: pyproject.toml constraints.txt | $(BIN)/pip
	@echo "Installing into $(VENV), with what development needs: a few minutes the first time."
	$(PIP_INSTALL) --editable ".[dev]"
	@touch $@ $(VENV)/.installed $(VENV)/.installed-test

$(VENV)/.installed-docs: pyproject.toml constraints.txt | $(BIN)/pip
	$(PIP_INSTALL) --editable ".[docs]"
	@touch $@ $(VENV)/.installed
