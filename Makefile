# make demo    the demo, from nothing
# make test    linters, type checkers, tests, from nothing
# make soak    the long proofs, on new random input each time; SOAK=file for one of them
# make bench MODEL=...   how fast a cancel is
#
# PYTHON=python3.13 picks the interpreter, VENV=folder the virtual environment.

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help

PYTHON ?=
VENV ?= .venv
BIN := $(VENV)/bin
RUN := $(BIN)/python

PACKAGES := trionnx trionnx/gpu trionnx/actors trionnx/scheduler tests examples benchmarks

MODEL ?= ppocrv4_rec
BENCH ?=
SOAK ?=

.PHONY: help setup setup-dev vulkan compiler demo test lint pytest soak bench clean

help:
	@sed -n '1,6{s/^# \{0,1\}//;p}' Makefile

vulkan:
	@.ci/vulkan

compiler:
	@.ci/compiler

setup: vulkan $(VENV)/.stamp-run

setup-dev: vulkan compiler $(VENV)/.stamp-dev

$(VENV)/.stamp-run: pyproject.toml .ci/venv
	@PYTHON="$(PYTHON)" .ci/venv "$(VENV)" "cpu,examples"
	@touch $@

$(VENV)/.stamp-dev: pyproject.toml .ci/venv
	@PYTHON="$(PYTHON)" .ci/venv "$(VENV)" "dev"
	@touch $@ $(VENV)/.stamp-run

demo: setup
	@$(RUN) examples/demo.py

lint: setup-dev
	$(BIN)/ruff check $(PACKAGES)
	$(BIN)/mypy
	$(BIN)/pyright --pythonpath $(RUN)
	$(BIN)/lint-imports
	$(BIN)/vulture

pytest: setup-dev
	$(RUN) -m pytest

test: lint pytest

soak: setup-dev
	TRIONNX_SOAK=1 $(RUN) -m pytest $(SOAK)

bench: setup
	$(RUN) benchmarks/cancel.py --models $(MODEL) $(BENCH)

clean:
	rm -rf $(VENV) build dist *.egg-info .mypy_cache .pytest_cache .ruff_cache .import_linter_cache .hypothesis
