"""SANA-Video with the VAE of LTX-2, in addition to the tests that it shares with SANA."""

from pathlib import Path

import numpy as np
import pytest
import torch

from cosmos_rl_core.conformance.models import tiny_pipelines
from cosmos_rl_core.conformance.models.families import load_family, run_stock
from cosmos_rl_core.errors import ConfigError
from cosmos_rl_core.models.sana_video.tiny import save_ltx2_vae
from cosmos_rl_core.pipelines import checkpoints
from tests.core.models.test_sana import change


def test_samples_of_sana_video_with_the_vae_of_ltx2_equal_the_stock_pipelines(tmp_path: Path):
    folder = Path(tiny_pipelines.save("sana_video", tmp_path))
    save_ltx2_vae(folder)
    family = load_family("sana_video", str(folder))
    assert family.noise.shape[1:] == (4, 3, 4, 8)
    latents = run_stock(family.stock, family.noise, num_inference_steps=2)
    videos = run_stock(family.stock, family.noise, num_inference_steps=2, output_type="pil")
    pixels = family.model.decode(latents)
    assert torch.equal(pixels, torch.stack([torch.stack([torch.tensor(np.asarray(f)) for f in v]) for v in videos]))
    mean, std = (family.stock.vae.get_buffer(f"latents_{name}").view(-1, 1, 1, 1) for name in ("mean", "std"))
    encoded = family.stock.vae.encode(pixels.permute(0, 4, 1, 2, 3) / 127.5 - 1).latent_dist.mode()
    assert torch.allclose(family.model.encode_media(pixels), (encoded - mean) / std, atol=1e-5)
    change(folder / "vae/config.json", spatial_compression_ratio=None)
    with pytest.raises(ConfigError, match=r"vae/config\.json does not state how many pixels and frames"):
        checkpoints.check(str(folder))
