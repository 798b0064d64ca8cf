"""Published weights of scorers, converted once: they compute as with their own code, and others are refused."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy
import torch
from safetensors.torch import load_file
from torch import nn

from cosmos_rl_core.errors import ConfigError
from cosmos_rl_core.importers import open_clip
from cosmos_rl_core.rewards import aesthetic, clip_score, hpsv2, pickscore
from cosmos_rl_core.rewards._base import Sample
from cosmos_rl_core.rewards._clip import model as clip_model
from tests import tiny_scorers
from tests.test_torch_scorers import frames, samples_of
from tests.tiny_scorers import _clip


class Layer(nn.Module):
    """A block of open_clip's transformers, with its names, by PyTorch's own attention."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attn = nn.MultiheadAttention(width, open_clip.HEADS, batch_first=True)
        self.mlp = nn.Sequential()
        self.mlp.add_module("c_fc", nn.Linear(width, 2 * width))
        self.mlp.add_module("gelu", nn.GELU())
        self.mlp.add_module("c_proj", nn.Linear(2 * width, width))

    def forward(self, x: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
        y = self.ln_1(x)
        x = x + self.attn(y, y, y, attn_mask=mask, need_weights=False)[0]
        return x + self.mlp(self.ln_2(x))


class Layers(nn.Module):
    def __init__(self, width: int, count: int) -> None:
        super().__init__()
        self.resblocks = nn.ModuleList(Layer(width) for _ in range(count))


class Tower(nn.Module):
    """open_clip's vision transformer, with its names."""

    def __init__(self, width: int, patch: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, width, patch, patch, bias=False)
        self.class_embedding = nn.Parameter(torch.randn(width, device="cpu"))
        self.positional_embedding = nn.Parameter(torch.randn((_clip.SIDE // patch) ** 2 + 1, width, device="cpu"))
        self.ln_pre, self.ln_post = nn.LayerNorm(width), nn.LayerNorm(width)
        self.transformer = Layers(width, 2)
        self.proj = nn.Parameter(torch.randn(width, 16, device="cpu"))


class OpenClip(nn.Module):
    """open_clip's CLIP, with its names and its forward passes, written from its published layout."""

    def __init__(self) -> None:
        super().__init__()
        self.visual = Tower(48, 8)
        self.token_embedding = nn.Embedding(40, 32)
        self.positional_embedding = nn.Parameter(torch.randn(12, 32, device="cpu"))
        self.transformer = Layers(32, 3)
        self.ln_final = nn.LayerNorm(32)
        self.text_projection = nn.Parameter(torch.randn(32, 16, device="cpu"))
        self.logit_scale = nn.Parameter(torch.tensor(2.5, device="cpu"))

    def picture(self, pixels: torch.Tensor) -> torch.Tensor:
        see = self.visual
        patches = see.conv1(pixels).flatten(2).transpose(1, 2)
        x = torch.cat([see.class_embedding.expand(len(pixels), 1, -1), patches], 1) + see.positional_embedding
        x = see.ln_pre(x)
        for layer in see.transformer.resblocks:
            x = layer(x, None)
        return see.ln_post(x[:, 0]) @ see.proj

    def text(self, tokens: torch.Tensor) -> torch.Tensor:
        length = tokens.shape[1]
        x = self.token_embedding(tokens) + self.positional_embedding
        mask = torch.full((length, length), float("-inf"), device="cpu").triu(1)
        for layer in self.transformer.resblocks:
            x = layer(x, mask)
        ends = tokens.argmax(1)
        return self.ln_final(x)[torch.arange(len(x), device="cpu"), ends] @ self.text_projection


def shaken(model: nn.Module) -> nn.Module:
    """A model whose norms and biases are no ones and zeros."""
    with torch.no_grad():
        for weights in model.parameters():
            weights.add_(0.1 * torch.randn(weights.shape, device="cpu"))
    return model


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path]:
    """A model with open_clip's names, and the folder that is made of its checkpoint."""
    torch.manual_seed(0)
    folder, model = tmp_path_factory.mktemp("prepared"), shaken(OpenClip()).eval()
    torch.save({"state_dict": model.state_dict(), "epoch": 3}, folder / "HPS.pt")
    hpsv2.prepare(folder / "HPS.pt", folder / "made")
    return model, folder / "made"


@torch.no_grad()
def test_a_converted_model_embeds_as_the_original_layout_does(prepared: tuple[Any, Path], tmp_path: Path):
    original, folder = prepared
    _clip.save(tmp_path)
    loaded = clip_model.load(str(folder), str(tmp_path), "float32")
    pictures = [hpsv2.padded(sample.pixels[0], _clip.SIDE) for sample in samples_of("image", 3)]
    mean, deviation = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)
    pixels = torch.as_tensor((np.stack(pictures) / 255 - mean) / deviation, dtype=torch.float32, device="cpu")
    expected = original.picture(pixels.permute(0, 3, 1, 2)).numpy()
    np.testing.assert_allclose(loaded.images(pictures), expected, rtol=1e-4, atol=1e-4)
    tokens = torch.tensor([[38, 5, 39] + [0] * 9, [38, *range(1, 11), 39]], device="cpu")
    found = loaded.model.get_text_features(input_ids=tokens).pooler_output
    torch.testing.assert_close(found, original.text(tokens), rtol=1e-4, atol=1e-4)
    assert loaded.logit_scale == pytest.approx(float(original.logit_scale.exp()))


def test_a_file_of_other_tensors_is_refused_by_name(tmp_path: Path):
    tensors = OpenClip().state_dict()
    torch.save(tensors | {"visual.attn_pool.query": tensors["logit_scale"]}, tmp_path / "other.pt")
    with pytest.raises(ConfigError, match=r"other\.pt: unknown tensor 'visual\.attn_pool\.query'"):
        hpsv2.prepare(tmp_path / "other.pt", tmp_path / "made")
    del tensors["visual.ln_pre.bias"]
    torch.save(tensors, tmp_path / "few.pt")
    with pytest.raises(ConfigError, match=r"(?s)few\.pt.*vision_model\.pre_layrnorm\.bias"):
        hpsv2.prepare(tmp_path / "few.pt", tmp_path / "made")
    torch.save({"weight": tensors["logit_scale"]}, tmp_path / "head.pt")
    with pytest.raises(ConfigError, match=r"expected open_clip's CLIP|expected a tensor of open_clip"):
        hpsv2.prepare(tmp_path / "head.pt", tmp_path / "made")
    assert not (tmp_path / "made").exists()


def test_pictures_that_are_not_square_get_black_bars_and_are_not_cut():
    white = np.full((20, 40, 3), 255, np.uint8)
    found = hpsv2.padded(white, 32)
    assert found.shape == (32, 32, 3)
    assert found[8:24].min() == 255
    assert found[:8].max() == found[24:].max() == 0
    square = frames(np.random.default_rng(0), 32, 32, 1)[0]
    np.testing.assert_array_equal(hpsv2.padded(square, 32), square)


def by_hand(layers: list[tuple[np.ndarray, np.ndarray]], embedding: np.ndarray) -> float:
    values = embedding / np.linalg.norm(embedding)
    for weight, bias in layers:
        values = weight @ values + bias
    return float(values[0])


@pytest.mark.parametrize("kind", ["perceptron", "linear"])
def test_a_head_rates_the_embedding_of_length_one(kind: str, tmp_path: Path):
    settings = tiny_scorers.settings("aesthetic", tmp_path)
    tensors = safetensors.numpy.load_file(Path(settings["head"], aesthetic.HEAD))
    if kind == "linear":
        tensors = {"weight": np.linspace(-1, 1, 16, dtype=np.float32)[None], "bias": np.array([5], np.float32)}
    torch.save({name: torch.tensor(values, device="cpu") for name, values in tensors.items()}, tmp_path / "head.pth")
    aesthetic.prepare(tmp_path / "head.pth", tmp_path / "made")
    reward = aesthetic.Reward(aesthetic.Options.model_validate(settings | {"head": str(tmp_path / "made")}))
    model = clip_model.load(settings["model"], settings["model"], "float32")
    layers = sorted({name.rpartition(".")[0] for name in tensors})
    pairs = [(tensors[f"{name}.weight".lstrip(".")], tensors[f"{name}.bias".lstrip(".")]) for name in layers]
    for sample in (*samples_of("image", 2), *samples_of("video", 1)):
        expected = [by_hand(pairs, row) for row in model.images([*sample.pixels])]
        assert reward.score([sample]) == [{"aesthetic": pytest.approx(np.mean(expected), rel=1e-6)}]


def test_a_head_of_another_layout_is_refused_and_a_missing_one_says_how_it_is_made(tmp_path: Path):
    torch.save({"layers.3.weight": torch.ones(1, device="cpu")}, tmp_path / "relu.pth")
    with pytest.raises(ConfigError, match=r"relu\.pth has layers\.3\.weight; expected `weight` and `bias`"):
        aesthetic.prepare(tmp_path / "relu.pth", tmp_path / "made")
    options = aesthetic.Options(head=str(tmp_path / "made"))
    with pytest.raises(ConfigError, match="reward-service prepare aesthetic FILE FOLDER"):
        _ = aesthetic.Reward(options).version


def test_a_file_of_an_old_torch_is_read_and_another_file_is_refused_in_our_words(tmp_path: Path):
    head = {"weight": torch.ones(1, 4, device="cpu"), "bias": torch.zeros(1, device="cpu")}
    torch.save(head, tmp_path / "old.pth", _use_new_zipfile_serialization=False)
    aesthetic.prepare(tmp_path / "old.pth", tmp_path / "made")
    assert load_file(tmp_path / "made" / aesthetic.HEAD)["weight"].tolist() == [[1, 1, 1, 1]]
    (tmp_path / "page.pth").write_text("<html>not found</html>")
    torch.save({"net": Path.touch}, tmp_path / "code.pth")
    for name, reason in (("page", r"Unsupported operand \d+"), ("code", r"Unsupported global: \S+")):
        with pytest.raises(ConfigError, match=f"tensors only, as torch.save writes it: {reason}") as refused:
            aesthetic.prepare(tmp_path / f"{name}.pth", tmp_path / "other")
        # The advice of PyTorch is to run what the file says.
        assert "weights_only" not in str(refused.value)


def test_scores_have_the_scales_of_other_implementations(tmp_path: Path):
    """PickScore is the logit over 26; HPSv2 the cosine of the padded picture and the mended text."""
    settings = {name: tiny_scorers.settings(name, tmp_path / name) for name in ("pickscore", "hpsv2")}
    sample = samples_of("image", 1)[0]
    plain = clip_score.Options.model_validate({**settings["pickscore"]})
    (cosine,) = clip_score.Reward(plain).score([sample])
    (found,) = pickscore.Reward(pickscore.Options.model_validate(settings["pickscore"])).score([sample])
    assert isinstance(cosine, dict)
    scale = clip_model.load(plain.model, plain.model, "float32").logit_scale
    assert found == {"pickscore": scale * cosine["clip_score"] / 26}
    theirs = hpsv2.Reward(hpsv2.Options.model_validate(settings["hpsv2"]))
    wide = Sample("w", "p", "a &amp;  dog", frames(np.random.default_rng(0), 24, 32, 1))
    same = Sample("w", "p", "a & dog", hpsv2.padded(wide.pixels[0], _clip.SIDE)[None])
    assert theirs.score([wide]) == theirs.score([same])
