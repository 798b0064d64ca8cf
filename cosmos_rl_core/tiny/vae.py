"""Training of the tiny autoencoder on rendered words: two minutes on one core."""

import logging

import numpy as np
import torch
from diffusers import AutoencoderKL
from torch import Tensor
from torch.nn import functional

from cosmos_rl_core import seeds
from cosmos_rl_core.datasets._base import Media

logger = logging.getLogger(__name__)


def train_vae(
    vae: AutoencoderKL, media: Media, *, seed: int, num_steps: int = 400, batch_size: int = 24, peak_lr: float = 4e-3
) -> None:
    """Fit the autoencoder to the first frames of ``media`` in place, and store the scale and shift of its latents.

    AdamW with one cosine cycle of the learning rate that peaks at ``peak_lr``.
    """
    optimizer = torch.optim.AdamW(vae.parameters(), lr=peak_lr)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=peak_lr, total_steps=num_steps)
    noise_source = torch.Generator(device="cpu").manual_seed(seeds.derive(seed, "vae noise"))
    vae.train()
    for step in range(num_steps):
        indices = seeds.generator(seed, "vae batch", step).integers(len(media), size=batch_size)
        loss = reconstruction_loss(vae, first_frames(media, indices), noise_source)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        if step % 50 == 0 or step == num_steps - 1:
            logger.info("autoencoder step %d of %d: loss %.4f", step, num_steps, loss.item())
    vae.eval()
    store_latent_scale(vae, first_frames(media, np.arange(min(256, len(media)))))


def reconstruction_loss(vae: AutoencoderKL, images: Tensor, noise_source: torch.Generator) -> Tensor:
    """Return the scalar loss of images ``[B, 3, H, W]`` in [-1, 1]: squared, absolute and coarse error, and a KL term.

    The coarse term compares averages of 8 x 8 pixels: a small error of a flat colour is visible but cheap otherwise.
    """
    posterior = vae.encode(images).latent_dist  # pyright: ignore[reportAttributeAccessIssue]
    restored = vae.decode(posterior.sample(generator=noise_source)).sample  # pyright: ignore[reportAttributeAccessIssue]
    coarse_error = functional.mse_loss(functional.avg_pool2d(restored, 8), functional.avg_pool2d(images, 8))
    kl = posterior.kl().mean() / posterior.mean[0].numel()
    return (
        functional.mse_loss(restored, images)
        + 0.5 * functional.l1_loss(restored, images)
        + 4 * coarse_error
        + 1e-3 * kl
    )


@torch.no_grad()
def store_latent_scale(vae: AutoencoderKL, images: Tensor) -> None:
    """Set the config so that ``(latents - shift_factor) * scaling_factor`` of these images has mean 0 and std 1."""
    latents = vae.encode(images).latent_dist.mean  # pyright: ignore[reportAttributeAccessIssue]
    vae.register_to_config(shift_factor=latents.mean().item(), scaling_factor=1 / latents.std().item())


def first_frames(media: Media, indices: np.ndarray) -> Tensor:
    """Return the first frame of these items: float32 ``[B, 3, H, W]`` in [-1, 1] on the CPU."""
    pixels = np.stack([media.item(int(index))[0][0] for index in indices])
    return torch.from_numpy(pixels).permute(0, 3, 1, 2).float() / 127.5 - 1
