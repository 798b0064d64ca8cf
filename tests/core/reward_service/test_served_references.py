"""References of prompts in frames: services read them, rewards get them, and nothing changes for prompts without."""

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cosmos_rl_core.errors import ConfigError
from cosmos_rl_core.reward_service import frames
from cosmos_rl_core.rewards import jpeg, pixel_similarity, remote
from cosmos_rl_core.rewards._base import Sample
from cosmos_rl_core.rewards._remote.frame import frame
from flows.operations import reward_check
from tests import running_service as running
from tests.reward_server import used_reward_server
from tests.upstream_client import UpstreamClient
from tests.upstream_client import frame as upstream_frame

DRAWS = np.random.default_rng(0)


def pictures(frames: int = 1, height: int = 12, width: int = 16) -> np.ndarray:
    return DRAWS.integers(0, 256, (frames, height, width, 3), np.uint8)


SHOWN = [pictures(height=8 + i, width=20) for i in range(3)]
SAMPLES = [
    Sample("s0", "p0", "a", pictures(), references=(SHOWN[0],)),
    Sample("s1", "p0", "a", pictures(), references=(SHOWN[0].copy(),)),
    Sample("s2", "p1", "b", pictures(), references=(SHOWN[1], SHOWN[2], SHOWN[0])),
    Sample("s3", "p2", "c", pictures(frames=5), references=(SHOWN[2], SHOWN[1])),
    Sample("s4", "p2", "c", pictures(frames=5, width=24), references=(SHOWN[2], SHOWN[1])),
]
"""Images and videos whose prompts have one to three references, of several sizes."""


@pytest.fixture(scope="module")
def serving(tmp_path_factory: pytest.TempPathFactory) -> Iterator[UpstreamClient]:
    folder = tmp_path_factory.mktemp("service")
    values = running.settings(folder, {"reward_type": "pixel_similarity"}, {"reward_type": "jpeg"})
    with running.in_thread(running.write(folder, values)) as client:
        yield client


def of_service(
    serving: UpstreamClient, monkeypatch: pytest.MonkeyPatch, reward_fn: str, references: str, **options: Any
) -> remote.Reward:
    running.name_to_clients(serving, monkeypatch)
    given = {"reward_fn": reward_fn, "references": references, "media": "pixels", "batch_size": 3} | options
    return remote.Reward(remote.Options.model_validate(given))


def read(tmp_path: Path, body: bytes) -> tuple[frames.Frame, Path]:
    path = tmp_path / "frame"
    path.write_bytes(body)
    return frames.read(path), path


def test_served_scores_are_the_scorers_own_to_the_bit(serving: UpstreamClient, monkeypatch: pytest.MonkeyPatch):
    reward, own = of_service(serving, monkeypatch, "pixel_similarity", "needed"), pixel_similarity.Options()
    reward.hold_to(reward.scorer())
    for some in (SAMPLES, SAMPLES[::-1], SAMPLES[2:3]):
        found = [entry["pixel_similarity"] for entry in reward.score(some) if isinstance(entry, dict)]
        expected = pixel_similarity.Reward(own).score(some)
        assert [{"pixel_similarity": one} for one in found] == expected
        assert len({*found}) == len(some)


def test_a_request_without_the_references_that_a_scorer_needs_is_refused_with_its_samples(serving: UpstreamClient):
    pixels = np.zeros((3, 4, 4, 3), np.uint8)
    some = frame(["a", "b", "c"], "pixel_similarity", "image", pixels, references=[[], [SHOWN[0]], []])
    none = upstream_frame(["a"], {"pixel_similarity": 1.0}, pixels[:1], media_type="image")
    for body, found in ((some, "2 samples (0, 2) of the request have none"), (none, "1 sample (0) of the request has")):
        status, told = serving.post("enqueue", body)
        assert status == 422
        assert f"pixel_similarity compares with references, and {found}" in told["detail"]
        assert 'set references = "needed"' in told["detail"]


def test_a_scorer_that_ignores_references_gives_the_scores_that_it_gives_without(serving: UpstreamClient):
    pixels = np.stack([sample.pixels[0] for sample in SAMPLES[:2]])
    bare = upstream_frame(["a", "a"], {"jpeg": 1.0}, pixels, media_type="image")
    assert frame(["a", "a"], "jpeg", "image", pixels) == bare
    shown = frame(["a", "a"], "jpeg", "image", pixels, references=[[SHOWN[0]], []])
    own = [entry["jpeg"] for entry in jpeg.Reward(jpeg.Options()).score(SAMPLES[:2]) if isinstance(entry, dict)]
    assert [serving.scores(body, "jpeg")["scores"]["jpeg"] for body in (bare, shown)] == [own, own]


def test_the_service_says_which_scorers_read_references(serving: UpstreamClient, monkeypatch: pytest.MonkeyPatch):
    scorers = serving.get("/api/reward/info")[1]["scorers"]
    assert (scorers["pixel_similarity"]["references"], scorers["jpeg"]["references"]) == ("needed", "ignored")
    for name, said, wanted in (
        ("pixel_similarity", "ignored", "needed"),
        ("pixel_similarity", "taken", "needed"),
        ("jpeg", "needed", "ignored"),
        ("jpeg", "taken", "ignored"),
    ):
        with pytest.raises(ConfigError, match=f'they are {wanted}; set references = "{wanted}"'):
            of_service(serving, monkeypatch, name, said).scorer()
    assert of_service(serving, monkeypatch, "jpeg", "ignored").scorer() is not None


