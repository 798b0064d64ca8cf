"""HPSv3: its pictures, its layers at one token, and the conversion of the files that its authors publish."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file

from cosmos_rl_core.datasets._base import Prompt
from cosmos_rl_core.errors import ConfigError
from cosmos_rl_core.rewards._base import Sample
from cosmos_rl_core.rewards.hpsv3 import TOKEN, Options, Reward, prepare, scaled
from cosmos_rl_core.tiny import qwen3_vl
from cosmos_rl_core.vlms._prompts import Prompts
from tests.core.vlms.cases import pixels
from tests.tiny_scorers import hpsv3


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("hpsv3")
    hpsv3.settings(made)
    return made


def reward_of(folder: Path, **options: Any) -> Reward:
    return Reward(Options.model_validate({"model": str(folder / "prepared"), "param_dtype": "float32", **options}))


@pytest.mark.parametrize(
    ("shape", "expected"),
    [((512, 512), (448, 448)), ((720, 1280), (336, 588)), ((300, 200), (560, 392)), ((448, 448), (448, 448))],
)
def test_pictures_of_every_size_become_about_256_tokens(shape: tuple[int, int], expected: tuple[int, int]):
    """By the rule of the original with both bounds at 256 * 28 * 28: larger ones are rounded down, smaller ones up."""
    assert scaled(np.zeros((*shape, 3), np.uint8), 28).shape == (*expected, 3)


def test_the_score_is_the_first_number_of_the_published_layers(folder: Path):
    """The published tensors are put into the stock class and multiplied by hand."""
    picture = pixels(2, 20, 30)
    (entry,) = reward_of(folder).score([Sample("s", "p", "a {dog} runs", picture)])
    expected = np.mean([_by_hand(folder, "a {dog} runs", frame) for frame in picture])
    assert entry == {"hpsv3": pytest.approx(expected, abs=1e-5)}


def _by_hand(folder: Path, prompt: str, frame: np.ndarray) -> float:
    tensors = load_file(folder / "published" / "HPSv3.safetensors")
    base: Any = transformers.Qwen2VLForConditionalGeneration.from_pretrained(folder / "published" / "base")
    base.resize_token_embeddings(len(tensors["model.embed_tokens.weight"]))
    body = {name: tensor for name, tensor in tensors.items() if not name.startswith("rm_head.")}
    names = {hpsv3.older(name): name for name in base.state_dict()}
    base.load_state_dict({names[name]: tensor for name, tensor in body.items()}, strict=True)
    prompts = Prompts(str(folder / "prepared"))
    shown = {"type": "image", "image": scaled(frame, 8)}
    text = hpsv3.TEXT.replace("{text_prompt}", prompt)
    batch = prompts.prepare([[{"role": "user", "content": [shown, {"type": "text", "text": text}]}]])
    patches = batch["input_ids"].eq(qwen3_vl.vocabulary()["<|image_pad|>"])[..., None]
    with torch.no_grad():
        # As in the original: the language model gets embeddings alone, without positions in time and picture.
        embedded = base.model.language_model.embed_tokens(batch["input_ids"])
        seen = base.model.visual(batch["pixel_values"], grid_thw=batch["image_grid_thw"]).pooler_output
        hidden = base.model.language_model(inputs_embeds=embedded.masked_scatter(patches, seen)).last_hidden_state[0]
    place = batch["input_ids"][0].tolist().index(prompts.tokenizer.convert_tokens_to_ids(TOKEN))
    value = hidden[place]
    for i, name in enumerate(hpsv3.SIZES):
        value = tensors[f"{name}.weight"] @ (value.relu() if i else value) + tensors[f"{name}.bias"]
    return float(value[0])


def test_a_prompt_with_the_special_token_is_refused_when_a_run_is_planned_and_fails_alone(folder: Path):
    reward, picture = reward_of(folder), pixels(1, 20, 30)
    assert (
        reward.check_prompt(Prompt(id="p", text="a <|Reward|>"))
        == "prompt 'a <|Reward|>' holds <|Reward|>, special to the model"
    )
    good, bad = reward.score([Sample(s, "p", text, picture) for s, text in (("a", "x"), ("b", "<|Reward|>"))])
    assert isinstance(good, dict)
    assert isinstance(bad, ValueError)


def test_missing_files_are_named(folder: Path, tmp_path: Path):
    hpsv3.published(tmp_path / "published")
    source = tmp_path / "published"
    (source / "data_collator_qwen.py").write_text("INSTRUCTION = ''", encoding="utf-8")
    with pytest.raises(ConfigError, match="has no constant prompt_with_special_token"):
        prepare(source, tmp_path / "one")
    (source / "data_collator_qwen.py").unlink()
    with pytest.raises(ConfigError, match=r"data_collator_qwen\.py is missing; copy it from .*MizzenAI/HPSv3"):
        prepare(source, tmp_path / "one")
    assert not (tmp_path / "one").exists()
    (tmp_path / "prompt.txt").write_text("Rate it.", encoding="utf-8")
    with pytest.raises(ConfigError, match=r"expected <\|Reward\|>, \{text_prompt\} in it, each once"):
        _ = reward_of(folder, prompt_file=str(tmp_path / "prompt.txt")).version
