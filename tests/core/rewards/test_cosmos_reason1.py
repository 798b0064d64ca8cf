"""The score of Cosmos-Reason1-7B-Reward: frames and sizes by hand, logits against the stock model's."""

from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from PIL import Image

from cosmos_rl_core.datasets._base import ItemError
from cosmos_rl_core.errors import ConfigError
from cosmos_rl_core.rewards._base import Sample
from cosmos_rl_core.rewards.cosmos_reason1 import Options, Reward, sampled
from cosmos_rl_core.vlms._prompts import Prompts
from tests import tiny_scorers
from tests.core.vlms.cases import pixels


def made(folder: Path, **options: object) -> Reward:
    given = tiny_scorers.settings("cosmos_reason1", folder)
    return Reward(Options.model_validate({"name": "cosmos_reason1", **given, **options}))


@pytest.mark.parametrize(
    ("shape", "expected"),
    [
        ((93, 88, 160), ((92, 140, 224), 16.0)),
        ((4, 480, 832), ((4, 476, 840), 16.0)),
        ((161, 28, 56), ((80, 112, 224), 8.0)),
        ((2, 7, 9), ((2, 140, 196), 16.0)),
        # Of 9216 * 28 * 28 * 2 pixels, 160 frames have 90316 each.
        ((160, 280, 560), ((160, 196, 420), 16.0)),
    ],
)
def test_frames_are_whole_pairs_of_whole_tokens(shape, expected):
    found, fps = sampled(np.zeros((*shape, 3), np.uint8), 16.0)
    assert (found.shape[:3], fps) == expected


def test_every_second_of_many_frames_is_taken_and_scaled_by_bicubic_interpolation():
    clip = pixels(162, 28, 56)
    found, fps = sampled(clip, 24.0)
    assert fps == 12.0
    size = found.shape[2], found.shape[1]
    assert np.array_equal(found[3], np.asarray(Image.fromarray(clip[6]).resize(size, Image.Resampling.BICUBIC)))


def test_a_single_frame_is_no_video():
    with pytest.raises(ItemError, match="1 frames, expected at least 2"):
        sampled(np.zeros((1, 28, 28, 3), np.uint8), 16.0)


def test_the_score_is_the_stock_models_probability_of_no(tmp_path: Path):
    reward = made(tmp_path)
    (entry,) = reward.score([Sample("s", "p", "Anything odd?", pixels(5, 20, 30), fps=24.0)])
    model = transformers.Qwen2_5_VLForConditionalGeneration.from_pretrained(tmp_path, dtype=torch.float32)
    frames, fps = sampled(pixels(5, 20, 30), 24.0)
    parts = [{"type": "video", "video": frames, "fps": fps}, {"type": "text", "text": "Anything odd?"}]
    system = {"role": "system", "content": "Is there anything odd? Yes or No."}
    prompts = Prompts(str(tmp_path), {"video": {"do_sample_frames": False}})
    with torch.no_grad():
        logits = model(**prompts.prepare([[system, {"role": "user", "content": parts}]])).logits[0, -1]
    yes, no = (logits[prompts.tokenizer.encode(word)[0]] for word in ("Yes", "No"))
    assert isinstance(entry, dict)
    assert entry["yes_logit"] == pytest.approx(float(yes), abs=1e-6)
    assert entry["cosmos_reason1"] == pytest.approx(float(torch.softmax(torch.stack([yes, no]), 0)[1]), abs=1e-6)
    assert entry["prediction"] == ("Bad" if yes > no else "Good")


def test_a_question_of_the_recipe_is_asked_in_place_of_the_prompt(tmp_path: Path):
    samples = [Sample("s", "p", text, pixels(4, 20, 30)) for text in ("a ball", "two dogs in a yard")]
    first, second = made(tmp_path).score(samples)
    assert first != second
    first, second = made(tmp_path, question="Anything odd?").score(samples)
    assert first == second


def test_the_system_prompt_is_part_of_its_identity_and_its_absence_is_found_at_plan_time(tmp_path: Path):
    first = made(tmp_path).version
    (tmp_path / "other.txt").write_text("Look closely.", encoding="utf-8")
    assert made(tmp_path, prompt_file=str(tmp_path / "other.txt")).version != first
    missing = made(tmp_path)
    (tmp_path / "system_prompt.txt").unlink()
    with pytest.raises(
        ConfigError, match=r"needs .*system_prompt\.txt.*write the text that the model was trained with"
    ):
        _ = missing.version
