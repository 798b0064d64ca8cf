"""The client of cosmos-rl's reward protocol, against a server that takes every frame apart by hand."""

import math
import socket
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest

from cosmos_rl_core.errors import ConfigError, UnavailableError
from cosmos_rl_core.recipes.reading import check
from cosmos_rl_core.rewards import remote
from cosmos_rl_core.rewards._base import LatentSample, Sample, ServedReward
from cosmos_rl_core.rewards._remote.client import Service
from cosmos_rl_core.rewards.remote import IN_FLIGHT
from cosmos_rl_core.storage import media
from tests.reward_server import TOKEN, Frame, RewardServer, Withholding, brightness, used_reward_server

NAME = "remote-dance_grpo-overall_reward"
NFT = {"type": "nft", "dataset": {"name": "ocr"}}
DRAWS = np.random.default_rng(0)
VIDEO = DRAWS.integers(0, 256, (5, 5, 16, 24, 3), dtype=np.uint8)
LATENTS = DRAWS.standard_normal((5, 16, 2, 2, 3)).astype(np.float32)


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[RewardServer]:
    with used_reward_server(monkeypatch) as service:
        yield service


def reward(**options: object) -> remote.Reward:
    chosen = {"reward_fn": "dance_grpo", "score_key": "overall_reward", "timeout_s": 5.0} | options
    return remote.Reward(remote.Options.model_validate(chosen))


def samples(count: int = 5, *, latents: bool = True) -> list[Sample | LatentSample]:
    kind, arrays = (LatentSample, LATENTS) if latents else (Sample, VIDEO)
    return [kind(f"p-{i}", "p", f"prompt {i} — é\n", arrays[i]) for i in range(count)]


def score(sample: dict[str, float] | Exception) -> float:
    assert isinstance(sample, dict), sample
    return sample[NAME]


def test_videos_go_as_half_precision_latents_in_batches_and_scores_come_back_in_order(server: RewardServer):
    found = reward(batch_size=2, scale=3.0).score(samples())
    frames = server.sorted_frames
    assert [len(sent.array) for sent in frames] == [2, 2, 1]
    half = LATENTS.astype(np.float16)
    np.testing.assert_array_equal(np.concatenate([sent.array for sent in frames]), half)
    assert [text for sent in frames for text in sent.about["prompts"]] == [s.prompt for s in samples()]
    means = [float(np.mean(entry, dtype=np.float64)) for entry in half]
    assert [score(entry) for entry in found] == pytest.approx([3 * mean for mean in means])
    assert [entry["overall_reward"] for entry in found if isinstance(entry, dict)] == pytest.approx(means)
    assert [entry["prompt_length"] for entry in found if isinstance(entry, dict)] == [13.0] * 5


def test_pixels_of_videos_go_with_the_colours_first(server: RewardServer):
    reward().score(samples(2, latents=False))
    (sent,) = server.frames
    assert (sent.about["media_type"], sent.about["video_infos"]) == ("video", [{"video_fps": float(media.FPS)}] * 2)
    np.testing.assert_array_equal(sent.array, VIDEO[:2].transpose(0, 4, 1, 2, 3))


def test_videos_of_other_speeds_go_apart_and_say_theirs(server: RewardServer):
    reward().score([replace(one, fps=fps) for one, fps in zip(samples(3, latents=False), (24, 16, 24), strict=True)])
    sent = [(len(one.array), one.about["video_infos"][0]["video_fps"]) for one in server.sorted_frames]
    assert sent == [(2, 24.0), (1, 16.0)]


def test_images_go_as_pixels_with_the_colours_last_and_sizes_apart(server: RewardServer):
    pictures = [VIDEO[0, :1], VIDEO[1, :1, :8], VIDEO[2, :1]]
    found = reward().score([Sample(f"p-{i}", "p", "x", p) for i, p in enumerate(pictures)])
    assert [sent.about["media_type"] for sent in server.frames] == ["image", "image"]
    (large,) = (sent for sent in server.frames if len(sent.array) == 2)
    np.testing.assert_array_equal(large.array, VIDEO[[0, 2], 0])
    assert [score(entry) for entry in found] == pytest.approx([float(p.mean()) for p in pictures])


def test_keys_are_summed_and_the_sum_clipped_before_it_is_scaled(server: RewardServer):
    server.scores = lambda sent: {"vq": [-4.0, 1.0, 9.0], "mq": [-3.0, 0.5, 1.0], "other": [0.0, 0.0, 0.0]}
    options = {"score_key": "vq+mq", "clip_min": -5.0, "clip_max": 5.0, "scale": 2.0}
    found = reward(**options).score(samples(3))
    assert [entry["remote-dance_grpo-vq+mq"] for entry in found if isinstance(entry, dict)] == [-10.0, 3.0, 10.0]


