"""Samples of the behaviour policy: latents by our own solver, decoded to the pixels that rewards see."""

from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from cosmos_rl_core import seeds
from cosmos_rl_core.models._base import guided_velocity
from cosmos_rl_core.models._conditioning import Conditioning, generated, stack
from cosmos_rl_core.parallel.distributed import Group
from cosmos_rl_core.parallel.precision import computes_in
from cosmos_rl_core.pipelines.spec import CONDITIONAL_LATENTS
from cosmos_rl_core.sampling.rollout import Trajectory, sample
from cosmos_rl_core.sampling.solvers import kernel_of
from cosmos_rl_core.weights.policy_weights import to_bytes
from stages import contracts
from stages.artifacts.request import Request
from stages.execution.context import Context
from stages.formats.embeddings import NEGATIVE, Embeddings
from stages.generating.decoding import decode_finite, decodes_in
from stages.generating.encoding import Encoding, with_media, without_media
from stages.generating.plans import SamplePlan, grid_facts, is_decoded, planned, recorded_steps, vae_batches
from stages.generating.units import write_samples
from stages.training.given import GivenMedia
from stages.training.loading import load_policy


def run(request: Request, context: Context[Group]) -> dict[str, Any]:
    """Write units of samples with their tensors; units that an earlier attempt finished are adopted."""
    config = request.settings(contracts.Rollout)
    return write_samples(context, config, planned(request), _Generator(request, config, context), tensors=True)


class _Generator:
    """A generator of planned samples, one forward batch at a time."""

    def __init__(self, request: Request, config: contracts.Rollout, context: Context[Group]) -> None:
        self.config, policy, self.device = config, request.one("policy"), context.ranks.device
        components = ("vae", *config.model.guardrail)
        self.model, _ = load_policy(
            request, config, components=components, context=context, reference=False, merged=not config.train_on
        )
        size, num_steps = (config.media.size, config.media.frames), config.sample.num_steps
        self.shape = self.model.latent_shape(*size)
        self.kernel = kernel_of(config.sample, lambda: self.model.schedule(num_steps, *size))
        prompt_ids = [prompt.id for prompt in config.prompts]
        self.conditioning = Embeddings(request.inputs["embeddings"], [*prompt_ids, NEGATIVE])
        self.given = GivenMedia.of(request)
        self.recorded = {i: recorded_steps(request, self.kernel, i) for i in prompt_ids}
        facts = {"policy": policy.content} | grid_facts(self.kernel)
        self.facts = {i: facts | {"trained_steps": list(self.recorded[i])} for i in prompt_ids}
        """Columns of the index, by prompt id, that are equal for all samples of a prompt and do not name it."""

    def encodings(self, plans: list[SamplePlan], sampled: Trajectory) -> list[Encoding]:
        """Decode the pixels of samples, and return for each the function that encodes it."""
        recorded = [self.recorded[plan.prompt.id] for plan in plans]
        stored = [_stored(sampled, place, steps) for place, steps in enumerate(recorded)]
        finite = [all(bool(t.isfinite().all()) for t in tensors.values()) for tensors in stored]
        chosen = [place for place, plan in enumerate(plans) if is_decoded(plan, self.config.decoding.share)]
        pictures = self._pictures(sampled.latents, chosen, finite)
        found: list[Encoding] = []
        for place, (plan, tensors) in enumerate(zip(plans, stored, strict=True)):
            prompt_id = plan.prompt.id
            facts = self.facts[prompt_id] | (self.given.facts(prompt_id) if self.given else {})
            if place not in pictures:
                found.append(partial(without_media, plan, to_bytes(tensors), facts, is_finite=finite[place]))
                continue
            picture = pictures[place]
            shown = None if picture is None else self.model.screen(picture)
            refused = picture is not None and shown is None
            kept = to_bytes(_emptied(tensors) if refused else tensors)
            found.append(partial(with_media, plan, shown, kept, facts, refused=refused))
        return found

    def _pictures(self, latents: Tensor, chosen: list[int], finite: list[bool]) -> dict[int, np.ndarray | None]:
        """Return the pixels of the samples at the places ``chosen``, by place; None for a sample that is not finite."""
        pictures: list[np.ndarray | None] = []
        kept, are_finite = latents[chosen], [finite[place] for place in chosen]
        with decodes_in(self.config.decoding, self.device):
            for part in vae_batches(len(chosen), self.config.media):
                pictures += decode_finite(self.model, kept[part], are_finite[part])
        return dict(zip(chosen, pictures, strict=True))

    def sample(self, plans: list[SamplePlan]) -> Trajectory:
        """Run the solver for these samples. Nothing else here needs the transformer."""
        conditioning = stack([self._condition(plan.prompt.id) for plan in plans], self.device)
        scale, negative = self.config.sample.guidance_scale, None
        if scale != 1:
            negative = stack(self.conditioning.negatives([plan.prompt.id for plan in plans]), self.device)

        def velocity(x_t: Tensor, t: Tensor) -> Tensor:
            with computes_in(self.config.param_dtype, self.device):
                return guided_velocity(self.model, x_t, t, conditioning, negative, scale)

        def draw(index: int) -> Tensor:
            return self._normal([plan.seed for plan in plans], "transition noise", index)

        noise = self._normal([plan.noise_seed for plan in plans], "initial noise", 0)
        record = {step for plan in plans for step in self.recorded[plan.prompt.id]}
        return sample(
            velocity,
            noise,
            self.kernel,
            draw=draw,
            record=record,
            mask=generated(conditioning),
            given=conditioning.get(CONDITIONAL_LATENTS),
        )

    def _condition(self, prompt_id: str) -> Conditioning:
        """Return a sample's conditioning: its prompt's embeddings, and its video's given frames, if any."""
        given = {} if self.given is None else self.given.entries(prompt_id)
        return self.conditioning[prompt_id] | given

    def _normal(self, keys: list[int], purpose: str, index: int) -> Tensor:
        draws = [torch.from_numpy(seeds.normal(self.shape, key, purpose, index)) for key in keys]
        return torch.stack(draws).to(self.device)


def _emptied(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors of a refused sample, with zeros in every tensor that pictures could be decoded from."""
    return {name: torch.zeros_like(t) if t.is_floating_point() else t for name, t in tensors.items()}


def _stored(trajectory: Trajectory, place: int, steps: tuple[int, ...]) -> dict[str, Tensor]:
    """Return the tensors that training needs of one sample.

    These are ``latents``, and for recorded steps ``steps`` [S], ``log_prob`` [S], ``state.<i>`` before and after each,
    and ``history.<i>`` if the solver looks back.
    """
    # A copy, because the final latents share memory with the last state, and the tensors of one file must not.
    tensors = {"latents": trajectory.latents[place].cpu().clone()}
    if not steps:
        return tensors
    tensors["steps"] = torch.tensor(steps, dtype=torch.int64, device="cpu")
    tensors["log_prob"] = torch.stack([trajectory.log_prob[i][place] for i in steps]).cpu()
    states, history = trajectory.states, trajectory.history
    around = {*steps, *(step + 1 for step in steps)}
    tensors |= {f"state.{i}": states[i][place].cpu() for i in around}
    return tensors | {f"history.{i}": history[i][place].cpu() for i in steps if i in history}
