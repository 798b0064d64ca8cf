"""Updates on videos, ``[C, T, H, W]``: LoRA and full, on one rank and on two."""

from pathlib import Path
from typing import Any

import pytest

from flows.planning import requests
from stages.artifacts.artifact import Artifact
from stages.artifacts.slots import input_of
from stages.formats.policies import read_part
from stages.formats.tables import read_table
from tests.stages.conftest import make_iteration, make_on_ranks, make_run
from tests.stages.small_video import LORA, ddrl_recipe, one_iteration, recipe


@pytest.mark.processes
def test_a_video_model_takes_one_ddrl_update_with_data_on_one_rank_and_on_two(
    wan_path: str, prompt_dir: str, tmp_path: Path
):
    run = make_run(tmp_path, ddrl_recipe(wan_path, prompt_dir, tmp_path / "clips"))
    make_iteration(run, tmp_path)
    alone = requests.update(run, 0)
    both = alone.model_copy(update={"slot": f"{alone.slot}-on-two-ranks"})
    make_on_ranks(both, tmp_path, 2)

    before = read_part(input_of(run.slots.policy(0)), "current")
    a, b = (read_part(input_of(request.slot), "current") for request in (alone, both))
    assert max(float((a[name] - b[name]).abs().max()) for name in a) < 2e-4
    assert max(float((a[name] - before[name]).abs().max()) for name in a) > 1e-4
    tables: list[Any] = [read_table(Artifact(input_of(r.slot)), "transitions.parquet") for r in (alone, both)]
    for table in tables:
        assert table["log_ratio"].tolist() == [0.0] * 12
        assert table["logp_drift"].max() < 1e-6
    assert tables[0]["sample_id"].tolist() == tables[1]["sample_id"].tolist()
    losses = [read_table(Artifact(input_of(r.slot)), "metrics.parquet")["data_loss"].iloc[0] for r in (alone, both)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)
    assert losses[0] > 0


@pytest.mark.processes
@pytest.mark.parametrize("lora", [LORA, None], ids=["lora", "full"])
def test_a_video_model_takes_one_nft_update_on_one_rank_and_on_two(
    lora: dict[str, Any] | None, wan_path: str, prompt_dir: str, tmp_path: Path
):
    alone, both = (make_run(tmp_path / name, recipe(wan_path, prompt_dir, lora), name) for name in ("alone", "both"))
    one_iteration(alone, tmp_path, ranks=1)
    one_iteration(both, tmp_path, ranks=2)

    # Samples are split by sample: every byte is the same on any number of ranks.
    assert input_of(alone.slots.iteration(0, "rollout")).content == input_of(both.slots.iteration(0, "rollout")).content

    policies = [input_of(run.slots.policy(1)) for run in (alone, both)]
    before = read_part(input_of(alone.slots.policy(0)), "current")
    for part in ("current", "old", "ema"):
        a, b = (read_part(policy, part) for policy in policies)
        assert a.keys() == b.keys() == before.keys()
        # Sums over ranks are taken in another order; Adam turns rounding of tiny gradients into up to a whole step.
        assert max(float((a[name] - b[name]).abs().max()) for name in a) < 2e-4
        assert max(float((a[name] - before[name]).abs().max()) for name in a) > 1e-4