@pytest.mark.parametrize("bad", [math.nan, math.inf, None, "0.5", True])
def test_an_answer_that_is_no_number_fails_its_sample_alone(server: RewardServer, bad: object):
    server.scores = lambda sent: {"overall_reward": [1.0, bad, 3.0]}
    first, second, third = reward().score(samples(3))
    assert (score(first), score(third)) == (1.0, 3.0)
    assert isinstance(second, ValueError)
    assert "could not score" in str(second)


def test_numbers_that_mean_a_failure_are_no_scores(server: RewardServer):
    server.scores = lambda sent: {"overall_reward": [-1.0, 2.0, 3.0], "prediction": ["Good", "Error", "Bad"]}
    first, second, third = reward(failure_score=-1.0).score(samples(3))
    assert isinstance(first, ValueError)
    assert isinstance(second, ValueError)
    assert score(third) == 3.0


def without_the_second(sent: Frame) -> dict[str, object]:
    if any(text.startswith("prompt 1") for text in sent.about["prompts"]):
        return {"overall_reward": brightness(sent)["overall_reward"][1:]}
    return dict(brightness(sent))


def test_a_request_that_fails_is_repeated_one_by_one_and_only_the_sample_at_fault_is_lost(server: RewardServer):
    server.scores = without_the_second
    found = reward().score(samples(3))
    assert [isinstance(entry, dict) for entry in found] == [True, False, True]
    assert [len(sent.array) for sent in server.frames] == [3, 1, 1, 1]


@pytest.mark.parametrize(
    "answer",
    [
        (200, {"error": "out of memory", "scores": None, "type": "dance_grpo"}),
        (200, {"scores": None}),
        (200, {"scores": {"overall_reward": [1.0]}, "type": "hpsv3"}),
        (422, {"detail": "out of memory"}),
    ],
)
def test_a_failure_in_the_services_words_is_the_samples_failure(server: RewardServer, answer: tuple[int, object]):
    server.pull_answers = [answer]
    (found,) = reward().score(samples(1))
    assert isinstance(found, ValueError)
    assert str(answer[0]) in str(found)


def test_scores_that_take_their_time_are_waited_for(server: RewardServer):
    server.pulls_before_ready = 3
    found = reward(batch_size=1).score(samples(2))
    assert server.pulls == {"uuid-0": 4, "uuid-1": 4}
    assert [score(entry) for entry in found] == pytest.approx(
        [float(np.mean(entry, dtype=np.float64)) for entry in LATENTS[:2].astype(np.float16)]
    )


def test_a_service_that_fails_for_a_moment_is_asked_again(server: RewardServer):
    server.enqueue_answers, server.pull_answers = [(503, {"detail": "starting"})], [(500, {"message": "Error"})]
    (found,) = reward().score(samples(1))
    assert isinstance(found, dict)


@pytest.mark.parametrize(("batch_size", "requests"), [(1, 41), (2, 21 + 40)])
def test_the_service_always_has_as_many_requests_as_it_may(server: RewardServer, batch_size: int, requests: int):
    pictures = [np.full((1, 2, 2, 3), i, np.uint8) for i in range(41)]
    server.scores = withholding = Withholding(server, -(-41 // batch_size), IN_FLIGHT)
    found = reward(batch_size=batch_size, timeout_s=60.0).score(
        [Sample(f"s{i}", "p", "x", one) for i, one in enumerate(pictures)]
    )
    assert [score(one) for one in found] == [float(i) for i in range(41)]
    assert (withholding.answered, len(server.frames), withholding.most) == (requests, requests, IN_FLIGHT)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"scores": lambda sent: None}, r"no dance_grpo scores of request uuid-0 after 0\.3 s.*Not found scores"),
        ({"enqueue_answers": [(503, {"detail": "starting"})] * 9}, "did not answer: 503"),
        ({"enqueue_answers": [(200, {"replica_id": "replica-7"})]}, "named no uuid"),
        ({"pull_answers": [(404, {"message": "unknown"})] * 9}, "does not know its request: 404"),
    ],
)
def test_a_service_that_does_not_answer_fails_no_single_sample(
    server: RewardServer, changes: dict[str, object], says: str
):
    for name, value in changes.items():
        setattr(server, name, value)
    with pytest.raises(UnavailableError, match=says):
        reward(timeout_s=0.3).score(samples(2))


