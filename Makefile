# make demo: set up, train a small model with 4 local ranks, prove its layout. make test: set up, run all tests.
PYTHON ?= python3
VENV := .venv
RUN := $(VENV)/bin/python
STAMP := $(VENV)/installed

.PHONY: demo test lint format bench clean
.DEFAULT_GOAL := demo

$(STAMP): pyproject.toml constraints.txt
	test -d $(VENV) || $(PYTHON) -m venv $(VENV)
	$(RUN) -m pip install --quiet --disable-pip-version-check torch==$$(sed -n 's/^torch==//p' constraints.txt)
	$(RUN) -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[hf,plot,dev]'
	touch $(STAMP)

demo: $(STAMP)
	$(RUN) examples/quickstart.py

test: $(STAMP)
	$(RUN) -m pytest

lint: $(STAMP)
	$(VENV)/bin/ruff check src tests examples benchmarks
	$(VENV)/bin/mypy

format: $(STAMP)
	$(VENV)/bin/ruff format src tests examples benchmarks

bench: $(STAMP)
	$(RUN) -m benchmarks.data_parallel
	$(RUN) -m benchmarks.tensor_parallel

clean:
	rm -rf $(VENV) benchmarks/out
