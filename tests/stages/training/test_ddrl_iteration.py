"""One iteration of DDRL on Cosmos-Predict2.5 with videos from a folder and rewards of a service, stage by stage."""

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from cosmos_rl_core.recipes.reading import read_values
from flows.planning.run import Run
from stages.artifacts.artifact import Artifact
from stages.artifacts.slots import input_of
from stages.formats.latents import Latents
from stages.formats.policies import read_part
from tests.own_data import CAPTIONS, RECIPE, files_with, overrides_for
from tests.reward_server import TOKEN, Frame, RewardServer, reward_server
from tests.stages.conftest import make_iteration, make_run
from tests.stages.training.test_transitions import table_of, tensors_of

ROOT = Path(__file__).parents[3]
TRAINED, MONITORED = "remote-dance_grpo-overall_reward", "remote-cosmos_reason1-no_score"


class Judge:
    """The mean of each sample; the trained reward of the second sample of the second caption is NaN, however often."""

    def __init__(self) -> None:
        self.lost = b""

    def __call__(self, sent: Frame) -> dict[str, list[float]]:
        if not self.lost and sent.about["prompts"][0] == CAPTIONS[1]:
            self.lost = sent.array[1].tobytes()
        means = [float(np.mean(entry, dtype=np.float64)) for entry in sent.array]
        trained = [math.nan if e.tobytes() == self.lost else m for e, m in zip(sent.array, means, strict=True)]
        return {"overall_reward": trained, "no_score": [1000 * mean for mean in means]}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("own")


@pytest.fixture(scope="module")
def server() -> Iterator[RewardServer]:
    with reward_server() as service, pytest.MonkeyPatch.context() as patch:
        for name, value in service.environment().items():
            patch.setenv(name, value)
        service.scores = Judge()
        yield service


@pytest.fixture(scope="module")
def run(folder: Path, server: RewardServer) -> Run:
    """One iteration, made."""
    values: dict[str, Any] = read_values(str(ROOT / RECIPE), overrides_for(folder / "inputs"))
    run = make_run(folder, values)
    make_iteration(run, folder)
    return run


def scores_of(run: Run, name: str) -> Any:
    return table_of(Artifact(input_of(run.slots.iteration(0, f"reward-{name}"))), "scores.parquet").set_index(
        "sample_id"
    )


def test_the_service_gets_exactly_the_stored_latents(run: Run, server: RewardServer):
    assert server.mistakes == []
    stored = tensors_of(run)
    half = {sample_id: tensors["latents"].numpy().astype(np.float16) for sample_id, (_, tensors) in stored.items()}
    # Of each prompt its three samples; then the one that could not be scored, twice more by itself.
    latents = [sent for sent in server.frames if sent.about["media_type"] == "latent"]
    assert sorted(len(sent.array) for sent in latents) == [1, 1, 3, 3]
    texts = [about["prompt"] for about, _ in stored.values()]
    # Frames of a window arrive in any order.
    whole = sorted((s for s in latents if len(s.array) == 3), key=lambda sent: texts.index(sent.about["prompts"][0]))
    np.testing.assert_array_equal(np.concatenate([s.array for s in whole]), np.stack(list(half.values())))
    assert [text for sent in whole for text in sent.about["prompts"]] == texts
    assert sorted(set(texts)) == sorted(CAPTIONS)
    videos = [sent for sent in server.frames if sent.about["media_type"] == "video"]
    assert [sent.array.shape for sent in videos] == [(3, 3, 9, 16, 32)] * 2
    assert all(sent.about["reward_fn"] == {"cosmos_reason1": 1.0} for sent in videos)


def test_each_video_begins_with_the_first_latent_frame_of_a_clip_with_its_caption(run: Run):
    latents = Latents([input_of(run.prepared.encode.slot)])
    assert sorted(latents.index["item_id"]) == ["0-00", "0-01", "1-00", "1-01"]
    for about, tensors in tensors_of(run).values():
        assert about["given_frames"] == 1
        assert CAPTIONS[int(about["given_item"][0])] == about["prompt"]
        assert torch.equal(tensors["latents"][:, :1], latents[about["given_item"]][:, :1])


def test_two_rewards_of_one_plugin_differ_and_unscored_samples_are_left_out(run: Run):
    trained, monitored = (scores_of(run, name) for name in (TRAINED, MONITORED))
    update = Artifact(input_of(run.slots.policy(1)))
    advantages = table_of(update, "advantages.parquet").set_index("sample_id")
    for sample_id, (_, tensors) in tensors_of(run).items():
        mean = float(np.mean(tensors["latents"].numpy().astype(np.float16), dtype=np.float64))
        assert monitored["valid"][sample_id]
        if not trained["valid"][sample_id]:
            assert math.isnan(trained["score"][sample_id])
            assert not advantages["used"][sample_id]
            assert math.isnan(advantages["advantage"][sample_id])
            continue
        assert trained["score"][sample_id] == pytest.approx(0.5 * mean, rel=1e-12)
        # Its weight is 2; the other one is only watched.
        assert advantages[f"reward.{TRAINED}"][sample_id] == pytest.approx(mean, rel=1e-12)
        assert advantages["reward"][sample_id] == advantages[f"reward.{TRAINED}"][sample_id]
    assert trained["valid"].tolist().count(False) == 1
    assert f"reward.{MONITORED}" not in advantages
    # Advantages are of a group, so they add up to nothing in each, also in the one of two.
    used = advantages[advantages["used"]]
    assert used.groupby("prompt_id")["advantage"].sum().to_numpy() == pytest.approx([0.0, 0.0], abs=1e-9)
    assert sorted(used.groupby("prompt_id").size()) == [2, 3]


def test_the_update_moved_the_policy_with_the_data_term_in_it(run: Run):
    before, after = (read_part(input_of(slot), "current") for slot in (run.slots.policy(0), run.slots.policy(1)))
    assert max(float((after[name] - before[name]).abs().max()) for name in before) > 1e-4
    metrics = table_of(Artifact(input_of(run.slots.policy(1))), "metrics.parquet")
    assert metrics["data_loss"].iloc[0] > 0
    transitions = table_of(Artifact(input_of(run.slots.policy(1))))
    assert transitions["ratio"].tolist() == [1.0] * 5 * 2


def test_neither_token_nor_address_is_in_any_file(run: Run, folder: Path, server: RewardServer):
    assert files_with(folder, TOKEN) == []
    assert files_with(folder, server.enqueue_url.removeprefix("http://").partition("/")[0]) == []
    assert files_with(folder, "cosmos_reason1") != []
