# make demo    watch the batch answer questions        make check   lint and types
# make test    the tests                               make slow    the long tests
# make bench   static against continuous batching  make kernels the CUDA kernels, all of them, without a card
#
# Without make, `make -n test` prints the plain commands.

PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin

.PHONY: demo test check slow bench kernels

demo: $(VENV)/.stamp-demo
	$(BIN)/pagedcore demo $(DEMO_ARGS)

test: $(VENV)/.stamp-test
	$(BIN)/python -m pytest $(PYTEST_ARGS)

slow: $(VENV)/.stamp-test
	$(BIN)/python -m pytest -m slow $(PYTEST_ARGS)

kernels: $(VENV)/.stamp-test
	$(BIN)/python -m pytest -m kernels tests/kernels $(PYTEST_ARGS)

check: $(VENV)/.stamp-test
	$(BIN)/ruff check --no-cache .
	$(BIN)/mypy

bench: $(VENV)/.stamp-plot
	mkdir -p build
	$(BIN)/pagedcore bench throughput --plot build/throughput.png $(BENCH_ARGS)

# The stamp's name is the extra's name.
$(VENV)/.stamp-%: pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -q -c constraints.txt -e '.[$*]'
	touch $@
