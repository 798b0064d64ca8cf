"""Samples of the behaviour policy: latents by our own solver, decoded to the pixels that rewards see."""

import torch
from torch import Tensor

from cosmos_rl_core import seeds
from cosmos_rl_core.models._base import Conditioning, Model, guided_velocity, stack
from cosmos_rl_core.policy_weights import to_bytes
from cosmos_rl_core.sampling.flow import KERNELS
from cosmos_rl_core.sampling.kernel import Kernel
from cosmos_rl_core.sampling.rollout import sample
from cosmos_rl_core.sampling.schedule import schedule_of
from stages import contracts, embed, policy
from stages.contracts import Request
from stages.loading import load_model
from stages.runner import Context
from stages.samples import SamplePlan, plan_samples, sample_files, write_samples


def run(request: Request, context: Context) -> dict[str, int]:
    """Write ``samples/<n>.tar`` and ``index.parquet``; finished shards of an earlier attempt are adopted."""
    config = request.config
    assert isinstance(config, contracts.Rollout)
    samples = plan_samples(config.prompts, config.n_generation, request.seed, request.iteration or 0)
    model = load_model(config.model, ("transformer", "vae"), context.ranks.device)
    source = request.one("policy")
    policy.load_policy(model.transformer, config.lora, source, reference=False)
    conditioning = embed.read(request.one("embeddings"), [*(p.id for p in config.prompts), embed.NEGATIVE])
    kernel = KERNELS[config.solver](schedule_of(model.scheduler, config.num_steps))
    generate = _Generator(config, model, conditioning, kernel, source.content)
    return write_samples(context, samples, generate, samples_per_shard=config.samples_per_shard, tile=config.batch_size)


class _Generator:
    """Turns planned samples into files, one forward batch at a time."""

    def __init__(
        self,
        config: contracts.Rollout,
        model: Model,
        conditioning: dict[str, Conditioning],
        kernel: Kernel,
        policy_digest: str,
    ) -> None:
        self.config = config
        self.model = model
        self.conditioning = conditioning
        self.kernel = kernel
        self.facts = {"policy": policy_digest, "sigmas": list(kernel.sigmas)}
        self.shape = model.latent_shape(config.media.size, config.media.frames)
        self.device = next(model.transformer.parameters()).device

    def __call__(self, plans: list[SamplePlan]) -> dict[str, bytes]:
        latents = self._latents(plans)
        with torch.no_grad():
            pixels = self.model.decode(latents).cpu().numpy()
        files: dict[str, bytes] = {}
        for plan, x_0, picture in zip(plans, latents.cpu(), pixels, strict=True):
            files |= sample_files(plan, picture, to_bytes({"latents": x_0}), self.facts)
        return files

    def _latents(self, plans: list[SamplePlan]) -> Tensor:
        noise = torch.stack(
            [torch.from_numpy(seeds.normal(self.shape, plan.seed, "initial noise", 0)) for plan in plans]
        )
        conditioning = stack([self.conditioning[plan.prompt.id] for plan in plans], self.device)
        scale = self.config.guidance_scale
        negative = stack([self.conditioning[embed.NEGATIVE]] * len(plans), self.device) if scale != 1 else None

        def velocity(x: Tensor, t: Tensor) -> Tensor:
            return guided_velocity(self.model, x, t, conditioning, negative, scale)

        return sample(velocity, noise.to(self.device), self.kernel).latents
