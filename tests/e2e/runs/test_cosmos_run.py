"""`cosmos-flows run` of Cosmos-Predict2.5 by DDRL on a folder of videos and a reward service."""

import json
from pathlib import Path

import pytest

from flows.planning.plan import METRICS_FILE
from tests.e2e.flow_process import Flows, metrics
from tests.own_data import RECIPE, files_with, overrides_for
from tests.reward_server import TOKEN, Frame, brightness, reward_server


def scores(sent: Frame) -> dict[str, list[float]]:
    found = brightness(sent)
    return found | {"no_score": found["overall_reward"]}


@pytest.mark.slow
def test_a_run_on_own_videos_asks_the_service_for_every_score_and_hides_its_token(
    tmp_path: Path, prefect_environment: dict[str, str]
) -> None:
    settings = [word for override in overrides_for(tmp_path / "inputs") for word in ("--set", override)]
    with reward_server() as server:
        server.scores = scores
        flows = Flows(tmp_path / "run", prefect_environment, RECIPE)
        for name in server.environment():
            flows.environment.pop(name, None)
        said = flows.run(*settings, expect=64)
        assert "REMOTE_REWARD_ENQUEUE_URL is not set" in said
        assert not flows.root.exists()

        flows.environment |= server.environment()
        said += flows.run(*settings)
        assert server.mistakes == []
        # Rollouts as latents or, for the reward that asks so, as pixels; evaluations, which keep no latents, as pixels.
        sent = sorted(
            (*frame.about["reward_fn"], frame.about["media_type"], len(frame.array)) for frame in server.frames
        )
        rollout = [("cosmos_reason1", "video", 3), ("dance_grpo", "latent", 3)]
        evaluations = [("cosmos_reason1", "video", 1), ("dance_grpo", "video", 1)]
        assert sent == sorted(2 * (rollout + evaluations))

        assert "to go on" not in flows.command("status")
    assert TOKEN not in said
    assert files_with(tmp_path, TOKEN) == []
    assert json.dumps(metrics(flows)).count("reward/remote-cosmos_reason1-no_score") > 0
    assert (flows.root / METRICS_FILE).is_file()
