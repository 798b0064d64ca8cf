"""A sample that is not finite: without a picture, marked, counted, never scored, never trained on."""

import copy
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoTokenizer

from cosmos_rl_core.errors import ArtifactError, DivergenceError
from cosmos_rl_core.pipelines import directories
from cosmos_rl_core.recipes.reading import check
from flows.planning import requests
from flows.planning.plan import freeze, make_plan
from flows.planning.run import Run
from stages import contracts
from stages.artifacts.artifact import Artifact
from stages.artifacts.manifest import Manifest
from stages.artifacts.request import Request
from stages.artifacts.slots import input_of
from stages.formats.samples import StoredSample, read_index, read_samples
from stages.formats.tables import read_table
from stages.reporting.pictures import Thumb
from tests.hand_made import rewards
from tests.stages.conftest import make

BROKEN, WHOLE = 'a sign "Z"', 'a sign "B"'


@pytest.fixture(scope="module")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A pipeline that embeds the letter Z as NaN."""
    folder = tmp_path_factory.mktemp("pipelines") / "broken"
    shutil.copytree(directories.resolve_path("package:tiny-sd3"), folder)
    tokens = AutoTokenizer.from_pretrained(folder / "tokenizer_3")
    (token,) = set(tokens(BROKEN).input_ids) - set(tokens(WHOLE).input_ids)
    (file,) = (folder / "text_encoder_3").glob("*.safetensors")
    weights = load_file(file)
    weights["shared.weight"][token] = torch.nan
    file.unlink()
    save_file(weights, file, metadata={"format": "pt"})
    return str(folder)


def run_of(folder: Path, model_path: str, prompts: list[str], **algorithm: Any) -> Run:
    datasets: list[dict[str, str]] = []
    for name, texts in (("train", prompts), ("held-out", [f"big {prompt}" for prompt in prompts])):
        file = folder / f"{name}.txt"
        file.write_text("\n".join(texts), encoding="utf-8")
        datasets.append({"name": "prompts", "path": str(file)})
    dataset, held_out = datasets
    diffusers = {"inference_size": [32, 64], "max_prompt_length": 12, "sample": {"num_steps": 2, "eval_num_steps": 2}}
    values: dict[str, Any] = {
        "policy": {
            "model_name_or_path": model_path,
            "lora": {"r": 2, "target_modules": ["to_q"]},
            "diffusers": diffusers,
        },
        "train": {
            "num_iterations": 1,
            "train_batch_per_replica": 4 * len(prompts),
            "train_policy": {"type": "nft", "dataset": dataset} | algorithm,
        },
        "rollout": {"n_generation": 4, "n_generation_mini_batch": 4, "samples_per_shard": 4},
        "rewards": [{"fn": {"name": "jpeg"}, "max_failed_fraction": 0.5}],
        "validation": {"n_generation": 2, "dataset": held_out, "batch_size": 2},
    }
    return Run(freeze(make_plan(check(copy.deepcopy(values), "test"), "run", "test.toml"), str(folder)), str(folder))


def made(request: Request, folder: Path) -> tuple[Manifest, Artifact]:
    return make(request, folder), Artifact(input_of(request.slot))


def stored_in(artifact: Artifact) -> dict[bool, list[StoredSample]]:
    """The samples by whether their prompt is the whole one."""
    found: dict[bool, list[StoredSample]] = {True: [], False: []}
    for sample in read_samples(artifact):
        found["Z" not in sample.row["prompt"]].append(sample)
    return found


def check_samples(manifest: Manifest, artifact: Artifact) -> None:
    """Samples of the broken prompt, and no other, are marked and have no picture."""
    stored = stored_in(artifact)
    assert [sample.finite for sample in stored[False]] == [False] * len(stored[False])
    assert all(sample.finite and sample.pixels.std() > 1 for sample in stored[True])
    assert all(sample.media == b"" for sample in stored[False])
    with pytest.raises(ArtifactError, match="is not finite: it has no picture"):
        _ = stored[False][0].pixels
    index = read_index(artifact)
    assert list(index["finite"]) == ["Z" not in prompt for prompt in index["prompt"]]
    assert manifest.summary["nonfinite"] == len(stored[False]) == len(stored[True])


@pytest.mark.parametrize("shuffle_rewards", [False, True])
def test_non_finite_samples_are_marked_get_no_score_and_are_not_trained_on(
    tmp_path: Path, model_path: str, shuffle_rewards: bool
):
    run = run_of(tmp_path, model_path, [BROKEN, WHOLE], shuffle_rewards=shuffle_rewards)
    for request in (requests.policy(run), run.prepared.embed):
        make(request, tmp_path)
    manifest, artifact = made(requests.rollout(run, 0), tmp_path)
    check_samples(manifest, artifact)
    broken = stored_in(artifact)[False][0]
    latents = {s.sample_id: s.final_latents for s in read_samples(artifact, contracts.TENSORS)}[broken.sample_id]
    assert latents is not None
    assert np.isnan(latents).any()
    assert Thumb.of(broken).missing == "no picture: the sample is not finite"

    (reward,) = rewards(run, run.slots.iteration(0, "rollout"), 0)
    scores, scored = made(reward, tmp_path)
    table = read_table(scored, contracts.Reward.SCORES).merge(
        read_table(scored, contracts.Reward.ANSWERS), on="sample_id"
    )
    invalid = table[~table["valid"]]
    assert set(invalid["sample_id"]) == {sample.sample_id for sample in stored_in(artifact)[False]}
    assert np.isnan(list(invalid["score"])).all()
    assert set(invalid["error"]) == {"DivergenceError: the sample is not finite, so there is no picture to score"}
    assert (scores.summary["scored"], scores.summary["failed"]) == (4, 4)

    updated, update = made(requests.update(run, 0), tmp_path)
    advantages = read_table(update, contracts.Update.ADVANTAGES)
    assert list(advantages["sample_id"]) == list(read_index(artifact)["sample_id"])
    assert set(advantages[advantages["used"]]["sample_id"]) == {s.sample_id for s in stored_in(artifact)[True]}
    assert advantages["advantage"].notna().tolist() == advantages["used"].tolist()
    assert updated.summary["excluded"] == 4
    assert updated.summary["loss"] is not None


def test_an_evaluation_marks_samples_that_are_not_finite(tmp_path: Path, model_path: str):
    run = run_of(tmp_path, model_path, [BROKEN, WHOLE])
    make(requests.policy(run), tmp_path)
    make(requests.export(run, 0), tmp_path)
    check_samples(*made(requests.evaluate(run, 0), tmp_path))


def test_a_rollout_without_a_finite_sample_fails_again_when_it_is_tried_again(tmp_path: Path, model_path: str):
    run = run_of(tmp_path, model_path, [BROKEN])
    for request in (requests.policy(run), run.prepared.embed):
        make(request, tmp_path)
    for _ in range(2):
        with pytest.raises(DivergenceError, match="none of 4 samples is finite") as caught:
            make(requests.rollout(run, 0), tmp_path)
        assert caught.value.exit_code == 65


def test_too_many_non_finite_samples_are_a_failure_that_no_retry_mends(tmp_path: Path, model_path: str):
    run = run_of(tmp_path, model_path, [BROKEN, BROKEN.replace("sign", "Z"), WHOLE])
    for request in (requests.policy(run), run.prepared.embed):
        make(request, tmp_path)
    make(requests.rollout(run, 0), tmp_path)
    (reward,) = rewards(run, run.slots.iteration(0, "rollout"), 0)
    with pytest.raises(DivergenceError, match=r"8 of 12 samples are not finite, more than max_failed_fraction = 0\.5"):
        make(reward, tmp_path)
