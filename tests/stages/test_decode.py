"""The stage that decodes the samples that a rollout left."""

from pathlib import Path

import numpy as np
import pytest

from cosmos_rl_core.config.shared import Decoding
from flows.planning import requests
from flows.planning.run import Run
from stages.artifacts.artifact import Artifact
from stages.artifacts.request import Request
from stages.artifacts.slots import input_of
from stages.contracts import INDEX, TENSORS, Decode, Rollout
from stages.formats.samples import all_rows, unit_name
from stages.generating.plans import is_decoded, planned
from tests.stages.conftest import make, make_on_ranks
from tests.stages.generating.test_decoding import pictures, rollout, run

__all__ = ["run"]


def decode(run: Run, folder: Path, made: Request) -> Request:
    config = Decode(model=run.plan.base, media=run.plan.media, decoding=made.settings(Rollout).decoding, batch_size=4)
    samples = {"samples": (input_of(made.slot, INDEX, TENSORS),)}
    return Request(stage="decode", slot=f"{folder}/decode", seed=0, config=config, inputs=samples)


def require_alike(found: dict[str, np.ndarray], expected: dict[str, np.ndarray]) -> None:
    """Equal but for the rounding of a batch of another size."""
    assert found.keys() == expected.keys()
    assert all(np.abs(found[name] - expected[name]).max() <= 1 for name in expected)


@pytest.mark.parametrize("share", [0.5, 0.0])
def test_a_share_is_decoded_and_the_stage_decode_makes_the_rest(run: Run, tmp_path: Path, share: float):
    whole, some = requests.rollout(run, 0), rollout(run, tmp_path, Decoding(share=share))
    make(some, tmp_path)
    chosen = {plan.sample_id for plan in planned(some) if is_decoded(plan, share)}
    assert 0 <= len(chosen) < 8
    assert (len(chosen) > 0) is (share > 0)
    rows = [*all_rows(Artifact(input_of(some.slot)))]
    assert {row["sample_id"] for row in rows if row.get("decoded", True)} == chosen
    assert all(row["finite"] for row in rows)
    every = pictures(whole)
    require_alike(pictures(some), {name: every[name] for name in chosen})

    tensors = [Artifact(input_of(one.slot)).read(unit_name(TENSORS, 0)) for one in (whole, some)]
    assert tensors[0] == tensors[1]

    rest = decode(run, tmp_path, some)
    assert make(rest, tmp_path).summary["samples"] == 8 - len(chosen)
    require_alike(pictures(rest), {name: every[name] for name in every.keys() - chosen})
    same = {row["sample_id"]: row for row in all_rows(Artifact(input_of(whole.slot)))}
    for row in all_rows(Artifact(input_of(rest.slot))):
        assert row | {"unit": 0} == same[row["sample_id"]] | {"unit": 0}


@pytest.mark.processes
def test_ranks_share_the_decoding_of_the_rest(run: Run, tmp_path: Path):
    some = rollout(run, tmp_path, Decoding(share=0.5))
    make(some, tmp_path)
    alone, shared = decode(run, tmp_path, some), decode(run, tmp_path / "ranks", some)
    make(alone, tmp_path)
    make_on_ranks(shared, tmp_path, 2)
    assert input_of(alone.slot).content == input_of(shared.slot).content
