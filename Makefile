# Two commands on a fresh machine: `make demo` and `make test`.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
LOCK := deployments/requirements.lock
# Tests compute on one core each.
WORKERS ?= 2
# Also tests of launchers, servers and clusters, as in .ci/run: make test TESTS="not slow"
TESTS ?= not slow and not processes
# uv does not read pip's setting for a local folder of wheels.
export UV_FIND_LINKS ?= $(PIP_FIND_LINKS)
# Tests start hundreds of processes, each of which would compile our modules.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: demo test test-all coverage test-gpu gpu-bundle twins bench kills lint format docs install lock wheel tiny-base replicate-ddrl clean

demo: $(VENV)/runs
	$(BIN)/cosmos-flows run configs/tiny/nft.toml --set launch.processes=2

test: $(VENV)/installed
	$(BIN)/python -m pytest -n $(WORKERS) --dist loadgroup -m "$(TESTS)"

test-all: $(VENV)/installed
	$(BIN)/python -m pytest -n $(WORKERS) --dist loadgroup

# Lines that tests run, in the processes that they start too: outputs/coverage/index.html. Some of them: make coverage CASES=tests/core
CASES ?= tests
coverage: $(VENV)/installed
	mkdir -p outputs/coverage && rm -f outputs/coverage/data*
	$(BIN)/python -m coverage run -m pytest -n $(WORKERS) --dist loadgroup -m "$(TESTS)" $(CASES)
	$(BIN)/python -m coverage combine --quiet
	$(BIN)/python -m coverage html --quiet --directory outputs/coverage
	$(BIN)/python -m coverage report --skip-covered --sort cover

# Every deployed recipe with its profile, on tiny weights: run, export, audit, and its last iteration again with a kill.
# Hours on two cores: make twins PART=1/3. Twins that are ok in the file of results are not run again.
PART ?= 1/1
twins: $(VENV)/installed
	$(BIN)/python -m tests.twins --part $(PART)

# Needs a CUDA device: tests, bits, speed and memory of true shapes, in parts that add up to one JSON. No part begins that
# would take longer than the minutes that are left; the same command then goes on. `python -m tests.gpu --list` names them.
MINUTES ?= 8
GPU_RESULTS ?= tests/benchmarks/results/gpu-lane.json
test-gpu: $(VENV)/installed
	$(BIN)/python -m tests.gpu --minutes $(MINUTES) --results $(GPU_RESULTS)

# Wheels of the lock in outputs/gpu/wheels, at most 60 MiB, for a machine without network whose image has CUDA, torch and
# the packages that the file IMAGE lists. There: python3 -m tests.gpu --wheels outputs/gpu/wheels
IMAGE ?= tests/gpu/image.txt
IMAGE_PYTHON ?= 3.12
gpu-bundle: $(BIN)/uv
	$(BIN)/python -m tests.gpu.wheels --image $(IMAGE) --python $(IMAGE_PYTHON)

# Everything that the page of results shows, on an idle machine: more than an hour. Some of it: make bench BENCH="iteration long_runs".
# `python -m tests.benchmarks.every --list` says what each measures. The GPU lane needs a CUDA device.
BENCH ?=
bench: $(VENV)/installed
	$(BIN)/python -m tests.benchmarks.every $(BENCH)

# pyright needs a quarter less CPU time with a larger heap than Node's default.
lint: $(VENV)/installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	NODE_OPTIONS=--max-old-space-size=8192 $(BIN)/pyright

format: $(VENV)/installed
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# Seeded kills and full disks in real commands. Cases that are in tests/faults/results are not made again: days add up.
# More of them: make kills FAULTS="--count 20", or --only "rollout on 2 ranks".
kills: $(VENV)/installed
	$(BIN)/python -m tests.faults --fault kills $(FAULTS)
	$(BIN)/python -m tests.faults --fault full-disks $(FAULTS)

# The pages, in outputs/docs. A warning is an error.
docs: $(VENV)/installed
	$(BIN)/python -m sphinx -W -n --keep-going -q -b html docs outputs/docs

# dist/cosmos_rl_flows-VERSION-py3-none-any.whl, of which deployments/Dockerfile makes an image.
wheel: $(BIN)/uv
	$(BIN)/uv build --quiet --wheel --build-constraints $(LOCK) --out-dir dist

# Makes the pipeline that ships in cosmos_rl_core/tiny/pipelines/sd3 from nothing: a VAE, then a transformer.
tiny-base: $(VENV)/installed
	$(BIN)/python -m cosmos_rl_core.tiny outputs/tiny-skeleton
	$(BIN)/cosmos-flows run configs/tiny/sft.toml --run-id tiny-base --set policy.model_name_or_path=outputs/tiny-skeleton
	$(BIN)/cosmos-flows export tiny-base outputs/tiny-base

# DDRL against its alternatives on a base of its own, three seeds: two runs at a time, about two hours on two cores.
replicate-ddrl: $(VENV)/installed
	$(BIN)/python -m docs.studies.replication.study

install: $(VENV)/installed

# The versions of the lock, whose hashes uv compares. Of their modules only a quarter is ever imported; those are compiled then.
PIP_INSTALL = $(BIN)/uv pip install --python $(BIN)/python --quiet --constraints $(LOCK) --build-constraints $(LOCK)

# What runs need; without the tools of development.
$(VENV)/runs: pyproject.toml $(LOCK) | $(BIN)/uv
	$(PIP_INSTALL) -e .
	touch $@

$(VENV)/installed: pyproject.toml $(LOCK) | $(BIN)/uv
	$(PIP_INSTALL) -e '.[dev]'
	touch $@

$(BIN)/uv:
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet uv

# After a change of pyproject.toml: pins that still hold stay. `make lock UPGRADE=--upgrade` takes the newest versions.
# torch has no hashes, since its builds for the CPU and for CUDA share a version.
lock: $(BIN)/uv
	UV_FIND_LINKS= $(BIN)/uv pip compile --quiet --universal --python-version 3.11 --all-extras --generate-hashes $(UPGRADE) \
		--custom-compile-command "make lock" --output-file $(LOCK) pyproject.toml
	sed -i '/^torch==/,/# via/ { s/ \\$$//; /--hash=/d }' $(LOCK)

clean:
	rm -rf $(VENV) outputs
