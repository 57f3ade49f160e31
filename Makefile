# make demo   set up and generate with the shipped model
# make test   set up and pass the tests
PYTHON ?= python3
PY := .venv/bin/python

.PHONY: demo test test-all test-real lint clean

# A stamp for each set of requirements: an interrupted install leaves none, and is done again.
.venv/runtime: requirements.txt
	$(PYTHON) -m venv .venv
	$(PY) -m pip install --quiet --disable-pip-version-check -r requirements.txt
	touch $@

.venv/dev: requirements-dev.txt .venv/runtime
	$(PY) -m pip install --quiet --disable-pip-version-check -r requirements-dev.txt
	touch $@

demo: .venv/runtime
	$(PY) examples/compare.py

# A process a core, and one thread in each: the tests are many and small. A file stays in one process: what its tests
# share is made once.
test: .venv/dev
	OMP_NUM_THREADS=1 $(PY) -m pytest -n auto --dist loadfile -m "not slow"

test-all: .venv/dev
	HYPOTHESIS_PROFILE=default OMP_NUM_THREADS=1 $(PY) -m pytest -n auto

# Published files that other packages ship: tests/test_real_files.py says how to get them.
test-real: .venv/dev
	OMP_NUM_THREADS=1 $(PY) -m pytest -n auto -m real

lint: .venv/dev
	.venv/bin/ruff check .
	.venv/bin/ruff format --check .
	.venv/bin/mypy *.py cache formats kernels kv_methods tokenizer
	.venv/bin/lint-imports

clean:
	rm -rf .venv .pytest_cache .hypothesis .ruff_cache .mypy_cache
