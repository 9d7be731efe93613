# make run   install into .venv, start the mesh on the tiny model, stream an answer, keep serving
# make test  install, run every test that belongs to the daily suite
# make test-clients   clients of other people, installed from PyPI and npm, against a mesh on the tiny model
# make test-compose   the compose files in a Docker engine, which is started from Debian's packages where none runs
# make test-cpu-paths the tests of numerics under other code paths of this CPU's libraries
# make images         the images of the daemons, from wheels that are downloaded first
# make check format, lint, types, protos, stubs
# make node  the Node client's packages, for its tests

SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help

VENV := .venv
TOOLS := .tools
PYTHON ?= $(shell command -v python3.13 python3.12 python3.11 python3 2>/dev/null | while read -r p; do \
	"$$p" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && { echo "$$p"; break; }; done)
PY := $(VENV)/bin/python
# Where torch comes from on a machine without a GPU, e.g. TORCH_INDEX=https://download.pytorch.org/whl/cpu:
# PyPI's own Linux wheel runs on a CPU too but brings some GB of CUDA libraries.
TORCH_INDEX ?=
TORCH_CPU ?= torch==2.13.0
# Runs the kernels' tests without a GPU. torch for CUDA brings the version it needs.
TRITON_CPU ?= $(if $(filter x86_64,$(shell uname -m)),$(if $(filter Linux,$(shell uname -s)),triton==3.6.0))
# Where generated stubs are written; the test that compares them writes elsewhere.
STUBS_OUT ?= src
# Image of the contracts as they were last agreed on: what protos must stay compatible with. `make baseline` renews it.
BUF_AGAINST ?= protos/baseline.binpb
PYTEST_ARGS ?=

PROTOS = $(shell find protos -name '*.proto' | sort)
SOURCES = $(wildcard daemons kernels clients tests bench)
MYPY_PACKAGES = $(foreach p,$(patsubst src/radixmesh/%,%,$(wildcard src/radixmesh/daemons src/radixmesh/kernels src/radixmesh/client src/radixmesh/cli)),$(if $(shell find -L src/radixmesh/$(p) -name '*.py' -print -quit),-p radixmesh.$(p)))

.PHONY: help install tools buf node stubs run images test test-full test-cpu-paths test-clients test-compose check check-format check-lint check-types check-protos check-stubs baseline clean

help:
	@sed -n 's/^# \(make .*\)/\1/p' Makefile

install: $(VENV)/.installed

# Tests at least that interpreter and metadata are current; pip itself is only asked when they are not.
$(VENV)/.installed: pyproject.toml
	@test -n "$(PYTHON)" || { echo "radixmesh needs Python >= 3.11: install it, or name it with PYTHON=..."; exit 1; }
	test -x $(PY) || $(PYTHON) -m venv $(VENV)
	if ! nvidia-smi -L >/dev/null 2>&1 && ! $(PY) -c 'import importlib.metadata as m; m.version("torch")' 2>/dev/null; then \
		$(PY) -m pip install -q $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX)) $(TORCH_CPU) && \
		$(if $(TRITON_CPU),$(PY) -m pip install -q $(TRITON_CPU),true); fi
	$(PY) -m pip install -q -e '.[test,dev]'
	touch $@

# grpcio-tools pins an old protobuf: it lives in an environment of its own. Stubs run on any newer runtime.
tools: $(TOOLS)/.installed

$(TOOLS)/.installed:
	@test -n "$(PYTHON)" || { echo "radixmesh needs Python >= 3.11: install it, or name it with PYTHON=..."; exit 1; }
	test -x $(TOOLS)/bin/python || $(PYTHON) -m venv $(TOOLS)
	$(TOOLS)/bin/python -m pip install -q 'grpcio-tools==1.80.*' 'mypy-protobuf==5.*'
	touch $@

buf: $(TOOLS)/node_modules/.bin/buf

$(TOOLS)/node_modules/.bin/buf:
	@command -v npm >/dev/null || { echo "protos are linted by @bufbuild/buf: install npm first"; exit 1; }
	mkdir -p $(TOOLS)
	npm install --silent --no-audit --no-fund --prefix $(TOOLS) '@bufbuild/buf@^1.50'

# The tests of the Node client say that they are skipped where there is no npm.
node:
	@if command -v npm >/dev/null; then $(MAKE) --no-print-directory clients/node/node_modules/.package-lock.json; \
		else echo "no npm here: the tests of the Node client will be skipped"; fi

clients/node/node_modules/.package-lock.json: clients/node/package-lock.json
	npm ci --prefix clients/node --silent --no-audit --no-fund
	touch $@

stubs: tools
	@test -n "$(PROTOS)" || { echo "no .proto file under protos/"; exit 1; }
	mkdir -p $(STUBS_OUT)
	PATH="$(CURDIR)/$(TOOLS)/bin:$$PATH" $(TOOLS)/bin/python -m grpc_tools.protoc -I protos \
		--python_out=$(STUBS_OUT) --pyi_out=$(STUBS_OUT) --grpc_python_out=$(STUBS_OUT) --mypy_grpc_out=quiet:$(STUBS_OUT) $(PROTOS)

run: install
	$(VENV)/bin/radixmesh up -f compose/local.yml --demo

test: install tools node
	OMP_NUM_THREADS=1 $(PY) tests/run_tests.py daily $(PYTEST_ARGS)

test-full: install tools node
	OMP_NUM_THREADS=1 $(PY) -m pytest $(PYTEST_ARGS)

test-cpu-paths: install
	tests/cpu_paths.sh $(PY) $(PYTEST_ARGS)

test-clients: install
	OMP_NUM_THREADS=1 $(PY) -m pytest tests/clients $(PYTEST_ARGS)

test-compose: install
	OMP_NUM_THREADS=1 $(PY) tests/run_tests.py compose $(PYTEST_ARGS)

images: install
	compose/fetch_wheels.sh
	docker compose -f compose/local.yml build

# Types take one core for a minute; what the others need is fetched meanwhile.
check: install
	$(MAKE) --no-print-directory -j2 check-types check-format check-lint check-protos check-stubs

check-format: install
	$(VENV)/bin/ruff format --check $(SOURCES)

check-lint: install
	$(VENV)/bin/ruff check $(SOURCES)

check-types: install
	$(VENV)/bin/mypy $(MYPY_PACKAGES)

check-protos: buf
	$(TOOLS)/node_modules/.bin/buf lint
	$(TOOLS)/node_modules/.bin/buf breaking --against '$(BUF_AGAINST)'

# Fields that were added are compared from then on. Renewing it over an incompatible change is a decision: see docs/contracts.md.
baseline: buf
	$(TOOLS)/node_modules/.bin/buf build -o protos/baseline.binpb

check-stubs: install tools
	$(PY) -m pytest -q tests/contract/test_stubs_current.py

clean:
	rm -rf build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -not -path './$(VENV)/*' -not -path './$(TOOLS)/*' -prune -exec rm -rf {} +
	find src -maxdepth 1 -name '*.egg-info' -exec rm -rf {} +
