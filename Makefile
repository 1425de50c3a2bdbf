# make demo: a fresh clone to generated text.   make test: the default suite.   make help: the rest.
PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
CORE   := pyproject.toml setup.py $(wildcard tilerank/kernels/csrc/*/*)
NATIVE := $(wildcard tilerank/kernels/csrc/*/* benchmarks/peers/*.cpp)
# Three workers for two cores: a third of the time tests wait. Each takes neighbours, which share servers and models.
PYTEST := $(BIN)/pytest -n 3 --dist worksteal
# The tests start hundreds of processes, which would each compile the same modules.
unexport PYTHONDONTWRITEBYTECODE
# The first make in this clone builds while others wait: what it has built they find up to date.
LOCKED := flock Makefile $(MAKE) --no-print-directory
# If a core does not compile, pip prints what the compiler said, without the commands of all files.
INSTALL := $(BIN)/pip install --quiet --config-settings quiet=true --disable-pip-version-check

.PHONY: help core environment demo demo-chat demo-vision test test-long soak test-numa test-sanitize test-amx lint types site wheel format clean

help:
	@grep -E '^# [a-z-]+:' $(MAKEFILE_LIST) | sed 's/^# //'

core:
	@$(LOCKED) $(VENV)/.core

environment:
	@$(LOCKED) $(VENV)/.test

# demo: build in .venv, then let three ranks continue a prompt with the model in assets/
demo: core
	$(BIN)/tilerank generate assets/demo-lm --tp 3 --max-new-tokens 96 --prompt "In the beginning God"

# demo-vision: the same with a model that sees, and a picture
demo-vision: core
	$(BIN)/tilerank generate assets/demo-vl --tp 3 --image assets/red-triangle.png --prompt "What is in the picture?"

# demo-chat: talk with SmolLM2-135M-Instruct of the Python registry, or with the model in assets/ where there is none
demo-chat: core
	@model=$$($(BIN)/python tests/support/registry_models.py smollm2 build/models) || { \
	    echo "tilerank: assets/demo-lm, which writes Bible verses, talks instead" >&2; model=assets/demo-lm; }; \
	$(BIN)/tilerank chat "$$model" --tp 3 --temperature 0

# test: the default suite
test: environment
	$(PYTEST) -m "not long and not numa"

# test-long: the tests that take minutes or gigabytes
test-long: environment
	$(BIN)/pytest -m long

# soak: half an hour of mixed load on a server, with cancels, kills and bad requests; MINUTES=N for another duration
MINUTES ?= 30
soak: environment
	PYTHONPATH=tests/support $(BIN)/python tests/soak.py $(MINUTES)

# test-numa: binding and page placement on several NUMA nodes and in cpusets, in virtual machines that qemu emulates
test-numa: environment
	TILERANK_REQUIRE_NUMA=1 $(BIN)/pytest -m numa

# Programs of their own with TSan, which cannot be combined with another sanitizer; `make test` runs them.
THREAD_TESTS := tests/kernels/test_threads.py
# Tests of the machine code that users get.
CODE_TESTS := tests/kernels/test_instructions.py
CORE_TESTS := $(filter-out $(THREAD_TESTS) $(CODE_TESTS),$(wildcard tests/kernels/test_*.py tests/kernels/*/test_*.py))
SANITIZERS := address,undefined
CPU := $(shell grep -m 1 ^flags /proc/cpuinfo)
NO_AMX := $(if $(filter amx_tile,$(CPU)),0,1)
# Emulated tiles compile and run for minutes under sanitizers, so that without AMX only NEWEST=amx has them; test-amx has
# them without sanitizers.
NEWEST := $(if $(filter amx_tile,$(CPU)),amx,$(if $(filter avx512_bf16,$(CPU)),avx512_bf16,$(if $(filter avx512_vnni,$(CPU)),avx512,avx2)))

# $(call build,NAME,ENVIRONMENT): installs into build/NAME, away from the core that users get.
define build
flock Makefile sh -ec 'rm -rf build/$(1) build/lib.*; \
    TILERANK_WERROR=1 $(2) $(INSTALL) --no-deps --target build/$(1) .; \
    rm -rf build/lib.*'
