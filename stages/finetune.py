"""Policy k to policy k + 1 by supervised steps on a media set, encoded as it is drawn."""

from functools import partial
from typing import Any

import torch
from torch import Tensor

from cosmos_rl_core import seeds
from cosmos_rl_core.algorithms._base import Batch, algorithm_of
from cosmos_rl_core.datasets._base import Media
from cosmos_rl_core.errors import ConfigError
from cosmos_rl_core.models._base import generated, stack
from cosmos_rl_core.training.noise_levels import FINE_GRID, DrawKey, sft_time, training_noise
from cosmos_rl_core.weights.parts import EMA
from stages import contracts
from stages.artifacts.layouts import cut
from stages.artifacts.request import Request
from stages.context import Context
from stages.formats.generating import vae_batches
from stages.formats.prepared import Embeddings
from stages.training.given import own_frames
from stages.training.loading import load_media
from stages.training.trainer import MicroBatch, Trainer, check_clocks, my_share


def run(request: Request, context: Context) -> dict[str, Any]:
    """Write the next policy's parts and ``metrics.parquet``, a row an optimizer step."""
    config, group = request.settings(contracts.Finetune), context.ranks
    policy, iteration = request.one("policy"), request.iteration or 0
    check_clocks(policy, iteration, config.steps.first_step)
    algorithm = algorithm_of(config.algorithm)
    media = load_media(config.algorithm.dataset, config.dataset_digest)
    layout = context.layout({"mini_batch": context.shrunk(config.algorithm.mini_batch)})
    copies = [EMA] if config.keeps_ema else []
    trainer = Trainer.load(config, algorithm, request=request, components=("vae",), context=context, copies=copies)
    draws = _Draws(request, config, trainer, media)
    for index in range(len(config.steps.lrs)):
        step = config.steps.first_step + index
        items = _items(len(media), config.batch_size, request.seed, step)
        micro_batches = [[partial(draws, chunk)] for chunk in cut(items, layout["mini_batch"])]
        trainer.step(index, my_share(micro_batches, group), config.batch_size, 1)
    trainer.write(copies, iteration)
    return trainer.summary()


def _items(size: int, batch_size: int, seed: int, step: int) -> list[tuple[int, int]]:
    """Return (item, pass) of each sample of one optimizer step.

    Every pass over the data has its own order, which is computed by random access.
    """
    positions = range(step * batch_size, (step + 1) * batch_size)
    orders = {epoch: seeds.permutation(size, seed, "data order", epoch) for epoch in {p // size for p in positions}}
    return [(orders[p // size][p % size], p // size) for p in positions]


class _Draws:
    """Micro-batches of media items, encoded by the VAE, at random noise levels."""

    def __init__(self, request: Request, config: contracts.Finetune, trainer: Trainer, media: Media) -> None:
        self.seed, self.shape = request.seed, config.media
        self.density, self.given_frames = config.density, config.algorithm.given_frames
        self.model, self.media, self.device = trainer.model, media, trainer.group.device
        self.conditioning = Embeddings(request.one("embeddings"), [prompt.id for prompt in media.prompts])
        self.sigmas = self.model.schedule(FINE_GRID, config.media.size, config.media.frames).sigmas

    def __call__(self, items: list[tuple[int, int]], weight: float) -> MicroBatch:
        drawn = [self.media.item(index) for index, _ in items]
        # Keyed by item and pass, so a range of steps may begin anywhere; the iteration is no part of it.
        keys = [DrawKey(self.seed, 0, epoch, str(index)) for index, epoch in items]
        expected = (self.shape.frames, *self.shape.size, 3)
        if wrong := [pixels.shape for pixels, _ in drawn if pixels.shape != expected]:
            raise ConfigError(
                f"the dataset gives media of {list(wrong[0])}, policy.diffusers asks for {list(expected)}"
            )
        x_0 = self._encode(torch.stack([torch.tensor(pixels, device="cpu") for pixels, _ in drawn]))
        noise = torch.stack([training_noise(tuple(x_0.shape[1:]), key, 0) for key in keys])
        times = [sft_time(self.sigmas, self.density, key) for key in keys]
        t = torch.tensor(times, dtype=torch.float32, device=self.device)
        # A sample's conditioning: its prompt's embeddings, and a drawn number of its own first frames.
        generators = [seeds.generator("given frames", *key) for key in keys]
        own = [
            self.conditioning[prompt.id] | own_frames(latents, self.given_frames, generator)
            for (_, prompt), latents, generator in zip(drawn, x_0, generators, strict=True)
        ]
        conditioning = stack(own, self.device)
        batch = Batch(x_0, noise.to(self.device), t, None, generated(conditioning))
        return MicroBatch(batch, conditioning, weight, keys=tuple(keys))

    @torch.no_grad()
    def _encode(self, pixels: Tensor) -> Tensor:
        parts = vae_batches(len(pixels), self.shape)
        return torch.cat([self.model.encode_media(pixels[part].to(self.device)) for part in parts])
