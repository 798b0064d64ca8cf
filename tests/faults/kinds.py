"""One stage of a whole run that is made again, for every kind of stage that an iteration of NFT does not have."""

import re
from collections.abc import Sequence

from flows.operations.rerun import rerun
from flows.planning.steps import read_run
from flows.post_train import steps
from tests import tiny_scorers
from tests.e2e.flow_process import NO_PREFECT, PREFECT, RUN_ID, Flows
from tests.twins.inputs import Inputs
from tests.twins.shrinking import inline

HELD_OUT = '{ name = "rendered_text", split = "test", num_items = 6 }'
SUPERVISED = {
    "train.train_policy.dataset.num_items": 16,
    "train.train_policy.steps_per_iteration": 2,
    "validation.data": HELD_OUT,
    "validation.n_generation": 1,
}
KINDS = {
    "supervised": ("policy", "embed", "encode", "validate", "evaluate", "finetune", "export"),
    "judged": ("reward-clip_score",),
    "vlm": ("policy", "index", "tokenize", "finetune", "validate", "export"),
}
"""Stages by the base that has them."""


def recipe(base: str, inputs: Inputs) -> tuple[str, tuple[str, ...]]:
    """Return the recipe of a base and the options of its commands."""
    if base == "supervised":
        changes = [f"{key}={value}" for key, value in SUPERVISED.items()]
        return "configs/tiny/sft.toml", _options(changes)
    if base == "judged":
        fn = {"name": "clip_score"} | tiny_scorers.settings("clip_score", inputs.folder / "clip_score")
        rewards = [{"fn": fn, "role": "train", "weight": 1.0}]
        return "tests/e2e/tiny.toml", _options([f"rewards={inline(rewards)}"])
    places = {key: str(value) for key, value in inputs.conversations("llava").items()}
    datasets = {"all": {"name": "llava"} | places}
    changes = {
        "policy.model_name_or_path": str(inputs.vlm),
        "train.train_batch_per_replica": 8,
        "train.train_policy.steps_per_iteration": 2,
        "train.train_policy.datasets": datasets,
        "validation": {"max_new_tokens": 2, "freq": 1, "datasets": datasets},
    }
    return "configs/tiny/vlm_sft.toml", _options([f"{key}={inline(value)}" for key, value in changes.items()])


def _options(changes: Sequence[str]) -> tuple[str, ...]:
    return ("--iterations", "1", *(word for one in changes for word in ("--set", one)))


def prepare(flows: Flows, base: str, inputs: Inputs) -> tuple[str, ...]:
    """Set a store's commands to the recipe of a base. Return their options."""
    flows.recipe, options = recipe(base, inputs)
    # Only diffusion runs can do without Prefect in tests.
    flows.program = PREFECT if base == "vlm" else NO_PREFECT
    if base == "vlm":
        home = str(flows.folder / "prefect")
        flows.environment |= {"PREFECT_HOME": home, "PREFECT_SERVER_ANALYTICS_ENABLED": "false"}
    return options


def end_stage(flows: Flows, stage: str) -> str:
    """End the first artifact of a stage. Return a pattern of the files of its slot."""
    step = next(step for step in steps(read_run(flows.store, RUN_ID)) if step.stage == stage)
    rerun(flows.store, RUN_ID, stage, step.k)
    return re.escape(step.slot)
