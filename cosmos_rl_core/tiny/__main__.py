"""``python -m cosmos_rl_core.tiny DIR`` writes the tiny SD3 pipeline: a trained autoencoder, a random transformer."""

import argparse
import logging
from pathlib import Path

import torch

from cosmos_rl_core.datasets import rendered_text
from cosmos_rl_core.tiny.sd3 import build_sd3
from cosmos_rl_core.tiny.vae import train_vae


def main(arguments: list[str] | None = None) -> None:
    """Build the pipeline, train its autoencoder and save it as safetensors."""
    parser = argparse.ArgumentParser(prog="python -m cosmos_rl_core.tiny", description=__doc__)
    parser.add_argument("dir", type=Path, help="directory to write the pipeline to")
    parser.add_argument("--seed", type=int, default=0, help="seed of all random weights and training batches")
    parser.add_argument("--vae-steps", type=int, default=400, help="training steps of the autoencoder")
    options = parser.parse_args(arguments)
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    pipe = build_sd3(options.seed)
    train_vae(pipe.vae, rendered_text.Media(rendered_text.Options()), seed=options.seed, num_steps=options.vae_steps)
    # Half precision halves the size of the package. Stages load it as float32.
    pipe.to(torch.float16).save_pretrained(options.dir, safe_serialization=True)


if __name__ == "__main__":
    main()
