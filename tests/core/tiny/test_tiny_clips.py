"""The tiny model that makes videos of pictures, its clips, and the recipes that train it."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from cosmos_rl_core.errors import ConfigError
from cosmos_rl_core.storage.media import decode
from cosmos_rl_core.tiny import clips
from flows.planning.plan import Settings, plan_of
from tests.pages import ROOT


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The place that the recipes name, below the folder that they are run in."""
    folder = tmp_path_factory.mktemp("clips")
    clips.main([str(folder / "outputs/tiny-clips")])
    return folder


def test_each_picture_has_two_clips_and_held_out_ones_have_none(folder: Path):
    made = folder / "outputs/tiny-clips"
    rows = {name: [json.loads(line) for line in (made / f"{name}.jsonl").read_text().splitlines()] for name in (
        "train", "held-out")}  # fmt: skip
    assert [len(some) for some in rows.values()] == [56, 8]
    found = sorted(file.stem for file in (made / "clips").glob("*.mkv"))
    assert len(found) == 2 * 56
    for row in rows["train"]:
        picture = np.asarray(Image.open(made / row["references"][0]))
        number = Path(row["references"][0]).stem
        stays, moves = (
            decode("mkv", (made / "clips" / f"{number}-{name}.mkv").read_bytes()) for name in ("stays", "moves")
        )
        assert np.array_equal(stays, np.stack([picture] * 9))
        assert np.array_equal(moves[0], picture)
        assert np.array_equal(moves[1:5], np.stack([np.roll(picture, 16, axis=1)] * 4))
        assert np.array_equal(moves[5:], np.stack([picture[:, ::-1]] * 4))
    held_out = {Path(row["references"][0]).stem for row in rows["held-out"]}
    assert not held_out & {name.partition("-")[0] for name in found}


def test_the_tiny_vae_keeps_colours_of_blocks():
    """It keeps any colours, also next to each other, to a tenth of one of 255 levels."""
    dice = np.random.default_rng(0)
    picture = dice.integers(0, 256, (4, 8, 3), dtype=np.uint8).repeat(8, axis=0).repeat(8, axis=1)
    pixels = torch.from_numpy(clips.moving(picture, 16)).permute(3, 0, 1, 2)[None] / 127.5 - 1
    vae = clips.block_vae()
    with torch.no_grad():
        latents = vae.encode(pixels).latent_dist.mode()  # pyright: ignore[reportAttributeAccessIssue]
        restored = vae.decode(latents).sample  # pyright: ignore[reportAttributeAccessIssue]
    torch.testing.assert_close(latents, pixels[:, :, ::4, ::8, ::8], atol=1e-3, rtol=0)
    torch.testing.assert_close(restored, pixels, atol=0.1 / 127.5, rtol=0)


def test_the_recipes_of_the_tiny_image_to_video_model_plan(folder: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(folder)
    plan = plan_of(Settings(str(ROOT / "configs/tiny/i2v_sft.toml")))
    assert (len(plan.prompts), len(plan.validation_prompts)) == (56, 8)
    assert plan.basis.pictures == ((32, 64),)
    with pytest.raises(ConfigError) as error:
        plan_of(Settings(str(ROOT / "configs/tiny/i2v_nft.toml")))
    (_, mistake) = str(error.value).splitlines()
    assert "i2v-sft" in mistake
