"""Forward passes of an update that hold several noise levels of a sample, up to a number of tokens."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from flows.planning import requests
from stages import contracts
from stages.artifacts.artifact import Artifact
from stages.artifacts.request import Request
from stages.artifacts.slots import input_of
from stages.formats.policies import read_part
from stages.training.draws import LatentDraws, Stored
from tests.hand_made import rewards
from tests.stages.conftest import make
from tests.stages.training.test_transitions import LORA, recipe, started, table_of

TOKENS = 32
"""Tokens of a picture of 32 x 64 pixels in the tiny SD3."""


def nft_recipe(**chosen: Any) -> dict[str, Any]:
    values = recipe({"num_steps": 4, "solver": "euler", "guidance_scale": 2.0})
    algorithm = {"type": "nft", "mini_batch": 1, "dataset": values["train"]["train_policy"]["dataset"]}
    values["train"]["train_policy"] = algorithm | {"kl_beta": 0.1, "timesteps_fraction": 0.75} | chosen
    return values


KINDS = {
    "nft": nft_recipe(),
    "grpo": recipe({"num_steps": 4, "solver": "edm"}, mini_batch=1, batch_size_per_optimize=8, train_on=[0, 1, 2]),
    "dropout": nft_recipe() | {"policy": nft_recipe()["policy"] | {"lora": LORA | {"lora_dropout": 0.3}}},
}


def scored(values: dict[str, Any], tmp_path: Path) -> Request:
    """What updates on a scored rollout."""
    run = started(tmp_path, values)
    make(requests.rollout(run, 0), tmp_path)
    for reward in rewards(run, run.slots.iteration(0, "rollout"), 0):
        make(reward, tmp_path)
    return requests.update(run, 0)


def with_tokens(request: Request, tokens: int) -> Request:
    own = request.settings(contracts.Update)
    algorithm = own.algorithm.model_copy(update={"tokens_per_forward": tokens})
    config = own.model_copy(update={"algorithm": algorithm})
    return request.model_copy(update={"config": config, "slot": f"{request.slot}-{tokens}"})


@contextmanager
def sizes_of_forwards() -> Iterator[list[int]]:
    """The rows that the transformer's first module gets, pass by pass."""
    found: list[int] = []

    def saw(module: nn.Module, given: tuple[Any, ...]) -> None:
        if type(module).__name__ == "PatchEmbed":
            found.append(len(given[0]))

    with nn.modules.module.register_module_forward_pre_hook(saw):
        yield found


def gradients_of(request: Request) -> Tensor:
    """The summed gradients of the one step of an update, up to a factor: Adam's first average."""
    state = read_part(input_of(request.slot), "optimizer")
    return torch.cat([state[name].flatten() for name in sorted(state) if name.startswith("exp_avg.")])


@pytest.mark.parametrize("kind", KINDS)
def test_gradients_of_packed_levels_equal_one_level_per_forward_pass(kind: str, tmp_path: Path):
    request = scored(KINDS[kind], tmp_path)
    with sizes_of_forwards() as apart:
        make(request, tmp_path)
    assert set(apart) == {1}
    expected = gradients_of(request)
    for tokens, rows in ((2 * TOKENS, {1, 2}), (7 * TOKENS, {6})):
        together = with_tokens(request, tokens)
        with sizes_of_forwards() as found:
            make(together, tmp_path)
        assert set(found) == rows
        assert sum(found) == sum(apart)
        # Gradients of advantages of both signs nearly cancel, so that less than the seven digits of a float32 are left.
        assert torch.linalg.vector_norm(gradients_of(together) - expected) < 1e-5 * torch.linalg.vector_norm(expected)
        one, other = (table_of(Artifact(input_of(each.slot)), contracts.METRICS) for each in (request, together))
        assert one.columns.tolist() == other.columns.tolist()
        assert one.iloc[0].tolist() == pytest.approx(other.iloc[0].tolist(), rel=1e-4, abs=1e-7)


def test_packed_rows_equal_single_levels_and_share_a_row_of_conditioning(tmp_path: Path):
    request = scored(KINDS["nft"], tmp_path)
    make(request, tmp_path)
    table = table_of(Artifact(input_of(request.slot)), "advantages.parquet")
    stored = Stored.read(request, table.assign(key=[f"0/{one}" for one in table["sample_id"]]), ["behaviour"])
    draws = LatentDraws(stored, (0, 0), (1.0, 0.7, 0.5, 0.2, 0.0), 3)
    ids = [*stored.prompt_ids][:2]
    together, alone = draws(ids, 0, (0, 1, 2), 1.0), [draws(ids, 0, (place,), 1.0) for place in range(3)]
    assert (together.levels, alone[0].levels) == (3, 1)
    assert together.negative is not None
    for name, tensor in together.conditioning.items():
        assert torch.equal(tensor, alone[0].conditioning[name])
        assert len(tensor) == len(together.negative[name]) == len(ids)
    for name, tensor in vars(together.batch).items():
        if tensor is not None:
            parts = [getattr(one.batch, name) for one in alone]
            assert torch.equal(tensor, torch.stack(parts, dim=1).flatten(0, 1))
    assert together.keys == tuple(one.keys[row] for row in range(2) for one in alone)


def test_a_lack_of_memory_halves_the_rows_and_the_layout_keeps_them(tmp_path: Path):
    request = with_tokens(scored(KINDS["nft"], tmp_path), 2 * TOKENS)
    make(request, tmp_path, halve=True)
    layout = json.loads(next(Path(request.slot).rglob("layout.1.json")).read_bytes())["body"]
    assert (layout["halvings"], layout["layout"]["levels"]) == (1, 1)
    assert [len(batch) for step in layout["layout"]["steps"] for batch in step] == [1] * 8