def test_a_service_that_does_not_say_that_it_reads_references_gets_none(monkeypatch: pytest.MonkeyPatch):
    with used_reward_server(monkeypatch) as server:
        given = {"reward_fn": "dance_grpo", "media": "pixels", "score_key": "overall_reward", "timeout_s": 5.0}
        reward = remote.Reward(remote.Options.model_validate(given))
        assert reward.scorer() is None
        reward.score(SAMPLES[:2])
        reward.score([replace(sample, references=()) for sample in SAMPLES[:2]])
        first, second = server.frames
        assert (first.about, first.array.tolist()) == (second.about, second.array.tolist())
        with pytest.raises(ConfigError, match="does not say that it reads any; use a service of this package"):
            remote.Reward(remote.Options.model_validate(given | {"references": "taken"})).scorer()


def test_a_check_of_the_service_sends_a_reference_where_one_is_needed(serving: UpstreamClient):
    names = ["pixel_similarity", "jpeg"]
    found = [*reward_check.check(serving.url, names, 60.0, {"REMOTE_REWARD_TOKEN": running.TOKEN})]
    assert [(one.reward, one.works) for one in found] == [("pixel_similarity", True), ("jpeg", True)]
    # It is the picture itself.
    assert found[0].found.startswith("pixel_similarity 1;")


def test_the_option_is_identity_only_where_references_are_sent():
    without = remote.Options(reward_fn="x")
    assert "references" not in without.identity()
    assert remote.Options(reward_fn="x", references="needed").identity() == {
        **without.identity(),
        "references": "needed",
    }


def test_a_frame_has_each_picture_once_and_gives_each_sample_its_own(tmp_path: Path):
    clip = pictures(frames=3)
    shown = [[SHOWN[0]], [SHOWN[0].copy(), clip], []]
    found, path = read(
        tmp_path, frame(["a", "b", "c"], "x", "image", np.zeros((3, 2, 2, 3), np.uint8), references=shown)
    )
    assert json.loads(path.read_bytes().partition(b"\n")[0])["references"] == [[0], [0, 1], []]
    again = [[one.mapped(path) for one in row] for row in found.references]
    assert [len(row) for row in again] == [1, 2, 0]
    for row, expected in zip(again, shown, strict=True):
        assert all(np.array_equal(one, other) for one, other in zip(row, expected, strict=True))
    assert not found.array(path).any()


def test_a_frame_without_references_has_the_bytes_that_it_always_had():
    pixels = np.arange(24, dtype=np.uint8).reshape(2, 2, 2, 3)
    plain = frame(["a", "b"], "x", "image", pixels)
    assert frame(["a", "b"], "x", "image", pixels, references=[[], []]) == plain
    assert plain == upstream_frame(["a", "b"], {"x": 1.0}, pixels, media_type="image")


PIXELS = np.zeros((1, 2, 2, 3), np.uint8)
ABOUT: dict[str, Any] = {"prompts": ["a"], "reward_fn": {"x": 1.0}, "media_type": "image"}


@pytest.mark.parametrize(
    ("numbers", "arrays", "sentence"),
    [
        ([[0]], [], "expected an .npy file"),
        ([[0]], [PIXELS[0]], "a picture as uint8 [2, 2, 3]; expected uint8 [frames, height, width, 3]"),
        ([[0]], [PIXELS.astype(np.float32)], "a picture as float32 [1, 2, 2, 3]"),
        ([[0]], [PIXELS[:, :0]], "a picture as uint8 [1, 0, 2, 3]"),
        ([[0]], [PIXELS, PIXELS], "152 bytes after the array's header"),
        ([[]], [PIXELS], "152 bytes after the array's header"),
        ([[1]], [PIXELS], "every number from 0 to the largest, found [1]"),
        ([[-1]], [PIXELS], "every number from 0 to the largest, found [-1]"),
        ([[0], [0]], [PIXELS], "references: 2 lists for 1 samples"),
        ([[0] * 9], [PIXELS], "of at most 8 numbers each"),
        ([[0]] * 4097, [PIXELS], "4097 lists, at most 4096"),
        ([[True]], [PIXELS], "expected whole numbers"),
        ([[{}]], [PIXELS], "expected whole numbers"),
        ([0], [PIXELS], "expected a list of lists"),
        ("0", [PIXELS], "expected a list of lists"),
    ],
    ids=lambda value: value if isinstance(value, str) else None,
)
def test_invalid_references_are_refused_with_a_sentence(
    tmp_path: Path, numbers: Any, arrays: list[np.ndarray], sentence: str
):
    body = upstream_frame(["a"], {"x": 1.0}, PIXELS, media_type="image", references=numbers)
    for array in arrays:
        body += upstream_frame([], {}, array).partition(b"\n")[2]
    with pytest.raises(frames.FrameError) as refused:
        read(tmp_path, body)
    assert sentence in str(refused.value)
