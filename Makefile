# Each target sets up what it needs: it finds Python >= 3.12 (PYTHON=... names one) and installs pinned versions.
SHELL := bash
ifdef PYTHON
export PYTHON
endif
VENV := .venv
BIN := $(VENV)/bin
PYTEST := -m pytest --quiet --numprocesses 2 --dist worksteal

.PHONY: demo test test-deep test-latest test-aot lint fuzz accuracy bench-cpu bench-programs docs venv venv-latest venv-aot \
  venv-programs venv-docs clean

demo: venv
	$(BIN)/python examples/quickstart.py
	$(BIN)/python examples/decoder.py

test: lint
	$(BIN)/python $(PYTEST) --quick -m "not deep and not aot"

lint: venv
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

# Both ends of the supported range of JAX run the same tier, but for what does not depend on the version; here XLA compiles as it does
# for users. SHARE=2/3 runs the second of three shares of it.
test-latest: venv-latest
	.venv-latest/bin/python $(PYTEST) -m "not deep and not any_jax and not aot" $(if $(SHARE),--share $(SHARE))

# Everything that is left out of `make test`; SHARE=2/20 runs the second of twenty shares of it.
test-deep: venv
	$(BIN)/python $(PYTEST) -m "deep and not aot" $(if $(SHARE),--share $(SHARE))

# Compiles every emitted kernel for an H100 on a machine without a GPU; downloads about 0.7 GB once.
test-aot: venv-aot
	JAX_PLATFORMS=cpu JAX_SKIP_CUDA_CONSTRAINTS_CHECK=1 .venv-aot/bin/python $(PYTEST) -m aot

# Random programs on every emitter that runs on a CPU, against their float64 evaluation: make fuzz N=10000 JOBS=16.
# SECONDS=3600 ends it early, OUT=fuzz.json writes a summary; failures are shrunk into fuzz_failures/.
N ?= 1000
SEED ?= 0
JOBS ?= 2
fuzz: venv
	$(BIN)/python scripts/fuzz.py --n $(N) --seed $(SEED) --jobs $(JOBS) $(if $(SECONDS),--seconds $(SECONDS)) \
	  $(if $(OUT),--out $(OUT))

# The error of every example against float64, fused and plain: docs/accuracy.md.
accuracy: venv
	$(BIN)/python scripts/accuracy.py --write

bench-cpu: venv
	$(BIN)/python benchmarks/planning.py
	$(BIN)/python benchmarks/cpu.py compare

# Whole programs that users run: make bench-programs NAMES="flax decoder" OUT=rows.json.
bench-programs: venv-programs
	.venv-programs/bin/python benchmarks/programs.py $(NAMES) $(FLAGS) $(if $(OUT),--out $(OUT))

# The site, in build/site: open build/site/index.html. No network is needed to read it.
docs: venv-docs
	.venv-docs/bin/python -m mkdocs build --strict --quiet
	@echo "build/site/index.html"

venv:
	@scripts/setup_venv.sh .venv requirements/test-0.11.txt

venv-latest:
	@scripts/setup_venv.sh .venv-latest requirements/test-latest.txt

venv-aot:
	@scripts/setup_venv.sh .venv-aot requirements/test-0.11.txt requirements/aot-0.11.txt

venv-programs:
	@scripts/setup_venv.sh .venv-programs requirements/test-0.11.txt requirements/programs.txt

venv-docs:
	@scripts/setup_venv.sh .venv-docs requirements/docs.txt

clean:
	rm -rf .venv .venv-latest .venv-aot .venv-programs .venv-docs build dist *.egg-info .pytest_cache .ruff_cache .mypy_cache .hypothesis \
	  .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
