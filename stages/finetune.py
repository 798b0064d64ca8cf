"""Training of policy k to policy k + 1, by supervised steps on the latents of media."""

from functools import partial
from typing import Any

import torch

from cosmos_rl_core import seeds
from cosmos_rl_core.algorithms._base import Batch, algorithm_of
from cosmos_rl_core.models._conditioning import Conditioning, generated, stack
from cosmos_rl_core.parallel.distributed import Group
from cosmos_rl_core.pipelines.buckets import Size
from cosmos_rl_core.training.noise_levels import FINE_GRID, DrawKey, sft_time, training_noise
from cosmos_rl_core.weights.parts import EMA
from stages import contracts
from stages.artifacts.layouts import cut_alike
from stages.artifacts.request import Request
from stages.execution.context import Context
from stages.formats.embeddings import Embeddings
from stages.formats.latents import Latents
from stages.formats.references import kinds_of
from stages.training.given import own_frames
from stages.training.micro_batches import made_ahead, my_share
from stages.training.order import ItemOrder
from stages.training.stepper import check_clocks
from stages.training.trainer import CPU, Make, MicroBatch, Trainer


def run(request: Request, context: Context[Group]) -> dict[str, Any]:
    """Write the next policy's parts and ``metrics.parquet``, one row per optimizer step."""
    config, group = request.settings(contracts.Finetune), context.ranks
    policy, iteration = request.one("policy"), request.iteration or 0
    check_clocks(policy, iteration, config.steps.first_step)
    algorithm = algorithm_of(config.algorithm)
    latents = Latents.of(request)
    layout = context.layout({"mini_batch": context.shrunk(config.algorithm.mini_batch)})
    copies = [EMA] if config.keeps_ema else []
    trainer = Trainer.load(config, algorithm, request=request, components=(), context=context, copies=copies)
    draws = _Draws(request, config, trainer, latents)
    order = ItemOrder(latents.index["source"].to_numpy(), config.weights, config.batch_size, request.seed)

    def share(step: int) -> list[Make]:
        # The largest first, so that ranks that work side by side wait little for each other.
        chunks = sorted(cut_alike(order.of_step(step), layout["mini_batch"], draws.kind), key=len, reverse=True)
        return my_share([[partial(draws, chunk)] for chunk in chunks], group)

    first = config.steps.first_step
    with made_ahead(map(share, range(first, first + len(config.steps.lrs))), group.device) as steps:
        for index, micro_batches in enumerate(steps):
            trainer.step(index, micro_batches, config.batch_size, 1)
    trainer.write(copies, iteration)
    return trainer.summary()


class _Draws:
    """Micro-batches of latents at random noise levels."""

    def __init__(self, request: Request, config: contracts.Finetune, trainer: Trainer, latents: Latents) -> None:
        self.seed, self.density, self.given_frames = request.seed, config.density, config.algorithm.given_frames
        self.text_dropout = config.algorithm.text_dropout
        self.latents = latents
        self.items: list[tuple[str, str]] = [*zip(latents.index["item_id"], latents.index["prompt_id"], strict=True)]
        self.conditioning = Embeddings(request.inputs["embeddings"], latents.prompt_ids)
        self.whole, frames = config.media.size, config.media.frames
        sizes = {latents.size(item) or self.whole for item, _ in self.items}
        self.kinds = kinds_of(request.inputs["embeddings"], config.model.path, latents.parts)
        # Some pipelines shift noise levels by the size.
        self.sigmas = {size: trainer.model.schedule(FINE_GRID, size, frames).sigmas for size in sizes}

    def size(self, drawn: tuple[int, int]) -> Size:
        """Return height and width in pixels of a drawn item."""
        return self.latents.size(self.items[drawn[0]][0]) or self.whole

    def kind(self, drawn: tuple[int, int]) -> tuple[Size, int]:
        """Return the size of a drawn item and a number for its references' shapes: equal in a micro-batch."""
        return self.size(drawn), self.kinds.get(self.items[drawn[0]][1], 0)

    def __call__(self, drawn: list[tuple[int, int]], weight: float) -> MicroBatch:
        items = [self.items[index] for index, _ in drawn]
        # A key has the item and the pass, but not the iteration, so a range of steps may begin anywhere.
        keys = [DrawKey(self.seed, 0, epoch, item) for (item, _), (_, epoch) in zip(items, drawn, strict=True)]
        x_0 = torch.stack([self.latents.trained(key.sample_id, key) for key in keys])
        noise = torch.stack([training_noise(tuple(x_0.shape[1:]), key, 0) for key in keys])
        times = [sft_time(self.sigmas[self.size(drawn[0])], self.density, key) for key in keys]
        t = torch.tensor(times, dtype=torch.float32, device=CPU)
        # A sample's conditioning: its prompt's embeddings, and a drawn number of its own first frames.
        generators = [seeds.generator("given frames", *key) for key in keys]
        own = [
            self._conditioning(prompt_id, key) | own_frames(latents, self.given_frames, generator)
            for (_, prompt_id), key, latents, generator in zip(items, keys, x_0, generators, strict=True)
        ]
        conditioning = stack(own, CPU)
        batch = Batch(x_0, noise, t, None, generated(conditioning))
        return MicroBatch(batch, conditioning, weight, keys=tuple(keys))

    def _conditioning(self, prompt_id: str, key: DrawKey) -> Conditioning:
        """Return the conditioning of a sample: its prompt's text, or the empty text if its key draws that."""
        if seeds.generator("text dropout", *key).random() < self.text_dropout:
            return self.conditioning.without_text(prompt_id)
        return self.conditioning[prompt_id]
