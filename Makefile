# The project's commands. Each makes .venv first where that is not done; none needs root.
VENV ?= .venv
# Processes that run the tests. Each is a whole JAX with 8 CPU devices, so two fill two cores.
WORKERS ?= 2
# More arguments for pytest: make test ARGS='-k lora -x'.
ARGS ?=

PY := $(VENV)/bin/python
test test-plan bench bazel bench-sweep bench-serve bench-trainers sweep-demo: export JAX_PLATFORMS ?= cpu

.PHONY: help
help: ## List the commands.
	@grep -E '^[a-z-]+:.*## ' Makefile | sed 's/:[^#]*## /\t/' | sort | while IFS="$$(printf '\t')" read -r name text; do printf '  make %-12s %s\n' "$$name" "$$text"; done

.PHONY: venv
venv: ## Find a Python 3.12 or newer, make .venv, install the pinned packages.
	@sh tools/venv.sh $(VENV)

.PHONY: demo
demo: venv ## Train two adapters on one SmolLM2; writes runs/demo/.
	$(PY) -m peftlab demo --workdir=runs/demo $(ARGS)

.PHONY: test
test: venv ## Run the tests.
	$(PY) -m pytest -n $(WORKERS) --dist worksteal $(ARGS)

.PHONY: test-plan
test-plan: venv ## Run the tests of plans with the TPU compiler; fetches it (214 MB) into .tpu/.
	@sh tools/libtpu.sh $(VENV) .tpu || { status=$$?; [ $$status -eq 3 ] && exit 0; exit $$status; }; \
	PYTHONPATH=$(CURDIR)/.tpu $(PY) -m pytest tests/plan $(ARGS)

.PHONY: bench
bench: venv ## Measure the LoRA step against plain JAX, compile time, memory.
	$(PY) benchmarks/bench.py

.PHONY: bench-sweep
bench-sweep: venv ## Measure packed trials against a process for each.
	$(PY) benchmarks/bench_sweep.py

.PHONY: sweep-demo
sweep-demo: venv ## Compare adapter types on a small base; writes runs/sweep-demo/report/.
	$(PY) -m peftlab sweep --config=experiments/ablation.py --sweep=methods,rank --second=gsm8k --root=runs/sweep-demo $(ARGS)
	$(PY) -m peftlab sweep --root=runs/sweep-demo --report

.PHONY: bench-quant
bench-quant: venv ## Measure quantizers: bits, error, loss, CPU steps; TPU figures where libtpu is.
	PYTHONPATH=$(CURDIR)/.tpu $(PY) benchmarks/bench_quant.py

.PHONY: bench-serve
bench-serve: venv ## Measure a batch of many adapters, by how many wait.
	$(PY) benchmarks/bench_serve.py

.PHONY: bench-trainers
bench-trainers: venv ## Measure the trainer: objective, layers, experts, quantized bases.
	$(PY) benchmarks/trainers.py

.PHONY: lint
lint: venv ## Check format, lint, types, import order and BUILD files.
	$(PY) -m ruff format --check --quiet . || { echo 'Some files are not formatted; run: make format' >&2; exit 1; }
	$(PY) -m ruff check --quiet .
	$(VENV)/bin/pyrefly check --python-interpreter-path $(PY) --summary=none --min-severity=error
	$(PY) tools/build_files.py --check
	$(PY) -m pytest -q -p no:cacheprovider tests/project/import_order_test.py

.PHONY: format
format: venv ## Format the code and mend what the linter can.
	$(PY) -m ruff check --quiet --fix-only .
	$(PY) -m ruff format --quiet .

.PHONY: build-files
build-files: venv ## Write the BUILD files anew from the imports.
	$(PY) tools/build_files.py

.PHONY: bazel
bazel: venv ## Check the BUILD files with buildifier and bazel (takes both from npm).
	sh tools/bazel.sh $(VENV)

.PHONY: lock
lock: venv ## Resolve the newest allowed versions into requirements/lock.txt.
	$(PY) tools/lock.py
