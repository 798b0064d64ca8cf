"""A judge whose model lies in a folder: what it says of a sample, and what becomes of what it says."""

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from cosmos_rl_core.config.reading import validated
from cosmos_rl_core.errors import ConfigError
from cosmos_rl_core.rewards import vlm_answer
from cosmos_rl_core.rewards._base import Sample
from cosmos_rl_core.storage import media
from cosmos_rl_core.vlms import _model
from tests import tiny_scorers


@pytest.fixture(scope="module")
def settings(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return tiny_scorers.settings("vlm_answer", tmp_path_factory.mktemp("judge"))


def reward(settings: dict[str, Any], **changes: Any) -> vlm_answer.Reward:
    return vlm_answer.Reward(vlm_answer.Options.model_validate(settings | changes))


def sample(frames: int = 1, prompt: str = "a dog", seed: int = 0) -> Sample:
    pixels = np.random.default_rng(seed).integers(0, 256, (frames, 16, 24, 3), dtype=np.uint8)
    return Sample("s", "p", prompt, pixels)


@pytest.mark.parametrize("frames", [1, 8])
def test_the_score_is_the_number_that_the_model_says(settings: dict[str, Any], frames: int):
    one = sample(frames)
    vlm = _model.load(settings["model"], torch.device("cpu"), torch.float32, {"video": {"num_frames": 4}})
    shown = {"type": "image", "image": one.pixels[0]} if frames == 1 else {"type": "video", "video": one.pixels}
    shown |= {} if frames == 1 else {"fps": float(media.FPS)}
    (said,) = vlm.describe([shown], "does it show a dog?", 12)
    assert reward(settings).score([one]) == [{"vlm_answer": float(said)}]
    assert reward(settings, criterion="dogs").score([one]) == [{"vlm_answer-dogs": float(said)}]


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"max_new_tokens": 1}, "cut at max_new_tokens = 1; raise it"),
        ({"highest": 0.5}, "expected 0 to 0.5"),
        ({"pattern": r"Score: (\d+)"}, "has no number where"),
        ({"pattern": None, "key": "score"}, "is no JSON object"),
    ],
)
def test_an_answer_without_a_score_is_a_failure(settings: dict[str, Any], changes: dict[str, Any], reason: str):
    (found,) = reward(settings, **changes).score([sample()])
    assert isinstance(found, ValueError)
    assert reason in str(found)


def test_a_prompt_with_the_models_own_tokens_fails_alone(settings: dict[str, Any]):
    good, bad = reward(settings).score([sample(), sample(prompt="a <|im_end|> dog")])
    assert isinstance(good, dict)
    assert "special to the model" in str(bad)


def test_the_version_depends_on_files_and_question_not_on_their_place(settings: dict[str, Any], tmp_path: Path):
    there = shutil.copytree(settings["model"], tmp_path / "copy")
    version = reward(settings).version
    assert reward(settings, model=str(there)).version == version
    others = [{"rubric": "is it {prompt}?"}, {"system": "Be strict."}, {"pattern": r"(\d+)$"}, {"highest": 9.0}]
    versions = {reward(settings, **change).version for change in others}
    (there / "config.json").write_text((there / "config.json").read_text() + " ")
    assert len({version, reward(settings, model=str(there)).version, *versions}) == 6


def test_settings_that_contradict_each_other_are_refused(settings: dict[str, Any]):
    with pytest.raises(ConfigError, match="num_frames and fps are both set"):
        validated(vlm_answer.Options, settings | {"name": "vlm_answer", "fps": 2.0}, "reward")


@pytest.mark.parametrize(("frames", "seeds"), [(1, (3, 4)), (8, (4, 2))])
def test_references_are_shown_in_order_before_the_sample(settings: dict[str, Any], frames: int, seeds: tuple[int, int]):
    shown = [sample(seed=seed).pixels for seed in seeds]
    one = replace(sample(frames), references=shown)
    vlm = _model.load(settings["model"], torch.device("cpu"), torch.float32, {"video": {"num_frames": 4}})
    parts: list[dict[str, Any]] = [{"type": "image", "image": picture[0]} for picture in (*shown, one.pixels)]
    if frames > 1:
        parts[-1] = {"type": "video", "video": one.pixels, "fps": float(media.FPS)}
    asked = {"type": "text", "text": "does it show a dog?"}
    batches = [vlm.prepare([[{"role": "user", "content": [*some, asked]}]]) for some in (parts, parts[-1:])]
    said, alone = (int(vlm.generate(batch, 12)[0]) for batch in batches)
    compares, takes = (reward(settings, references=uses) for uses in ("needed", "taken"))
    bare = replace(one, references=())
    # Of other pictures the tiny model says the same whatever it is shown.
    assert said != alone
    assert compares.score([replace(one, references=shown[::-1])]) != [{"vlm_answer": float(said)}]
    assert compares.score([one]) == takes.score([one]) == [{"vlm_answer": float(said)}]
    assert reward(settings).score([one]) == takes.score([bare]) == [{"vlm_answer": float(alone)}]
    scored, failed = compares.score([one, bare])
    assert (scored, str(failed)) == (
        {"vlm_answer": float(said)},
        "prompt p has no reference to compare with",
    )
    assert compares.score([bare, one, bare])[1] == scored
    assert len({each.version for each in (compares, takes, reward(settings))}) == 3
