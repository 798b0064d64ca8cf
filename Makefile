# Two commands on a fresh machine: `make demo` and `make test`.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# Tests compute on one core each.
WORKERS ?= 2
# Also those of launchers, servers and clusters, as in .ci/run: make test TESTS="not slow"
TESTS ?= not slow and not processes
# uv does not read pip's setting for a local folder of wheels.
export UV_FIND_LINKS ?= $(PIP_FIND_LINKS)
# Tests start hundreds of processes, each of which would compile our modules.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: demo test test-all test-gpu bench lint format docs install wheel tiny-base replicate-ddrl clean

demo: $(VENV)/installed
	$(BIN)/cosmos-flows run configs/tiny/nft.toml

test: $(VENV)/installed
	$(BIN)/python -m pytest -n $(WORKERS) --dist loadgroup -m "$(TESTS)"

test-all: $(VENV)/installed
	$(BIN)/python -m pytest -n $(WORKERS) --dist loadgroup

# Needs a CUDA device. One process, since all tests share it. The true Cosmos shape also needs torchvision.
test-gpu: $(VENV)/installed
	$(BIN)/python -m pytest --device cuda --results tests/benchmarks/results
	$(BIN)/python -m tests.benchmarks

# The second half of it with compiled blocks too: minutes more.
bench: $(VENV)/installed
	$(BIN)/python -m tests.benchmarks --compile --repeats 5

lint: $(VENV)/installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright

format: $(VENV)/installed
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# The pages, in outputs/docs. A warning is an error.
docs: $(VENV)/installed
	$(BIN)/python -m sphinx -W -n --keep-going -q -b html docs outputs/docs

# dist/cosmos_rl_flows-VERSION-py3-none-any.whl, of which deployments/Dockerfile makes an image.
wheel: $(VENV)/installed
	$(BIN)/python -m pip wheel . --no-deps --wheel-dir dist

# Makes the pipeline that ships in cosmos_rl_core/tiny/pipelines/sd3 from nothing: a VAE, then a transformer.
tiny-base: $(VENV)/installed
	$(BIN)/python -m cosmos_rl_core.tiny outputs/tiny-skeleton
	$(BIN)/cosmos-flows run configs/tiny/sft.toml --run-id tiny-base --set policy.model_name_or_path=outputs/tiny-skeleton
	$(BIN)/cosmos-flows export tiny-base outputs/tiny-base

# DDRL against its alternatives on a base of its own, three seeds: two runs at a time, about two hours on two cores.
replicate-ddrl: $(VENV)/installed
	$(BIN)/python -m docs.studies.replication.study

install: $(VENV)/installed

# One resolution for everything: see the bounds in pyproject.toml.
# Of its modules only a quarter is ever imported; those are compiled then.
$(VENV)/installed: pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet uv
	$(BIN)/uv pip install --python $(BIN)/python --quiet -e '.[dev]'
	touch $@

clean:
	rm -rf $(VENV) outputs
