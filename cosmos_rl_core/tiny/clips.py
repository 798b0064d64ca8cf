"""Clips that a tiny Wan 2.2 learns within minutes to make from their first frames: a picture that stays, or moves.

``python -m cosmos_rl_core.tiny.clips DIR`` writes them, and the model. A picture has two halves of one colour each.
Each picture has two clips with one caption: in one clip it stays, in the other it moves to the right by a half of its
width, so that supervised training learns to make both. A reward prefers one of them. The colours are in the first frame
alone; held-out pairs of colours are in no clip.
"""

import json
from itertools import product
from pathlib import Path

import numpy as np
import torch
from diffusers import AutoencoderKLWan, FlowMatchEulerDiscreteScheduler, WanPipeline, WanTransformer3DModel
from PIL import Image
from torch import Tensor
from transformers import UMT5Config, UMT5EncoderModel

from cosmos_rl_core.storage.media import encode
from cosmos_rl_core.tiny.edits import COLOURS, is_held_out
from cosmos_rl_core.tiny.texts import t5_sizes, t5_tokenizer
from cosmos_rl_core.tiny.writing import write

HEIGHT, WIDTH = 32, 64
"""Size of a picture in pixels."""
STEPS, FRAMES_OF_A_STEP = 2, 4
"""Number of latent frames (steps) after the first, and frames of the clip in each. All frames of a step are equal."""
PROMPT = "two colours"


def block_vae() -> AutoencoderKLWan:
    """Return a VAE whose latents are the mean colours of blocks of 8 x 8 pixels, in [-1, 1], and of 4 frames.

    Its weights are set, not trained. The shortcuts of its blocks take means and repeat them; the branches next to them
    are zero. The last norm of encoder and decoder divides by the length of a vector, which is nearly the value of its
    one large channel. ``silu(x) - silu(-x)`` is x.
    """
    vae = AutoencoderKLWan(
        is_residual=True, base_dim=7, z_dim=3, dim_mult=[1, 1, 1, 1], num_res_blocks=1, latents_mean=[0.0] * 3,
        latents_std=[0.7] * 3,
    )  # fmt: skip
    weights = {name: values.zero_() for name, values in vae.state_dict().items()}
    colours, large = torch.eye(3, device="cpu"), 100.0
    for side in ("encoder", "decoder"):
        _centre(weights[f"{side}.conv_in.weight"])[:6] = torch.cat([colours, -colours])
        weights[f"{side}.conv_in.bias"][6] = large
        weights[f"{side}.norm_out.gamma"].fill_(large * 7**-0.5)
        _centre(weights[f"{side}.conv_out.weight"])[:3, :6] = torch.cat([colours, -colours], dim=1)
    weights["encoder.conv_out.bias"][3:] = -30.0  # logarithms of variances
    _centre(weights["quant_conv.weight"])[:] = torch.eye(6, device="cpu")
    _centre(weights["post_quant_conv.weight"])[:] = colours
    return vae


def _centre(weights: Tensor) -> Tensor:
    """Return the weights ``[out, in]`` of a causal convolution for the pixel itself."""
    return weights[:, :, -1, weights.shape[3] // 2, weights.shape[4] // 2]


def save_model(folder: Path, seed: int) -> None:
    """Write a WanPipeline that takes pictures: random weights, and the VAE of blocks."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        pipeline = WanPipeline(
            tokenizer=t5_tokenizer(),  # pyright: ignore[reportArgumentType]
            text_encoder=UMT5EncoderModel(UMT5Config(**t5_sizes())),
            transformer=WanTransformer3DModel(
                patch_size=(1, 2, 2),
                num_attention_heads=2,
                attention_head_dim=32,
                in_channels=3,
                out_channels=3,
                text_dim=32,
                freq_dim=32,
                ffn_dim=128,
                num_layers=4,
                rope_max_seq_len=32,
            ),
            vae=block_vae(),
            # Evenly spaced levels: a shift for large videos leaves few levels of little noise, where learning begins.
            scheduler=FlowMatchEulerDiscreteScheduler(),
            expand_timesteps=True,
        )
    pipeline.save_pretrained(folder)


def save_clips(folder: Path) -> None:
    """Write ``clips`` with their captions, first frames in ``pictures``, and the prompts ``train`` and ``held-out``."""
    for name in ("clips", "pictures"):
        (folder / name).mkdir(parents=True, exist_ok=True)
    rows: dict[str, list[str]] = {"train": [], "held-out": []}
    for number, (left, right) in enumerate(product(COLOURS, COLOURS)):
        picture = np.empty((HEIGHT, WIDTH, 3), np.uint8)
        picture[:, : WIDTH // 2], picture[:, WIDTH // 2 :] = left, right
        Image.fromarray(picture).save(folder / "pictures" / f"{number}.png")
        row = {"prompt": PROMPT, "references": [f"pictures/{number}.png"]}
        rows["held-out" if is_held_out(number) else "train"].append(json.dumps(row))
        for name, pixels in {"stays": 0, "moves": WIDTH // 2 // STEPS}.items() if not is_held_out(number) else ():
            suffix, clip = encode(moving(picture, pixels))
            (folder / "clips" / f"{number}-{name}.{suffix}").write_bytes(clip)
            (folder / "clips" / f"{number}-{name}.txt").write_text(PROMPT, encoding="utf-8")
    for name, lines in rows.items():
        (folder / f"{name}.jsonl").write_text("\n".join(lines), encoding="utf-8")


def moving(picture: np.ndarray, pixels: int) -> np.ndarray:
    """Return a clip ``[frames, height, width, 3]`` of a picture that moves by ``pixels`` to the right with each step.

    Columns that leave at the right come back at the left.
    """
    steps = [np.roll(picture, step * pixels, axis=1) for step in range(STEPS + 1)]
    return np.stack([steps[0], *(steps[1 + frame // FRAMES_OF_A_STEP] for frame in range(STEPS * FRAMES_OF_A_STEP))])


def main(arguments: list[str] | None = None) -> None:
    """Write the model, the clips and the prompts."""
    write("clips", save_clips, save_model, arguments)


if __name__ == "__main__":
    main()
