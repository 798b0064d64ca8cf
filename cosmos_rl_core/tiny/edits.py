"""Edits that a tiny FLUX.2 klein learns within minutes: to keep a picture as it is.

``python -m cosmos_rl_core.tiny.edits DIR`` writes them, and the model. A picture has two halves of one colour each.
Each picture has two results with one instruction, its middle and the mirrored middle, so that supervised training
learns to make both. A reward prefers one of them. The colours are in the reference alone; held-out pairs of colours are
in no result.
"""

import json
from itertools import product
from pathlib import Path

import numpy as np
import torch
from diffusers import (
    AutoencoderKL,
    AutoencoderKLFlux2,
    FlowMatchEulerDiscreteScheduler,
    Flux2KleinPipeline,
    Flux2Transformer2DModel,
)
from PIL import Image
from transformers import Qwen3ForCausalLM

from cosmos_rl_core.pipelines.directories import resolve_path
from cosmos_rl_core.tiny.texts import qwen3_config, qwen3_tokenizer
from cosmos_rl_core.tiny.writing import write

COLOURS = (
    (255, 60, 60), (60, 220, 60), (60, 60, 255), (240, 240, 60), (30, 30, 30), (245, 245, 245), (240, 130, 40),
    (160, 60, 200),
)  # fmt: skip
HELD_OUT = 8
"""One in this many pairs of colours is held out."""
SIDE, HEIGHT = 64, 32
"""Side of a reference, and height of its edit, in pixels."""
PROMPT = "keep the middle"


def save_model(folder: Path, seed: int) -> None:
    """Write a Flux2KleinPipeline of 400,000 random weights, with the trained autoencoder of the tiny SD3."""
    trained = AutoencoderKL.from_pretrained(resolve_path("package:tiny-sd3"), subfolder="vae")
    config = trained.config
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        same = ("block_out_channels", "down_block_types", "up_block_types", "layers_per_block", "latent_channels")
        same += ("norm_num_groups", "sample_size", "use_quant_conv", "use_post_quant_conv", "mid_block_add_attention")
        vae = AutoencoderKLFlux2(**{name: config[name] for name in same})
        vae.load_state_dict(trained.state_dict(), strict=False)
        assert vae.bn.running_mean is not None
        assert vae.bn.running_var is not None
        vae.bn.running_mean.fill_(config["shift_factor"])
        vae.bn.running_var.fill_(config["scaling_factor"] ** -2)
        pipeline = Flux2KleinPipeline(
            transformer=Flux2Transformer2DModel(
                in_channels=16,
                num_layers=2,
                num_single_layers=2,
                attention_head_dim=32,
                num_attention_heads=2,
                joint_attention_dim=48,
                timestep_guidance_channels=32,
                axes_dims_rope=(8, 8, 8, 8),
                guidance_embeds=False,
            ),
            # Evenly spaced levels: a shift for large pictures leaves few levels of little noise, where learning begins.
            scheduler=FlowMatchEulerDiscreteScheduler(),
            vae=vae,
            text_encoder=Qwen3ForCausalLM(qwen3_config(num_hidden_layers=28, initializer_range=0.08)),
            tokenizer=qwen3_tokenizer(),  # pyright: ignore[reportArgumentType]
            is_distilled=False,
        )
    pipeline.save_pretrained(folder)


def is_held_out(number: int) -> bool:
    """Return whether the pair of colours with this number is held out: no training result shows it."""
    return (number % HELD_OUT - number // HELD_OUT) % HELD_OUT == 3


def save_edits(folder: Path) -> None:
    """Write ``edits`` with their references in ``edits/before``, and the prompts ``train`` and ``held-out``."""
    (folder / "edits" / "before").mkdir(parents=True, exist_ok=True)
    rows: dict[str, list[str]] = {"train": [], "held-out": []}
    for number, (left, right) in enumerate(product(COLOURS, COLOURS)):
        pixels = np.empty((SIDE, SIDE, 3), np.uint8)
        pixels[:, : SIDE // 2], pixels[:, SIDE // 2 :] = left, right
        Image.fromarray(pixels).save(folder / "edits" / "before" / f"{number}.png")
        row = {"prompt": PROMPT, "references": [f"before/{number}.png"]}
        held_out = is_held_out(number)
        named = row | {"references": [f"edits/before/{number}.png"]}
        rows["held-out" if held_out else "train"].append(json.dumps(named))
        middle = pixels[(SIDE - HEIGHT) // 2 :][:HEIGHT]
        for name, result in {"kept": middle, "mirrored": middle[:, ::-1]}.items() if not held_out else ():
            Image.fromarray(result).save(folder / "edits" / f"{number}-{name}.png")
            (folder / "edits" / f"{number}-{name}.json").write_text(json.dumps(row), encoding="utf-8")
    for name, lines in rows.items():
        (folder / f"{name}.jsonl").write_text("\n".join(lines), encoding="utf-8")


def main(arguments: list[str] | None = None) -> None:
    """Write the model, the edits and the prompts."""
    write("edits", save_edits, save_model, arguments)


if __name__ == "__main__":
    main()