def test_a_port_that_nobody_listens_on_is_unavailable(server: RewardServer, monkeypatch: pytest.MonkeyPatch):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        url = f"http://user:pass@127.0.0.1:{taken.getsockname()[1]}/enqueue?key=1"
        monkeypatch.setenv("REMOTE_REWARD_ENQUEUE_URL", url)
        with pytest.raises(UnavailableError, match=r"service at http://127\.0\.0\.1:\d+/enqueue did not answer"):
            reward(timeout_s=0.3).score(samples(1))


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"enqueue_answers": [(401, {"detail": TOKEN})]}, "401 .*<token>.*: set REMOTE_REWARD_TOKEN"),
        ({"enqueue_answers": [(413, {})]}, "lower batch_size"),
        ({"pull_answers": [(405, {})]}, "check REMOTE_REWARD_ENQUEUE_URL"),
    ],
)
def test_an_error_that_every_sample_would_meet_is_a_mistake_in_the_settings(
    server: RewardServer, changes: dict[str, object], says: str
):
    for name, value in changes.items():
        setattr(server, name, value)
    with pytest.raises(ConfigError, match=says) as caught:
        reward().score(samples(1))
    assert TOKEN not in str(caught.value)


def test_latents_that_no_service_decodes_are_refused_before_anything_is_sent(server: RewardServer):
    with pytest.raises(ConfigError, match=r'latents of 4 channels.*media = "pixels"'):
        reward().score([LatentSample("p", "p", "x", LATENTS[0, :4])])
    assert server.frames == []


def test_the_environment_says_where_the_service_is_and_every_mistake_at_once():
    given = {"REMOTE_REWARD_FETCH_URL": "localhost/pull", "REMOTE_REWARD_TOKEN": "a\nb"}
    with pytest.raises(ConfigError) as caught:
        Service.from_environment(given | {"REMOTE_REWARD_ENQUEUE_TIMEOUT_S": "soon"})
    first, second, third, fourth = str(caught.value).splitlines()
    assert first.startswith("REMOTE_REWARD_ENQUEUE_URL is not set; set it to the full URL")
    assert second.startswith("REMOTE_REWARD_FETCH_URL is no http(s) URL")
    assert third == ("REMOTE_REWARD_TOKEN has characters that no HTTP header takes; set the bare token")
    assert fourth == "REMOTE_REWARD_ENQUEUE_TIMEOUT_S = 'soon' is no number of seconds"
    assert isinstance(reward(), ServedReward)


def test_a_large_body_has_longer_to_arrive_and_the_token_is_not_shown():
    given = {"REMOTE_REWARD_ENQUEUE_URL": "http://x/e", "REMOTE_REWARD_FETCH_URL": "http://x/p"}
    service = Service.from_environment(given | {"REMOTE_REWARD_TOKEN": TOKEN})
    # clamp(30 + 3 a MiB, 60, 600)
    assert [service.enqueue_timeout_s(size << 20) for size in (0, 10, 20, 100, 1000)] == [60, 60, 90, 330, 600]
    assert TOKEN not in repr(service)
    fixed = Service.from_environment(given | {"REMOTE_REWARD_ENQUEUE_TIMEOUT_S": "7"})
    assert [fixed.enqueue_timeout_s(size << 20) for size in (0, 1000)] == [7, 7]


def test_no_setting_says_where_the_service_is_and_how_long_it_takes_is_not_identity():
    options = remote.Options(reward_fn="dance_grpo", timeout_s=1.0)
    assert options.identity() == remote.Options(reward_fn="dance_grpo").identity()
    assert options.label == "remote-dance_grpo"
    with pytest.raises(ValueError, match=r"clip_min = 5\.0 is not below clip_max = 5\.0"):
        remote.Options(reward_fn="x", clip_min=5.0, clip_max=5.0)


def test_rewards_of_one_service_need_labels_that_differ():
    def recipe(*keys: str) -> dict[str, object]:
        fns = [{"name": "remote", "reward_fn": "dance_grpo", "score_key": key} for key in keys]
        return {
            "policy": {"model_name_or_path": "package:tiny-sd3"},
            "train": {"num_iterations": 1, "train_batch_per_replica": 16, "train_policy": NFT},
            "rewards": [{"fn": fn} for fn in fns],
        }

    rewards = check(recipe("vq_reward", "vq_reward+mq_reward"), "test").rewards
    assert [r.fn.label for r in rewards] == ["remote-dance_grpo-vq_reward", "remote-dance_grpo-vq_reward+mq_reward"]
    with pytest.raises(ConfigError, match="two rewards have the same name: remote-dance_grpo-a, remote-dance_grpo-a"):
        check(recipe("a", "a"), "test")
