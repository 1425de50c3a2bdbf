# make demo: a fresh clone to generated text.   make test: the default suite.   make help: the rest.
PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
CORE   := pyproject.toml setup.py $(wildcard kernels/csrc/*)
# Most tests keep one core busy or wait for processes. Each worker takes neighbours, which share servers and models.
PYTEST := $(BIN)/pytest -n 2 --dist worksteal

.PHONY: help demo test test-long soak test-numa test-sanitize lint types format clean

help:
	@grep -E '^# [a-z-]+:' $(MAKEFILE_LIST) | sed 's/^# //'

# demo: three ranks continue a prompt with the model shipped in assets/
demo: $(VENV)/.core
	$(BIN)/tilerank generate assets/demo-lm --tp 3 --max-new-tokens 96 --prompt "In the beginning God"

# test: the default suite
test: $(VENV)/.test
	$(PYTEST) -m "not long and not numa"

# test-long: tests that take minutes or gigabytes
test-long: $(VENV)/.test
	$(BIN)/pytest -m long

# soak: half an hour of mixed load on a server, with cancels, kills and bad requests; MINUTES=N for another time
MINUTES ?= 30
soak: $(VENV)/.test
	$(BIN)/python tests/soak.py $(MINUTES)

# test-numa: binding and page placement on six NUMA nodes, in a virtual machine under qemu's software emulation
test-numa: $(VENV)/.test
	TILERANK_REQUIRE_NUMA=1 $(BIN)/pytest -m numa

THREAD_TESTS := tests/test_kernels_pool.py tests/test_kernels_shm.py
# Reads the machine code of the core that users get, which a sanitized one is not.
CODE_TESTS := tests/test_kernels_instructions.py

# test-sanitize: the kernel tests under the sanitizers of addresses, undefined behaviour and threads
# The core is built aside with the first two. Tests of threads and ranks (pool, shm) bring the third, which does not bear
# another beside it.
test-sanitize: $(VENV)/.test
	rm -rf build/sanitized build/temp.* build/lib.*
	TILERANK_SANITIZE=address,undefined $(BIN)/pip install --quiet --disable-pip-version-check --no-deps --target build/sanitized .
	rm -rf build/temp.* build/lib.*
	LD_PRELOAD="$$(g++ -print-file-name=libasan.so) $$(g++ -print-file-name=libubsan.so)" \
	    ASAN_OPTIONS=detect_leaks=0 PYTHONMALLOC=malloc PYTHONPATH=build/sanitized \
	    $(PYTEST) $(filter-out $(THREAD_TESTS) $(CODE_TESTS),$(wildcard tests/test_kernels_*.py))
	$(BIN)/pytest $(THREAD_TESTS)

# lint: ruff and clang-format
lint: $(VENV)/.test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/clang-format --dry-run -Werror kernels/csrc/*.cpp kernels/csrc/*.h

# types: mypy over a directory of links, since type checkers do not follow editable installs
types: $(VENV)/.test
	rm -rf build/types && mkdir -p build/types/tilerank
	for room in kernels parallel loader runtime launch; do ln -s $(CURDIR)/$$room build/types/tilerank/$$room; done
	MYPYPATH=build/types $(BIN)/mypy -p tilerank

# format: rewrite the sources as `make lint` wants them
format: $(VENV)/.test
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	$(BIN)/clang-format -i kernels/csrc/*.cpp kernels/csrc/*.h

# clean: remove what make made
clean:
	rm -rf $(VENV) build *.egg-info kernels/_C*.so

# pip comes last: an environment without it was not made to its end.
$(BIN)/pip:
	@command -v $(PYTHON) >/dev/null || { echo "tilerank: $(PYTHON) not found; Debian: apt-get install python3"; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "tilerank: Python 3.11 or newer needed, found $$($(PYTHON) -V); set PYTHON=python3.11"; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || { echo "tilerank: Python's venv module is missing; Debian: apt-get install python3-venv"; exit 1; }
	@test -f "$$($(PYTHON) -c 'import sysconfig; print(sysconfig.get_path("include"))')/Python.h" || { echo "tilerank: Python.h is missing; Debian: apt-get install python3-dev"; exit 1; }
	@command -v g++ >/dev/null || { echo "tilerank: g++ not found; Debian: apt-get install g++"; exit 1; }
	$(PYTHON) -m venv $(VENV)

$(VENV)/.core: $(BIN)/pip $(CORE)
	$(BIN)/pip install --quiet --disable-pip-version-check -e .
	@touch $@

# By its name, as it is there already: from its folder it would be compiled once more.
$(VENV)/.test: $(VENV)/.core
	$(BIN)/pip install --quiet --disable-pip-version-check "tilerank[test]"
	@touch $@
