# The two commands of the README are `make serve` and `make test`; the rest serves them.

PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
HOST   ?= 127.0.0.1
PORT   ?= 8000
TP     ?= 2
DEMO   := $(HOME)/.cache/topwork/models/SmolLM2-135M-Instruct
MODEL  ?= $(DEMO)
SERVED := $(if $(filter $(MODEL),$(DEMO)),--served-model-name smollm2,)
PYTEST := OMP_WAIT_POLICY=PASSIVE OMP_NUM_THREADS=1 $(BIN)/python -m pytest
QUICK  := -m 'not slow and not gpu'
comma  := ,
ADAPTERS ?= $(if $(filter $(MODEL),$(DEMO)),$(subst $() ,$(comma),$(foreach d,$(wildcard deploy/demo/adapters/*),$(notdir $(d))=$(d))),)

.PHONY: install serve test test-serving test-control test-computing test-kernels test-interpreted test-compiled test-sanitizers test-slow test-random test-grids test-models test-engines test-servers test-clients test-cluster test-vllm chaos fuzz check demo-model bench-scheduler bench-adapters bench-trainer bench-structured bench-slow-clients bench-peers bench-limits bench-tenancy bench-tenants probe-tenants bench-strangers clean

# torch first and pinned, and of its build for CPUs: PyPI's brings gigabytes of CUDA. Where that index
# cannot be reached, pip takes what it finds elsewhere.
TORCH_INDEX ?= https://download.pytorch.org/whl/cpu
$(BIN)/.installed: pyproject.toml
	@echo 'installing into $(VENV): torch first, then the rest, about a minute'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --disable-pip-version-check --timeout 15 --retries 1 --no-deps \
	  --extra-index-url $(TORCH_INDEX) torch==2.13.0
	$(BIN)/pip install --disable-pip-version-check -e '.[cpu,demo]'
	touch $@

$(BIN)/.installed-dev: $(BIN)/.installed
	$(BIN)/pip install --quiet --disable-pip-version-check 'pip>=25.1'
	$(BIN)/pip install --quiet --disable-pip-version-check --group dev
	touch $@

install: $(BIN)/.installed

$(DEMO)/config.json: | $(BIN)/.installed
	$(BIN)/topwork demo-model $(DEMO)

demo-model: $(DEMO)/config.json

serve: $(BIN)/.installed $(if $(filter $(MODEL),$(DEMO)),$(DEMO)/config.json,)
	@exec $(BIN)/topwork serve --model $(MODEL) $(SERVED) --tp $(TP) --host $(HOST) --port $(PORT) \
	  $(foreach a,$(subst $(comma), ,$(ADAPTERS)),--adapter $(a))

# Five processes, two at a time, the longest first. One shows what it does (and so runs under make -n,
# too); the others do when they have ended.
test: $(BIN)/.installed-dev $(DEMO)/config.json
	$(MAKE) -j2 --output-sync=target test-serving test-control test-interpreted test-computing test-compiled

# Servers and engines over a real model.
test-serving: $(BIN)/.installed-dev $(DEMO)/config.json
	+$(PYTEST) $(QUICK) tests/end_to_end $(ARGS)

# All that computes nothing, and that is not named elsewhere.
test-control: $(BIN)/.installed-dev $(DEMO)/config.json
	$(PYTEST) $(QUICK) tests $(addprefix --ignore=tests/,end_to_end kernels worker) $(ARGS)

# What ranks compute on a CPU.
test-computing: $(BIN)/.installed-dev $(DEMO)/config.json
	$(PYTEST) $(QUICK) tests/kernels tests/worker $(ARGS)

# GPU kernels without a GPU: what they compute, by Triton's interpreter, and what they compile to.
# Each needs a process of its own.
test-kernels: $(BIN)/.installed-dev
	$(MAKE) -j2 --output-sync=target test-interpreted test-compiled

test-interpreted: $(BIN)/.installed-dev
	TRITON_INTERPRET=1 $(PYTEST) $(QUICK) tests/kernels/gpu/interpreted tests/worker/interpreted $(ARGS)

test-compiled: $(BIN)/.installed-dev
	$(PYTEST) $(QUICK) tests/kernels/gpu/compiled tests/worker/compiled $(ARGS)

# The C library's tests with its code instrumented: what it does outside of memory, what is undefined
# and which threads race. ARGS='--full' is all of them, ARGS='--only thread' one sanitizer.
test-sanitizers: $(BIN)/.installed-dev $(DEMO)/config.json
	OMP_WAIT_POLICY=PASSIVE OMP_NUM_THREADS=1 $(BIN)/python -m tests.kernels.sanitizers $(ARGS)

# Everything that `make test` leaves out, but for kernels of GPUs: hours. The next five are parts of it.
test-slow: $(BIN)/.installed-dev $(DEMO)/config.json
	$(PYTEST) -m slow $(ARGS)

# Tests with random cases, all of them: `make test` tries a quarter.
test-random: $(BIN)/.installed-dev $(DEMO)/config.json
	$(PYTEST) --hypothesis-profile=all -m 'random and not gpu' $(ARGS)

# Every combination of parameters: kernels, ranks and adapters, and kernels of GPUs without one.
test-grids: $(BIN)/.installed-dev $(DEMO)/config.json
	$(PYTEST) -m 'not gpu' tests/kernels tests/worker $(ARGS)
	TRITON_INTERPRET=1 $(PYTEST) tests/kernels/gpu/interpreted tests/worker/interpreted $(ARGS)
	$(PYTEST) tests/kernels/gpu/compiled tests/worker/compiled $(ARGS)

# Every family of models with every number of ranks and both types.
test-models: $(BIN)/.installed-dev
	$(PYTEST) -m 'not gpu' tests/worker/models/families $(ARGS)

# The engine over the demo model at every size, in every company.
test-engines: $(BIN)/.installed-dev $(DEMO)/config.json
	$(PYTEST) $(addprefix tests/end_to_end/test_,$(addsuffix .py,engine_tokens exact_sums structured_output \
	  forbidden_tokens thinking_budget enforced_calls classify embeddings prompt_logprobs)) $(ARGS)

# Servers over the demo model, struck, filled and asked for all that they can be asked for.
test-servers: $(BIN)/.installed-dev $(DEMO)/config.json
	$(PYTEST) tests/end_to_end/test_server*.py $(addprefix tests/end_to_end/test_,$(addsuffix .py,small_memory \
	  request_log observability ends faults pool_recovery commands)) $(ARGS)

# Clients that others wrote, each installed once (9 GB in ~/.cache/topwork), against a server.
# ARGS='--only langchain,aiperf' takes some, ARGS='-k stream' goes to pytest.
test-clients: $(BIN)/.installed-dev $(DEMO)/config.json
	$(BIN)/python -m tests.clients $(ARGS)

# A real Ray cluster on loopback, driven as an operator drives it: minutes.
test-cluster: $(BIN)/.installed-dev $(DEMO)/config.json
	$(PYTEST) -m slow \
	  tests/end_to_end/test_serve_deploy.py tests/end_to_end/test_scaling.py \
	  tests/end_to_end/test_ray_up.py tests/end_to_end/test_prometheus.py \
	  tests/end_to_end/test_planned_moves.py tests/end_to_end/test_hosts_lost.py \
	  tests/end_to_end/test_host_leaves.py tests/end_to_end/test_hosts_encrypted.py $(ARGS)

# vLLM's own tests, from its source package in ~/.cache/topwork/compat, against servers of ours; half an
# hour on two cores. ARGS='tests/tool_use' runs some, ARGS='--write' keeps the results for the page.
test-vllm: $(BIN)/.installed-dev $(DEMO)/config.json
	$(BIN)/python -m tests.compat $(ARGS)

# Blows to a server's processes under mixed streams, every answer compared with an undisturbed one.
# ARGS='--blows kill-rank,stop-scheduler --rounds 3' or ARGS='--minutes 30 --blows ...'.
chaos: $(BIN)/.installed-dev $(DEMO)/config.json
	$(BIN)/python -m tests.chaos $(ARGS)

# Calls that no client makes, to a server of its own: 5,000 hostile bodies and 2,000 cases that
# schemathesis, in an environment of its own, makes of the OpenAPI document. ARGS='--bodies 500 --seed 7'.
FUZZ := $(HOME)/.cache/topwork/fuzz/venv
$(FUZZ)/.installed:
	$(PYTHON) -m venv $(FUZZ)
	$(FUZZ)/bin/pip install --quiet --disable-pip-version-check schemathesis==4.32.5
	touch $@

fuzz: $(BIN)/.installed-dev $(DEMO)/config.json $(FUZZ)/.installed
	$(BIN)/python -m tests.fuzz --schemathesis $(FUZZ)/bin/schemathesis $(ARGS)

check: $(BIN)/.installed-dev
	$(BIN)/ruff check --no-cache .
	$(BIN)/ruff format --check .
	find kernels/native/csrc -name '*.[ch]' | xargs $(BIN)/clang-format --dry-run --Werror
	$(BIN)/mypy
	$(BIN)/lint-imports

# The peer lives in an environment of its own: nothing here depends on it.
$(VENV)/bench-scheduler/.installed: | $(BIN)/.installed
	$(PYTHON) -m venv $(VENV)/bench-scheduler
	$(VENV)/bench-scheduler/bin/pip install --quiet --disable-pip-version-check tokenspeed-scheduler==0.1.42
	touch $@

# ARGS='--profile' shows where our time goes, ARGS='--json FILE' writes all that was measured.
bench-scheduler: $(BIN)/.installed $(VENV)/bench-scheduler/.installed
	$(BIN)/python -m tests.bench.scheduler --peer-python $(VENV)/bench-scheduler/bin/python $(ARGS)

# What keys are granted of their limits over three routers; four minutes. ARGS='--minutes 5'.
bench-limits: $(BIN)/.installed $(DEMO)/config.json
	$(BIN)/python -m tests.bench.limits $(ARGS)

# What tenancy costs at 16 clients, by two servers in turn. ARGS='--pairs 9 --tp 2'.
bench-tenancy: $(BIN)/.installed $(DEMO)/config.json
	$(BIN)/python -m tests.bench.tenancy_cost $(ARGS)

# Makes 2,000 adapters once (half a minute, 4 GB in ~/.cache/topwork/bench) and starts servers itself.
# ARGS='--only stall --tp 2' measures less, ARGS='--json FILE' writes all that was measured.
bench-adapters: $(BIN)/.installed $(DEMO)/config.json
	$(BIN)/python -m tests.bench.adapters $(ARGS)

# A trainer that posts 500 versions a minute beside 16 streams, on a server of its own; two minutes.
# ARGS='--per-minute 200 --streams 4' asks for less.
bench-trainer: $(BIN)/.installed $(DEMO)/config.json
	$(BIN)/python -m tests.bench.trainer $(ARGS)

# A tenant that asks little, beside one that asks for ten times its share.
# ARGS='--only warm --rounds 2' asks for less, ARGS='--json FILE' writes all that was measured.
bench-tenants: $(BIN)/.installed $(DEMO)/config.json
	$(BIN)/python -m tests.bench.tenants $(ARGS)

# One tenant tries to learn of another one, by answers and by times; ends with 1 if it does.
# ARGS='--calls 1000 --samples 100' tries less.
probe-tenants: $(BIN)/.installed-dev $(DEMO)/config.json
	$(BIN)/python -m tests.bench.probing $(ARGS)

# The worst bodies, four of each kind at once, and 200 loads of broken adapters beside streams, on a server of
# its own; three minutes. ARGS='--only messages --loads 0' asks for less.
bench-strangers: $(BIN)/.installed $(DEMO)/config.json
	$(BIN)/python -m tests.bench.strangers $(ARGS)

# 200 schemas of the public suite and 100 of real tools, fetched by pip once, asked of a server of its own,
# base and adapters, greedy and drawn; then what a form costs and saves. Half an hour on two cores.
# ARGS='--suite 20 --tools 10 --rounds 0' asks for less, ARGS='--url http://127.0.0.1:8000' of one that runs.
bench-structured: $(BIN)/.installed-dev $(DEMO)/config.json
	$(BIN)/python -m tests.bench.structured $(ARGS)

# Clients that are idle, half done or slow beside one that is not, on a server of its own; needs 20,000
# open files. ARGS='--kind "idle sockets"' measures less.
bench-slow-clients: $(BIN)/.installed $(DEMO)/config.json
	$(BIN)/python -m tests.bench.slow_clients $(ARGS)

# Installs vLLM's CPU build, llama.cpp and transformers + peft (6 GB in ~/.cache/topwork/peers) once.
# ARGS='--only base,memory --peers llama --threads 1' measures less. Of llama.cpp's own formats,
# llama-q8_0 and llama-q4_0 take part in base; goals are over peers of 16-bit weights.
bench-peers: $(BIN)/.installed $(DEMO)/config.json
	$(BIN)/python -m tests.bench.peers $(ARGS)

clean:
	rm -rf $(VENV)
