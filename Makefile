# Everything runs from a fresh clone: make and python3 >= 3.11 with venv are enough. Works with GNU make 3.81 (macOS).

PYTHON ?= python3
# Other builds of PyTorch: make test TORCH='torch==2.13.0+cpu', or TORCH= where it cannot be had (its tests are skipped then)
TORCH ?= torch==2.13.0

VENV := .venv
OLD := .venv-litdata
NODE := .node
BENCH := .venv-bench
PY := $(VENV)/bin/python
PIP_INSTALL := -m pip install --quiet --disable-pip-version-check --no-input
COMMA := ,
# What the environments are made from; they are brought up to date when one of these is newer
BUILD := pyproject.toml Makefile

export LIVESET_LITDATA_PYTHON ?= $(CURDIR)/$(OLD)/bin/python
export PYTHONDONTWRITEBYTECODE :=
PYTEST := $(PY) -m pytest

.PHONY: demo test test-fast test-nightly test-pythons lint format bench bench-env env env-litdata env-servers clean

demo: $(VENV)/.stamp-demo
	$(VENV)/bin/liveset demo

test: lint env-litdata env-servers
	$(PYTEST)

test-fast: env
	$(PYTEST) -m "not nightly and not interop and not slow and not servers"

test-nightly: lint env-litdata env-servers
	HYPOTHESIS_PROFILE=nightly $(PYTEST) -m "" --timeout=7200

# Each Python gets its own small environment without PyTorch and without the old tool
test-pythons:
	@PYTHON="$(PYTHON)" bash scripts/test_pythons.sh

lint: env
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy

format: env
	$(VENV)/bin/ruff check --fix-only .
	$(VENV)/bin/ruff format .

bench: env env-litdata
	$(PY) -m benchmarks.run $(BENCH_ARGS)

# Adds Lance and LMDB to the benchmarks
bench-env: $(BENCH)/.stamp

env: $(VENV)/.stamp-dev

env-litdata: $(OLD)/.stamp

# Object stores for the tests. One that cannot be had is left out, and its tests are skipped
env-servers: $(VENV)/.stamp-servers

# The demo needs no PyTorch, so its environment is ready within seconds; the one of the tests is built on top of it
$(VENV)/.stamp-demo: $(BUILD)
	@PYTHON="$(PYTHON)" bash scripts/make_venv.sh $(VENV)
	$(PY) $(PIP_INSTALL) --editable '.[demo,image]'
	@touch $@

$(VENV)/.stamp-dev: $(VENV)/.stamp-demo
	$(PY) $(PIP_INSTALL) --editable '.[dev$(if $(TORCH),$(COMMA)frameworks)]' $(TORCH)
	@touch $@

# The script makes the stamp, and only once nothing is missing: so what is missing is tried again
$(VENV)/.stamp-servers: $(VENV)/.stamp-dev scripts/make_servers.sh
	@bash scripts/make_servers.sh $(VENV) $(NODE) $@

# litData asks for torchvision, whose builds do not fit every build of PyTorch and which nothing here needs: so without its dependencies
$(OLD)/.stamp: tests/interop/requirements.txt Makefile
	@PYTHON="$(PYTHON)" bash scripts/make_venv.sh $(OLD)
	$(OLD)/bin/python $(PIP_INSTALL) $(or $(TORCH),torch==2.13.0) --requirement tests/interop/requirements.txt
	$(OLD)/bin/python $(PIP_INSTALL) --no-deps litdata==0.2.76
	$(OLD)/bin/python -c 'import litdata; assert litdata.__version__ == "0.2.76"'
	@touch $@

$(BENCH)/.stamp: benchmarks/requirements.txt Makefile
	@PYTHON="$(PYTHON)" bash scripts/make_venv.sh $(BENCH)
	$(BENCH)/bin/python $(PIP_INSTALL) --requirement benchmarks/requirements.txt
	@touch $@

clean:
	rm -rf .venv $(OLD) $(NODE) $(BENCH) .venv-py3.* build dist .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find src tests benchmarks examples -name __pycache__ -type d -prune -exec rm -rf {} +
