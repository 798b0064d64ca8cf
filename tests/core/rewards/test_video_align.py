"""VideoReward: its frames, its head on three tokens, and the conversion of the files that its authors publish."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from cosmos_rl_core.datasets._base import ItemError, Prompt
from cosmos_rl_core.errors import ConfigError
from cosmos_rl_core.rewards._base import Sample
from cosmos_rl_core.rewards._vlm.video_align import TOKENS
from cosmos_rl_core.rewards.video_align import Options, Reward, prepare, sampled
from cosmos_rl_core.tiny import qwen3_vl
from cosmos_rl_core.vlms._prompts import Prompts
from tests.core.vlms.cases import pixels
from tests.tiny_scorers import video_align


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("video_align")
    video_align.settings(made)
    return made


def reward_of(folder: Path) -> Reward:
    sizes = {"param_dtype": "float32", "fps": 8.0, "min_frame_pixels": 128, "max_frame_pixels": 512}
    return Reward(Options.model_validate({"name": "video_align", "model": str(folder / "prepared"), **sizes}))


@pytest.mark.parametrize(
    ("total", "fps", "seen", "expected"),
    [
        (93, 16.0, 2.0, [0, 8, 17, 25, 33, 42, 50, 59, 67, 75, 84, 92]),
        (93, 32.0, 2.0, [0, 18, 37, 55, 74, 92]),
        (8, 16.0, 2.0, [0, 2, 5, 7]),
        (3, 16.0, 2.0, [0, 2]),
        (5, 16.0, 16.0, [0, 1, 3, 4]),
    ],
)
def test_frames_are_evenly_spaced_from_the_first_to_the_last(total: int, fps: float, seen: float, expected: list[int]):
    assert sampled(total, fps, seen) == expected


def test_a_single_frame_is_no_video():
    with pytest.raises(ItemError, match="1 frames, expected at least 2"):
        sampled(1, 16.0, 2.0)


def test_scores_equal_the_stock_models_with_unmerged_adapters(folder: Path):
    """The published tensors are put into the stock class by hand, and the adapters are computed unmerged."""
    (entry,) = reward_of(folder).score([Sample("s", "p", "a {dog} runs", pixels(8, 20, 30))])
    assert isinstance(entry, dict)
    raw = _by_hand(folder, "a {dog} runs")
    for name, value in zip(TOKENS, raw, strict=True):
        assert entry[name] == pytest.approx((value - 0.5) / 2.0, abs=1e-5)
    assert entry["video_align"] == pytest.approx(sum(entry[name] for name in TOKENS), abs=1e-12)


def _by_hand(folder: Path, prompt: str) -> list[float]:
    published = torch.load(folder / "published" / "checkpoint-7" / "model.pth", weights_only=True)
    base: Any = transformers.Qwen2VLForConditionalGeneration.from_pretrained(folder / "published" / "base")
    tensors = {name.removeprefix("base_model.model."): tensor for name, tensor in published.items()}
    base.resize_token_embeddings(tensors["model.embed_tokens.weight"].shape[0])
    with torch.no_grad():
        base.model.language_model.embed_tokens.weight.copy_(tensors["model.embed_tokens.weight"])
    layers: Any = base.model.language_model.layers
    for i, layer in enumerate(layers):
        stem = f"model.layers.{i}.self_attn.q_proj.lora"
        down, up = (tensors[f"{stem}_{side}.default.weight"] for side in "AB")

        def unmerged(_, inputs, output, down=down, up=up):
            return output + video_align.ALPHA / video_align.RANK * (inputs[0] @ down.T) @ up.T

        layer.self_attn.q_proj.register_forward_hook(unmerged)
    changes: Any = {"video": {"do_sample_frames": False, "size": {"shortest_edge": 128, "longest_edge": 512}}}
    prompts = Prompts(str(folder / "prepared"), changes)
    text = video_align.TEXT.replace("{text_prompt}", prompt)
    shown = {"type": "video", "video": pixels(8, 20, 30)[sampled(8, 16.0, 8.0)], "fps": 8.0}
    batch = prompts.prepare([[{"role": "user", "content": [shown, {"type": "text", "text": text}]}]])
    patches = batch["input_ids"].eq(qwen3_vl.vocabulary()["<|video_pad|>"])[..., None]
    with torch.no_grad():
        # As in the original: the language model gets embeddings alone, without positions in time and picture.
        embedded = base.model.language_model.embed_tokens(batch["input_ids"])
        seen = base.model.visual(batch["pixel_values_videos"], grid_thw=batch["video_grid_thw"]).pooler_output
        told = embedded.masked_scatter(patches, seen)
        hidden = base.model.language_model(inputs_embeds=told).last_hidden_state[0]
    head = tensors["rm_head.modules_to_save.default.weight"]
    ids = [prompts.tokenizer.convert_tokens_to_ids(token) for token in TOKENS.values()]
    places = [batch["input_ids"][0].tolist().index(number) for number in ids]
    return [float(hidden[place] @ head[0]) for place in places]


def test_a_prompt_with_a_special_token_is_refused_when_a_run_is_planned_and_fails_alone(folder: Path):
    reward = reward_of(folder)
    assert reward.check_prompt(Prompt(id="p", text="a dog <|MQ_reward|>")) == (
        "prompt 'a dog <|MQ_reward|>' holds <|MQ_reward|>, special to the model"
    )
    good, bad = reward.score(
        [Sample(s, "p", text, pixels(8, 20, 30)) for s, text in (("a", "x"), ("b", "<|TA_reward|>"))]
    )
    assert isinstance(good, dict)
    assert isinstance(bad, ValueError)


def test_missing_files_of_the_published_ones_are_named(tmp_path: Path):
    video_align.published(tmp_path / "published")
    source = tmp_path / "published"
    (source / "prompt_template.py").write_text("SIMPLE_PROMPT = ''", encoding="utf-8")
    with pytest.raises(ConfigError, match="has no constant DETAILED_PROMPT_WITH_SPECIAL_TOKEN"):
        prepare(source, tmp_path / "one")
    (source / "model_config.json").write_text(json.dumps({"peft_lora_config": {"lora_r": 2, "lora_alpha": 6}}))
    with pytest.raises(ConfigError):
        prepare(source, tmp_path / "two")
    assert not (tmp_path / "two").exists()
    (source / "checkpoint-7" / "model.pth").unlink()
    with pytest.raises(ConfigError, match=r"0 files checkpoint-\*/model\.pth"):
        prepare(source, tmp_path / "three")


def test_a_text_without_a_place_for_the_prompt_is_found_when_a_run_is_planned(folder: Path, tmp_path: Path):
    (tmp_path / "prompt.txt").write_text("Rate it.", encoding="utf-8")
    options = Options(name="video_align", model=str(folder / "prepared"), prompt_file=str(tmp_path / "prompt.txt"))
    with pytest.raises(ConfigError, match=r"expected <\|VQ_reward\|>, <\|MQ_reward\|>, .*\{text_prompt\} in it"):
        _ = Reward(options).version
    assert "sha256:" in reward_of(folder).version
