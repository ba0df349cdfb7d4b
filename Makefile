# The V4.1 book. `make` alone lists what there is. Every target does its own set-up, and can be stopped and repeated.
#
#   PYTHON=python3.12       the Python that .venv is made from      PROFILE=ci|full|gpu   how large the chapters run
#   TORCH_INDEX=<address>   the package index torch is taken from   UPGRADE=1             `make lock`: newest versions

PROFILE ?= ci
export PYTHON TORCH_INDEX DISK_CHECK
# Nothing is fetched when chapters or tests run; libraries that could ask a hub are told not to.
export HF_HUB_OFFLINE = 1
# mlx compiles kernels with a C++ compiler where it may; the bare machine has none.
export MLX_DISABLE_COMPILE = 1

V := .venv/bin/python
BOOTSTRAP = python=$$(sh tools/find_python.sh) && "$$python" tools/bootstrap.py
SOURCES := v41lib tests tools book

.DEFAULT_GOAL := help
.PHONY: help setup setup-tests book test check unit parity notebooks accept bench train lock clean

help: ## this list
	@echo "The V4.1 book"
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/  make \1\t\2/p' $(MAKEFILE_LIST) | expand -t 20
	@sed -n 's/^#   /  /p' $(MAKEFILE_LIST)

setup: ## .venv with the locked packages and v41lib, for the book
	@$(BOOTSTRAP)

setup-tests:
	@$(BOOTSTRAP) --tests

book: setup ## run the chapters and build book/_build/html; PROFILE=ci, full or gpu
	@$(V) tools/build_book.py --profile $(PROFILE)

test: setup-tests check ## everything that must pass: ruff, mypy, unit, parity and notebook tests
	@$(V) -m pytest

check: setup-tests ## only the static part of `make test`: ruff and mypy
	@echo "ruff check" && $(V) -m ruff check $(SOURCES)
	@echo "ruff format --check" && $(V) -m ruff format --check $(SOURCES)
	@echo "mypy" && $(V) -m mypy

unit parity notebooks: setup-tests
	@$(V) -m pytest tests/$@
unit: ## only the unit tests
parity: ## only the comparison with mlx-lm
notebooks: ## only the notebook guard and the comparison of outputs

accept: setup ## run the chapters and take their ci outputs into book/, on purpose
	@$(V) tools/accept.py

bench: setup-tests ## measure this machine, ten minutes: data/results/bench.json and the README's table
	@.venv/bin/v41 bench --accept

train: setup ## train the seven models of the book, hours; it can be stopped and repeated; ACCEPT=1 takes them into data/
	@$(V) tools/train.py $(if $(ACCEPT),--accept)

lock: setup-tests ## lock requirements*.in again, keeping the pins; UPGRADE=1 takes the newest
	@$(V) tools/lock.py $(if $(UPGRADE),--upgrade)

clean: ## remove what was built and run; .venv stays
	rm -rf build book/_build .mypy_cache .pytest_cache .ruff_cache .hypothesis
