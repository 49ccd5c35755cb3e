# Four commands: `make demo`, `make test`, `make docs`, `make dist`. They make .venv once and reuse it, offline, until what it
# is made from changes; the packages that build docs and releases are added to it by the first `make docs` and `make dist`.
PYTHON ?= python3
VENV := .venv
STAMP := $(VENV)/.installed
BIN := $(VENV)/bin

export ONEDNN_MAX_CPU_ISA ?= AVX512_CORE_FP16
# threads that wait give their core away: with spinning ones, a second busy process made training ten times slower
export OMP_WAIT_POLICY ?= PASSIVE

.PHONY: demo test test-fast test-versions lint docs dist gpu-test clean

demo: $(STAMP)
	$(BIN)/octavo doctor
	mkdir -p build
	$(BIN)/octavo train --html build/demo.html

# a process a core, whole files to each; one thread apiece, or they would wait for each other
WORKERS ?= 2
test: export OMP_NUM_THREADS ?= 1
test: lint
	$(BIN)/python -m pytest -q -n $(WORKERS) --dist loadfile --no-loadscope-reorder

# for the loop while working: one case of each test function that takes little time
test-fast: export OMP_NUM_THREADS ?= 1
test-fast: $(STAMP)
	$(BIN)/python -m pytest -q -n $(WORKERS) --dist loadfile --fast

# with every torch, one after another: gigabytes and hours, and it goes on where it was interrupted
test-versions:
	$(PYTHON) -m tests.versions --workers $(WORKERS)

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# into site/; a broken link, anchor or docstring is an error (never --quiet: --strict would then count no warnings)
docs: export NO_MKDOCS_2_WARNING = 1
docs: $(VENV)/.docs
	$(BIN)/python -m mkdocs build --strict
	@echo "Built site/. Look at it: $(BIN)/python -m http.server -d site"

# into dist/, from the last commit: a wheel and an sdist whose bytes the commit decides. `make dist REPOSITORY=https://...`
# has the links of the README lead there; without it the README that an index shows has none
dist: $(VENV)/.release
	$(BIN)/python -m tests.release $(if $(REPOSITORY),--repository $(REPOSITORY))

gpu-test:
	$(PYTHON) -m tests.gpu

$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(0 if sys.version_info >= (3, 11) else f"Octavo needs Python 3.11 or newer, this is {sys.version.split()[0]}. Run make PYTHON=python3.11 ...")'
	$(PYTHON) -m venv --clear $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[test]'
	# a CUDA build of torch brings its own triton; a CPU build brings none, and the kernels are still compiled and read
	$(BIN)/python -c 'import triton' 2>/dev/null \
		|| $(BIN)/python -m pip install --quiet --disable-pip-version-check triton==3.6.0 \
		|| echo "No triton for this platform: the tests that compile kernels will be skipped."
	touch $(STAMP)

$(VENV)/.docs: $(STAMP)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[docs]'
	touch $@

$(VENV)/.release: $(STAMP)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[release]'
	touch $@

clean:
	rm -rf $(VENV) .versions site dist
