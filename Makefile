# Two commands: `make demo` and `make test`. Both make .venv once and reuse it, offline, until what it is made from changes.
PYTHON ?= python3
VENV := .venv
STAMP := $(VENV)/.installed
BIN := $(VENV)/bin

export ONEDNN_MAX_CPU_ISA ?= AVX512_CORE_FP16

.PHONY: demo test lint gpu-test clean

demo: $(STAMP)
	$(BIN)/octavo doctor

test: lint
	$(BIN)/python -m pytest -q

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

gpu-test:
	$(PYTHON) -m pytest -m gpu

$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(0 if sys.version_info >= (3, 11) else f"Octavo needs Python 3.11 or newer, this is {sys.version.split()[0]}. Run make PYTHON=python3.11 ...")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[test]'
	touch $(STAMP)

clean:
	rm -rf $(VENV)