endef
# $(call on_build,NAME): the environment in which pytest, its workers and the ranks that tests start import build/NAME.
on_build = PYTHONPATH=$(CURDIR)/build/$(1) PYTEST_ADDOPTS="-o 'pythonpath=$(CURDIR)/build/$(1) . tests/support'"

# test-sanitize: the kernel tests with ASan and UBSan; NEWEST=amx: with emulated tiles where the CPU has no AMX
test-sanitize: environment
	$(call build,sanitized,TILERANK_SANITIZE=$(SANITIZERS) TILERANK_EMULATE_AMX=$(if $(filter amx,$(NEWEST)),$(NO_AMX),0) TILERANK_NEWEST_RUNG=$(NEWEST))
	LD_PRELOAD="$$(g++ -print-file-name=libasan.so) $$(g++ -print-file-name=libubsan.so)" \
	    ASAN_OPTIONS=detect_leaks=0 PYTHONMALLOC=malloc TILERANK_TEST_RUNG=compiled \
	    $(call on_build,sanitized) $(PYTEST) -n 2 $(CORE_TESTS) # they never wait

AMX_TESTS := $(addprefix tests/runtime/,test_conformance.py test_engine.py kv_cache/test_kv_cache.py test_quantized.py)

# test-amx: models on the amx rung of a core that emulates AMX tiles, as test-sanitize has the kernels; needs AVX-512 with bf16, not AMX
test-amx: environment
	$(call build,emulated,TILERANK_EMULATE_AMX=1)
	TILERANK_TEST_RUNG=amx $(call on_build,emulated) $(PYTEST) --dist loadfile $(AMX_TESTS) -k "not test_family or text"

# lint: check the sources with ruff and clang-format
lint: environment
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/clang-format --dry-run -Werror $(NATIVE)

# types: check the types with mypy
types: environment
	$(BIN)/mypy tilerank tests benchmarks

# site: the documentation as web pages, in build/site; every link must lead somewhere
site: environment
	rm -rf build/pages build/site
	mkdir -p build/pages
	cp --recursive --parents *.md LICENSE docs assets/*.png benchmarks/README.md compose.yaml build/pages
	$(BIN)/mkdocs build --strict

# wheel: a wheel in dist/ for other machines, named after the oldest glibc that it needs; PYTHONS="python3.12 python3.13" for those
PYTHONS ?= $(BIN)/python
wheel: environment
	rm -rf dist
	for python in $(PYTHONS); do \
	    $(BIN)/pip --python "$$python" wheel --quiet --disable-pip-version-check --no-deps --wheel-dir dist/built . || exit; \
	done
	PATH="$(abspath $(BIN)):$$PATH" $(BIN)/auditwheel repair --wheel-dir dist dist/built/*.whl

# format: rewrite the sources as `make lint` expects them
format: environment
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	$(BIN)/clang-format -i $(NATIVE)

# clean: remove the environment and everything that was built
clean:
	rm -rf $(VENV) build *.egg-info tilerank/kernels/_C*.so

# pip comes last: without it, an earlier make was interrupted while it made the environment.
$(BIN)/pip:
	@command -v $(PYTHON) >/dev/null || { echo "tilerank: $(PYTHON) not found; Debian: apt-get install python3"; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "tilerank: Python 3.11 or newer needed, found $$($(PYTHON) -V); set PYTHON=python3.11"; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || { echo "tilerank: Python's venv module is missing; Debian: apt-get install python3-venv"; exit 1; }
	@test -f "$$($(PYTHON) -c 'import sysconfig; print(sysconfig.get_path("include"))')/Python.h" || { echo "tilerank: Python.h is missing; Debian: apt-get install python3-dev"; exit 1; }
	@command -v g++ >/dev/null || { echo "tilerank: g++ not found; Debian: apt-get install g++"; exit 1; }
	$(PYTHON) -m venv $(VENV)

$(VENV)/.core: $(BIN)/pip $(CORE)
	$(INSTALL) -e ".[vision]"
	@touch $@

# By its name, because it is installed: from its folder it would be compiled once more.
$(VENV)/.test: $(VENV)/.core
	$(INSTALL) "tilerank[test]"
	@# Away from the rest, see tests/support/reference_media.py; without its requirements, which are installed already.
	$(INSTALL) --no-deps --upgrade --target $(VENV)/torchvision torchvision==0.28.0
	@touch $@
