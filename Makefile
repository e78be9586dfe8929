PY := .venv/bin/python
# The CPU build where there is no GPU; where pip finds none (PyPI has none), the plain one.
TORCH ?= $(if $(shell command -v nvidia-smi),torch==2.13.0,torch==2.13.0+cpu)
CPU_INDEX := https://download.pytorch.org/whl/cpu

# An environment in folder $(1) with torch, and $(1)/constraints.txt: ours, but for the Triton that a
# plain build of torch brings and asks for. Not compiled: most modules are never imported.
define torch_in
	python3 -m venv $(1)
	@$(1)/bin/python -m pip install --no-compile -q $(TORCH) || { \
		test $(TORCH) != $(TORCH:+cpu=) && \
		echo "pip finds no $(TORCH): installing $(TORCH:+cpu=), which comes with CUDA's libraries" \
			"(2.6 GiB to download). PIP_EXTRA_INDEX_URL=$(CPU_INDEX) avoids that." && \
		$(1)/bin/python -m pip install -q $(TORCH:+cpu=); }
	@if $(1)/bin/python -m pip show -q triton; then sed '/^triton==/d' constraints.txt; \
		else cat constraints.txt; fi > $(1)/constraints.txt
endef

.PHONY: demo quick test ci deep tests tests-ci tests-unlike promises test-oldest test-cuda check fmt test-gpu gpu results readme-tables \
	readme-picture peers docs

.venv/demo: pyproject.toml constraints.txt
	$(call torch_in,.venv)
	$(PY) -m pip install --no-compile -q -c .venv/constraints.txt -e .[example]
	touch .venv/demo

.venv/ok: .venv/demo
	$(PY) -m pip install --no-compile -q -c .venv/constraints.txt -e .[example,test,docs]
	touch .venv/ok

demo: .venv/demo
	$(PY) -m bench.demo

check: .venv/ok
	.venv/bin/ruff check .
	.venv/bin/ruff format --check .
	.venv/bin/mypy

fmt: .venv/ok
	.venv/bin/ruff check --fix .
	.venv/bin/ruff format .

# Without a GPU where there is one: the interpreter's tests are of CPU tensors. A worker a core (one
# more gains nothing), each with the file of tests that is next: threads of operators would only be in
# each other's way. One that dies ends the run, which would wait for its file for ever.
WORKERS ?= logical
PYTEST := CUDA_VISIBLE_DEVICES= TRITON_INTERPRET=1 OMP_NUM_THREADS=1 $(PY) -m pytest -q
SPREAD := -n $(WORKERS) --maxprocesses 8 --dist loadfile --max-worker-restart 0

# While editing: the tests nearest to what differs from BASE.
quick: BASE := HEAD
quick: .venv/ok
	@tests=$$($(PY) -m tests.near $(BASE)) || exit 1; \
	if [ -z "$$tests" ]; then echo "no test is near"; else $(PYTEST) -x $(SPREAD) $$tests; fi

# Before a commit.
test: .venv/ok
	$(MAKE) -j2 check tests

tests: .venv/ok
	$(PYTEST) $(SPREAD)

# To land. With BASE, a commit, also mutants of what differs from it.
ci: .venv/ok
	$(MAKE) -j2 check tests-ci
	$(MAKE) promises

# With TESTS, folders and files, these alone: a shard of the workflow. What a worker left that was
# ended by a signal is run once more (9: nothing else failed); how it died is in the output.
LANDS := $(SPREAD) --work -m "not deep and not gpu and not unlike"
tests-ci: .venv/ok
	$(PYTEST) $(LANDS) $(TESTS) || { test $$? -eq 9 && $(PYTEST) $(LANDS) --unended $(TESTS); }
	$(if $(TESTS),,$(MAKE) tests-unlike)

tests-unlike: .venv/ok
	$(PYTEST) --unlike -m unlike tests/dist tests/integrations

promises: .venv/ok
	$(PY) -m tests.mutate --promises --unchecked $(addprefix --changed ,$(BASE))

# Searches without an end, and what reads a clock: before a release, or where it is the work at hand.
# DEEP names areas (python -m tests.deep --list); what it finds is kept in tests/corpus/, what it has
# searched in tests/deep/ledger.toml. It goes on where it was stopped.
DEEP ?=
deep: .venv/ok
	$(PY) -m tests.deep $(DEEP)

