"""Right after a rollout every part equals ``current``: comparisons with it give ratio 1 and distance 0 to the bit."""

from pathlib import Path
from typing import Any

import pytest
import torch

from stages import contracts
from tests.stages.training.test_transitions import LORA, SDE, iterate, recipe, started, table_of

COMPARED = {
    "grpo": {"kl_beta": 0.1},
    "ddrl": {"kl_beta": 0.1, "data_beta": 0.0, "train_on": [0, 2]},
    "nft": {"kl_beta": 0.1},
    "dpo": {},
}
ON_STEPS = ("grpo", "ddrl")
"""Algorithms that train on recorded steps."""


def first_step(
    tmp_path: Path, algorithm: str, lora: dict[str, Any] | None, dtype: str, scale: float
) -> tuple[Any, Any]:
    """Return the transitions of the first optimizer step, None for algorithms without, and its metrics."""
    values = recipe(SDE | {"guidance_scale": scale}, lora)
    options = values["train"]["train_policy"] | COMPARED[algorithm] | {"type": algorithm}
    if algorithm not in ON_STEPS:
        values["policy"]["diffusers"]["sample"] = {"num_steps": 4, "guidance_scale": scale}
        options = {name: value for name, value in options.items() if name not in {"train_on", "clip_ratio"}}
    values["train"] |= {"train_policy": options, "param_dtype": dtype}
    update = iterate(started(tmp_path, values), tmp_path)
    metrics = table_of(update, "metrics.parquet").iloc[0]
    if algorithm not in ON_STEPS:
        return None, metrics
    table = table_of(update, contracts.Update.TRANSITIONS)
    return table[table["optimizer_step"] == 0], metrics


@pytest.mark.parametrize("dtype", [pytest.param("float32", marks=pytest.mark.slow), "bfloat16"])
@pytest.mark.parametrize(
    ("lora", "scale"), [(LORA, 1.0), pytest.param(None, 2.0, marks=pytest.mark.slow)], ids=["lora", "full-guided"]
)
@pytest.mark.parametrize("algorithm", ["grpo", pytest.param("ddrl", marks=pytest.mark.slow), "nft", "dpo"])
def test_at_equal_weights_every_metric_of_a_difference_is_0(
    algorithm: str, lora: dict[str, Any] | None, scale: float, dtype: str, tmp_path: Path
):
    transitions, metrics = first_step(tmp_path, algorithm, lora, dtype, scale)
    if algorithm == "dpo":
        assert metrics["loss_max"] == float(torch.tensor(2.0, device="cpu").log())
        assert metrics[["margin", "winner_error_change", "loser_error_change"]].tolist() == [0.0] * 3
        return
    assert metrics["kl_max"] == 0
    if algorithm == "nft":
        assert metrics["old_deviation_max"] == 0
    else:
        assert transitions["ratio"].tolist() == [1.0] * 8
        assert transitions["log_ratio"].tolist() == [0.0] * 8
        assert transitions["approx_kl"].tolist() == [0.0] * 8
