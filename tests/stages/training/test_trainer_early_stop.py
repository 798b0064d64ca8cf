"""Two real gloo ranks end a pass over the rollout together, where one rank alone would have ended it earlier or not."""

from functools import partial
from pathlib import Path

import pandas as pd
import pytest
import torch
from safetensors.torch import load_file

from cosmos_rl_core.conformance.models.families import tensors_of
from cosmos_rl_core.weights.parts import CURRENT
from cosmos_rl_core.weights.policy_weights import to_bytes
from flows.planning import requests
from stages.artifacts.artifact import Artifact
from stages.artifacts.request import Request
from stages.artifacts.slots import input_of
from stages.formats.policies import read_part
from stages.training import trainer
from tests.hand_made import rewards
from tests.stages.conftest import make, make_on_ranks
from tests.stages.training.test_transitions import SDE, recipe, started, table_of, updated

pytestmark = pytest.mark.processes

MAX_DRIFT = 4e-6
"""Between the ranks' mean approx_kl at optimizer step 2 and the second rank's, each 1.4 times away."""
LAST_STEP = 3
DATA = {"name": "rendered_text", "num_items": 4, "size": [32, 64]}
DDRL = {"type": "ddrl", "data_beta": 0.1, "data": DATA, "mu_iterations": 3, "max_drift": MAX_DRIFT}
KEYS = ["optimizer_step", "sample_id", "step"]


def keep_weights(folder: Path) -> None:
    """Have this rank keep the weights that it ends with, besides those that rank 0 writes."""
    write = trainer.Trainer.write

    def write_and_keep(self: trainer.Trainer, copies: list[str], iteration: int) -> None:
        write(self, copies, iteration)
        (folder / f"current.{self.group.rank}").write_bytes(to_bytes(tensors_of(self.weights, CURRENT)))

    trainer.Trainer.write = write_and_keep


@pytest.fixture
def request_to_update(tmp_path: Path) -> Request:
    """DDRL with media, three passes of two optimizer steps: 2 micro-batches at 2 steps of the sampler each."""
    run = started(tmp_path, recipe(SDE, dataset={"name": "ocr"}, **DDRL))
    make(run.prepared.encode, tmp_path)
    make(requests.rollout(run, 0), tmp_path)
    for reward in rewards(run, run.slots.iteration(0, "rollout"), 0):
        make(reward, tmp_path)
    return requests.update(run, 0)


def test_two_ranks_stop_at_the_step_where_their_mean_has_drifted_and_one_rank_at_the_same(
    request_to_update: Request, tmp_path: Path
) -> None:
    slot = f"{request_to_update.slot}-on-two-ranks"
    on_two_ranks = request_to_update.model_copy(update={"slot": slot})
    make_on_ranks(on_two_ranks, tmp_path, 2, before=partial(keep_weights, tmp_path))
    together, alone = Artifact(input_of(slot)), updated(request_to_update, tmp_path)
    assert [one.manifest.numerics["world_size"] for one in (together, alone)] == [2, 1]

    # Micro-batches are dealt in turn, so that each rank has one of the sampler's two recorded steps to itself.
    rows = table_of(together)
    drifts = rows.groupby(["step", "optimizer_step"])["approx_kl"].mean().unstack()
    first_rank, second_rank, mean = drifts.loc[0], drifts.loc[2], drifts.mean()
    assert (first_rank <= MAX_DRIFT).all()
    assert (second_rank > MAX_DRIFT).idxmax() == LAST_STEP - 1
    assert (mean > MAX_DRIFT).idxmax() == LAST_STEP

    for update in (together, alone):
        assert update.manifest.summary["ended_before_step"] == LAST_STEP
        metrics = table_of(update, "metrics.parquet")
        assert metrics["lr"].tolist() == [1e-3] * LAST_STEP + [0.0]
        assert metrics["approx_kl"].tolist() == pytest.approx(mean.tolist(), rel=1e-3)
    # Both ranks' rows: at every optimizer step 4 samples at both recorded steps, as one rank has them.
    assert rows.groupby(KEYS).size().tolist() == [1] * 4 * 2 * (LAST_STEP + 1)
    pd.testing.assert_frame_equal(rows[KEYS], table_of(alone)[KEYS])

    ended_with = [load_file(tmp_path / f"current.{rank}") for rank in range(2)]
    written, before = read_part(input_of(slot), "current"), read_part(request_to_update.one("policy"), "current")
    for name, tensor in written.items():
        assert all(torch.equal(one[name], tensor) for one in ended_with)
        torch.testing.assert_close(tensor, read_part(input_of(alone.url), "current")[name], rtol=0, atol=1e-5)
    assert max(float((written[name] - before[name]).abs().max()) for name in written) > 1e-3