# Kernels, optimizers and chunks with the oldest torch and Triton that pyproject.toml allows, in an
# environment of their own; Triton 3.6's interpreter wants NumPy below 2.4. The plain build where pip
# finds no CPU build of it.
OLDEST_TORCH := 2.11.0
OLDEST := .venv-oldest/bin/python
.venv-oldest/ok: pyproject.toml constraints.txt
	python3 -m venv .venv-oldest
	$(OLDEST) -m pip install -q torch==$(OLDEST_TORCH)+cpu || \
		$(OLDEST) -m pip install -q torch==$(OLDEST_TORCH)
	sed '/^triton==/d; /^numpy==/d; /^scipy==/d' constraints.txt > .venv-oldest/constraints.txt
	$(OLDEST) -m pip install --no-compile -q -c .venv-oldest/constraints.txt "triton==3.6.*" "numpy<2.4" scipy \
		psutil safetensors isal pytest pytest-timeout hypothesis expecttest allpairspy
	touch .venv-oldest/ok

test-oldest: .venv-oldest/ok
	CUDA_VISIBLE_DEVICES= TRITON_INTERPRET=1 $(OLDEST) -m pytest -q \
		tests/kernels_triton tests/optim tests/gemini/chunk

# Without a GPU, on torch's CUDA build over a stub of CUDA (tests/cuda_stub), in an environment of its
# own, of which 2.6 GiB are to download; needs g++. Counts of a steady iteration (`steps` without
# `--check` writes bench/results/cuda-stub.json anew), accesses that nothing orders (`hazards`), and
# prices of plans beside replays (`prices`, likewise cuda-prices.json). Before a release, too.
CUDA := .venv-cuda/bin/python
.venv-cuda/ok: pyproject.toml constraints.txt
	python3 -m venv .venv-cuda
	$(CUDA) -m pip install -q torch==$(OLDEST_TORCH)
	sed '/^triton==/d; /^numpy==/d; /^scipy==/d' constraints.txt > .venv-cuda/constraints.txt
	$(CUDA) -m pip install --no-compile -q -c .venv-cuda/constraints.txt "numpy<2.4" scipy \
		psutil safetensors isal pytest pytest-timeout hypothesis expecttest allpairspy
	touch .venv-cuda/ok

test-cuda: .venv-cuda/ok
	$(CUDA) -m tests.cuda_stub pytest -q -m "gpu and not values" tests/kernels_triton tests/optim/update
	$(CUDA) -m tests.cuda_stub bench.adam --device cuda --numel 16384 --rounds 1 --launch 1024/4
	$(CUDA) -m tests.cuda_stub tests.cuda_stub.steps --check
	$(CUDA) -m tests.cuda_stub tests.cuda_stub.hazards
	$(CUDA) -m tests.cuda_stub tests.cuda_stub.prices --check

test-gpu:
	python3 -m pytest -q -m gpu

# All that ten minutes on a bare machine with a GPU can teach, into $(OUT); with the Python that is
# there, which has torch, Triton and pytest; HALF=2 goes on. No network is needed.
OUT ?= runs/gpu
HALF ?= 1
gpu:
	python3 -m bench.gpu --minutes 9 --out $(OUT) --half $(HALF)

# What bench.train compares with, in an environment of its own, with its operators compiled (some
# minutes; needs a C++ compiler and libaio).
peers: .venv-peers/ok

.venv-peers/ok: bench/peers/requirements.txt constraints.txt
	$(call torch_in,.venv-peers)
	.venv-peers/bin/python -m pip install --no-compile -q -c .venv-peers/constraints.txt \
		-r bench/peers/requirements.txt
	.venv-peers/bin/python -m bench.rows.worker --prepare deepspeed_zero
	touch .venv-peers/ok

# All of bench/results/, on a machine that does nothing else; `python -m bench.docs.remake --list` says
# which commands these are, and how long each takes.
results: .venv/ok peers
	$(PY) -m bench.docs.remake

readme-tables: .venv/ok
	$(PY) -m bench.docs.readme

readme-picture: .venv/ok
	$(PY) -m bench.docs.picture

# The pages of docs/ as a site, with the reference; a link that leads nowhere is an error. The
# variable silences news of its makers'.
docs: .venv/ok
	NO_MKDOCS_2_WARNING=1 $(PY) -m mkdocs build --strict
