"""Scores by rewards on pixels, of samples whose pictures were decoded later: of a share, or after all were deleted."""

from pathlib import Path

import pytest

from cosmos_rl_core.config.shared import Decoding
from cosmos_rl_core.errors import ArtifactError
from flows.planning import requests
from flows.planning.run import Run
from stages import contracts
from stages.artifacts.artifact import Artifact
from stages.artifacts.manifest import Manifest
from stages.artifacts.request import Request
from stages.artifacts.slots import drop, input_of
from stages.contracts import INDEX, MEDIA, TENSORS, Decode, Rollout
from stages.formats.samples import all_rows
from stages.formats.tables import read_table
from tests.hand_made import rewards
from tests.stages.conftest import make, make_run
from tests.stages.every_stage import recipe

NFT = {"type": "nft", "batch_size_per_optimize": 4, "timesteps_fraction": 0.5, "dataset": {"name": "ocr"}}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A run with its first rollout, whose pictures are there, and their scores by JPEG size."""
    folder = tmp_path_factory.mktemp("rescored")
    run = make_run(folder, recipe(NFT, {"name": "jpeg"}, lora={"r": 2, "target_modules": ["to_q"]}))
    for request in (requests.policy(run), run.prepared.embed):
        make(request, folder)
    make(requests.rollout(run, 0), folder)
    make(scoring(run), folder)
    return run


def scoring(run: Run) -> Request:
    return rewards(run, run.slots.iteration(0, "rollout"), 0)[0]


def rollout(run: Run, folder: Path, share: float) -> Request:
    """The first rollout once more, with fewer pictures."""
    request = requests.rollout(run, 0)
    config = request.settings(Rollout).model_copy(update={"decoding": Decoding(share=share)})
    return request.model_copy(update={"slot": f"{folder}/rollout", "config": config})


def decoding(run: Run, folder: Path, rollout: Request, *, undecoded_only: bool) -> Request:
    config = Decode(
        model=run.plan.base,
        media=run.plan.media,
        decoding=rollout.settings(Rollout).decoding,
        batch_size=4,
        undecoded_only=undecoded_only,
    )
    inputs = {"samples": (input_of(rollout.slot, INDEX, TENSORS),)}
    return Request(stage="decode", slot=f"{folder}/decode", seed=0, config=config, inputs=inputs)


def scored(run: Run, folder: Path, rollout: Request, decode: Request, *parts: str, processes: int = 1) -> Manifest:
    inputs = {"samples": (input_of(rollout.slot, *parts),), "decoded": (input_of(decode.slot, INDEX, MEDIA),)}
    request = scoring(run).model_copy(update={"slot": f"{folder}/reward-jpeg", "inputs": inputs})
    return make(request, folder, processes=processes)


def scores(manifest: Manifest) -> dict[str, float]:
    table = read_table(Artifact(input_of(manifest.slot)), contracts.Reward.SCORES)
    return dict(zip(table["sample_id"], table["score"], strict=True))


def require_scores_of_pixels(run: Run, manifest: Manifest) -> None:
    """The scores of the same pictures, but for a level of a pixel that another batch rounds."""
    expected = scores(make(scoring(run), Path(run.store_url)))
    assert manifest.summary["scored"] == len(expected) == 8
    assert scores(manifest) == pytest.approx(expected, rel=0.02)


@pytest.mark.parametrize("processes", [1, 2])
def test_pictures_decoded_by_the_rollout_and_decoded_later_are_scored_alike(
    run: Run, tmp_path: Path, processes: int
) -> None:
    half = rollout(run, tmp_path, 0.5)
    make(half, tmp_path)
    decode = decoding(run, tmp_path, half, undecoded_only=True)
    made = make(decode, tmp_path)
    assert made.summary["samples"] in range(1, 8)
    require_scores_of_pixels(run, scored(run, tmp_path, half, decode, INDEX, MEDIA, processes=processes))


def test_samples_whose_media_were_deleted_are_decoded_again_and_scored(run: Run, tmp_path: Path) -> None:
    whole = rollout(run, tmp_path, 1.0)
    make(whole, tmp_path)
    drop(whole.slot, MEDIA)
    nothing = decoding(run, tmp_path / "none", whole, undecoded_only=True)
    assert make(nothing, tmp_path).summary["samples"] == 0
    decode = decoding(run, tmp_path, whole, undecoded_only=False)
    assert make(decode, tmp_path).summary["samples"] == 8
    assert [row["sample_id"] for row in all_rows(Artifact(input_of(decode.slot)))] == [
        *scores(make(scoring(run), tmp_path))
    ]
    require_scores_of_pixels(run, scored(run, tmp_path, whole, decode, INDEX))


def test_samples_that_nobody_decoded_are_damage_and_no_low_score(run: Run, tmp_path: Path) -> None:
    half = rollout(run, tmp_path, 0.5)
    make(half, tmp_path)
    request = scoring(run).model_copy(
        update={"slot": f"{tmp_path}/reward-jpeg", "inputs": {"samples": (input_of(half.slot, INDEX, MEDIA),)}}
    )
    with pytest.raises(ArtifactError, match="was not decoded"):
        make(request, tmp_path)
