"""Micro-batches of an update. Every draw depends on the sample, the pass and the noise level, never on the batch.

Threads in the background read the stored tensors and make the micro-batches on the CPU.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import repeat
from typing import Any

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from cosmos_rl_core import seeds
from cosmos_rl_core.algorithms._base import Batch, Transitions
from cosmos_rl_core.algorithms._needs import DataTerm
from cosmos_rl_core.config.policy import TimeDensity
from cosmos_rl_core.errors import ArtifactError
from cosmos_rl_core.models._conditioning import Conditioning, Entries, generated, given_frames, stack
from cosmos_rl_core.sampling.kernel import Kernel
from cosmos_rl_core.sampling.rollout import table_of
from cosmos_rl_core.sampling.schedule import Schedule
from cosmos_rl_core.training.noise_levels import DrawKey, random_times, sft_time, training_noise
from stages import contracts
from stages.artifacts.request import Request
from stages.execution.context import Context, Ranks
from stages.formats.embeddings import EMPTY, NEGATIVE, Embeddings
from stages.formats.latents import Latents
from stages.formats.sample_tensors import SampleTensors
from stages.formats.samples import place_of
from stages.training.given import NUM_GIVEN, own_frames
from stages.training.trainer import CPU, MicroBatch, repeated

Draw = Callable[[list[str], int, Sequence[int], float], MicroBatch]
"""Function of sample keys, the pass, the places of their noise levels or recorded steps, and a weight.

It returns a micro-batch whose rows are all levels of the first sample, then all of the next sample.
"""


@dataclass(frozen=True)
class Stored:
    """The samples of the rollouts that are trained on: tensors, prompt and advantage by sample key."""

    tensors: SampleTensors
    """Stored tensors, each read when it is drawn, by the rank that draws it."""
    prompt_ids: dict[str, str]
    advantages: dict[str, float]
    conditioning: Embeddings
    behaviours: list[str]
    """The names of the weights that made each rollout, in the order of the rollouts."""
    guidance_scale: float

    @classmethod
    def read(
        cls, request: Request, table: pd.DataFrame, behaviours: list[str], context: Context[Ranks] | None = None
    ) -> "Stored":
        """Return the samples that ``table`` (``key, prompt_id, advantage, used``) marks as used.

        The ranks of a ``context`` share the first reading of the samples; with it the call is collective. Raises
        :class:`ArtifactError` if the rollouts lack a sample.
        """
        used = table[table["used"]]
        guidance_scale = request.settings(contracts.Update).sample.guidance_scale
        prompt_ids = dict(zip(used["key"], used["prompt_id"], strict=True))
        tensors = SampleTensors(request.inputs["rollouts"], prompt_ids, context=context)
        conditioning = Embeddings(request.inputs["embeddings"], [*prompt_ids.values(), NEGATIVE])
        advantages = dict(zip(used["key"], used["advantage"], strict=True))
        return cls(tensors, prompt_ids, advantages, conditioning, behaviours, guidance_scale)

    def micro_batch(
        self, ids: list[str], batch: Batch | Transitions, conditioning: Conditioning, weight: float, **named: Any
    ) -> MicroBatch:
        """Return the micro-batch of samples of one rollout, with its guidance and the name of its weights."""
        (place,) = {place_of(key)[0] for key in ids}
        negative = None
        if self.guidance_scale != 1:
            negative = stack(self.conditioning.negatives([self.prompt_ids[one] for one in ids]), CPU)
        guidance = {"negative": negative, "guidance_scale": self.guidance_scale}
        return MicroBatch(batch, conditioning, weight, behaviour=self.behaviours[place], **guidance, **named)

    def stack(self, ids: Sequence[str], names: Iterable[str]) -> Tensor:
        """Return one stored tensor of each sample, ``[B, ...]``; ``names`` has the tensor's name for each sample."""
        found = [self.tensors[sample_id][name] for sample_id, name in zip(ids, names, strict=False)]
        return torch.stack(found)

    def condition(self, ids: list[str]) -> Conditioning:
        """Return the samples' conditioning, batched, with the frames that their rollouts were given."""
        own = [self.conditioning[self.prompt_ids[sample_id]] | self._given(sample_id) for sample_id in ids]
        return stack(own, CPU)

    def _given(self, sample_id: str) -> Entries:
        """Return the given frames of a sample, which are the first frames of its own latents."""
        count = self.tensors.row(sample_id).get(NUM_GIVEN)
        if count is None:
            return {}
        latents = self.tensors[sample_id]["latents"]
        return given_frames(latents[:, :count], latents.shape[1])

    def advantages_of(self, ids: list[str]) -> Tensor:
        """Return the advantages ``[B]``, float32."""
        return torch.tensor([self.advantages[i] for i in ids], dtype=torch.float32, device=CPU)


@dataclass(frozen=True)
class LatentDraws:
    """Final latents at random noise levels of the rollout's grid, with the rollout's guidance.

    The members of a pair share noise levels, noise and dropout, which both ids decide together. They also share the row
    of conditioning, because they have one prompt.
    """

    stored: Stored
    key: tuple[int, int]
    """Run seed and iteration."""
    sigmas: tuple[float, ...]
    num_times: int
    members: int = 1
    """Number of consecutive samples that are drawn together: 2 for pairs, the winner first."""

    def __call__(self, ids: list[str], epoch: int, places: Sequence[int], weight: float) -> MicroBatch:
        first, levels = ids[:: self.members], len(places)
        units = zip(*(ids[member :: self.members] for member in range(self.members)), strict=True)
        keys = [DrawKey(*self.key, epoch, " ".join(unit)) for unit in units]
        drawn = [random_times(self.sigmas, self.num_times, key) for key in keys]
        rows = [(key, place) for key in keys for place in places]
        stored = self.stored.stack(ids, repeat("latents"))
        x_0 = repeated(stored.unflatten(0, (-1, self.members)), levels).flatten(0, 1)
        noise = torch.stack([training_noise(tuple(x_0.shape[1:]), *row) for row in rows])
        times = [of_unit[place] for of_unit in drawn for place in places]
        t = torch.tensor(times, dtype=torch.float32, device=CPU)
        conditioning, advantages = self.stored.condition(first), self._advantages(first, levels)
        levels *= self.members
        noise, t = repeated(noise, self.members), repeated(t, self.members)
        batch = Batch(x_0, noise, t, advantages, _mask(conditioning, levels))
        dropout_keys = tuple((*key, place) for key, place in rows for _ in range(self.members))
        return self.stored.micro_batch(first, batch, conditioning, weight, levels=levels, keys=dropout_keys)

    def _advantages(self, first: list[str], levels: int) -> Tensor:
        """Return the advantage of each row: the sample's own, or 1 for the winner of a pair and -1 for the loser."""
        if self.members == 1:
            return repeated(self.stored.advantages_of(first), levels)
        return torch.tensor([1.0, -1.0], dtype=torch.float32, device=CPU).repeat(len(first) * levels)


@dataclass(frozen=True)
class TransitionDraws:
    """Recorded steps of the sampler, with the density that they were drawn from."""

    stored: Stored
    kernel: Kernel

    def __call__(self, ids: list[str], epoch: int, places: Sequence[int], weight: float) -> MicroBatch:
        levels = len(places)
        names, steps = zip(*((one, self.step(one, place)) for one in ids for place in places), strict=True)
        at = table_of(self.kernel, CPU).at(torch.tensor(steps, device=CPU))
        x = self.stored.stack(names, (f"state.{step}" for step in steps))
        conditioning = self.stored.condition(ids)
        batch = Transitions(
            x=x,
            x_next=self.stored.stack(names, (f"state.{step + 1}" for step in steps)),
            history=self._history(names, steps, x),
            at=at,
            log_prob=self.stored.stack(ids, repeat("log_prob"))[:, [*places]].flatten(),
            advantages=repeated(self.stored.advantages_of(ids), levels),
            mask=_mask(conditioning, levels),
        )
        return self.stored.micro_batch(ids, batch, conditioning, weight, levels=levels, names=names, steps=steps)

    def step(self, sample_id: str, place: int) -> int:
        """Return the ``place``-th recorded step of a sample.

        Raises :class:`ArtifactError` for a step without noise, which has no log-probability. The check is here, where
        the steps are still on the host, so that no forward pass waits for it.
        """
        step = int(self.stored.tensors[sample_id]["steps"][place])
        if step not in self.kernel.trainable:
            expected = ", ".join(map(str, self.kernel.trainable)) or "none"
            raise ArtifactError(
                f"sample {place_of(sample_id)[1]} was recorded at step {step}, which has no noise with this sampler, "
                f"so it has no log-probability; expected one of the steps with noise: {expected}. Make the rollout "
                "again with the sampler of this recipe"
            )
        return step

    def initial_noise(self, sample_id: str) -> Tensor:
        """Draw the initial noise of the sample's rollout again: float32, on the CPU."""
        shape = tuple(self.stored.tensors[sample_id]["latents"].shape)
        noise_seed = self.stored.tensors.row(sample_id)["noise_seed"]
        return torch.from_numpy(seeds.normal(shape, noise_seed, "initial noise", 0))

    def _history(self, ids: Sequence[str], steps: Sequence[int], x: Tensor) -> Tensor:
        """Return the stored history of each step, ``[B, ...]``; zeros for a step that does not look back."""
        zero = torch.zeros(x.shape[1:], dtype=x.dtype, device=CPU)
        found = [self.stored.tensors[i].get(f"history.{step}", zero) for i, step in zip(ids, steps, strict=True)]
        return torch.stack(found)


class DataDraws:
    """Prepared media for the diffusion loss added to each trained step: per sample one item, of its prompt if it has
    any.

    Either the noise level is the trained step's and the noise is the rollout's initial noise, or both are drawn as in
    supervised training. Each
    rank reads the latents and captions of its own draws.
    """

    def __init__(
        self, request: Request, term: DataTerm, density: TimeDensity, steps: TransitionDraws, fine: Schedule
    ) -> None:
        self.term, self.density, self.steps, self.fine = term, density, steps, fine
        self.key = (request.seed, request.iteration or 0)
        self.embedded_guidance_scale = request.settings(contracts.Update).model.supervised_guidance_scale
        self.latents = Latents.of(request)
        self.conditioning = Embeddings(request.inputs["embeddings"], [*self.latents.prompt_ids, EMPTY])

    @property
    def num_times(self) -> int | None:
        """Return how many of a sample's trained steps have a diffusion loss; None for all."""
        return 1 if self.term.on_first_only else None

    def __call__(self, ids: list[str], epoch: int, places: Sequence[int], weight: float) -> MicroBatch:
        # Each row has an item of its own, so rows share no conditioning.
        rows = [(sample_id, epoch, place) for sample_id in ids for place in places]
        items, levels = [self._item(*row) for row in rows], [self._noised(*row) for row in rows]
        keys = [self._key(*row) for row in rows]
        x_0 = [self.latents.trained(item, key) for (item, _), key in zip(items, keys, strict=True)]
        own = [
            (self.conditioning.without_text(prompt_id) if self._drop(*row) else self.conditioning[prompt_id])
            | own_frames(latents, self.term.given_frames, self._generator("data given frames", *row))
            for row, latents, (_, prompt_id) in zip(rows, x_0, items, strict=True)
        ]
        conditioning = stack(own, CPU)
        batch = Batch(
            x_0=torch.stack(x_0),
            noise=torch.stack([noise for _, noise in levels]),
            t=torch.tensor([t for t, _ in levels], dtype=torch.float32, device=CPU),
            advantages=None,
            mask=generated(conditioning),
        )
        return MicroBatch(batch, conditioning, weight, embedded_guidance_scale=self.embedded_guidance_scale)

    def _item(self, sample_id: str, epoch: int, place: int) -> tuple[str, str]:
        generator = self._generator("data item", sample_id, epoch, place)
        return self.latents.choose(self.steps.stored.prompt_ids[sample_id], generator)

    def _noised(self, sample_id: str, epoch: int, place: int) -> tuple[float, Tensor]:
        """Return noise level and noise of a drawn item."""
        if self.term.as_rollout:
            return self.steps.kernel.steps[self.steps.step(sample_id, place)].t, self.steps.initial_noise(sample_id)
        key = self._key(sample_id, epoch, place)
        shape = tuple(self.steps.stored.tensors[sample_id]["latents"].shape)
        return sft_time(self.fine.sigmas, self.density, key), training_noise(shape, key, 0)

    def _key(self, sample_id: str, epoch: int, place: int) -> DrawKey:
        return DrawKey(*self.key, epoch, f"{sample_id}/{place}")

    def _drop(self, sample_id: str, epoch: int, place: int) -> bool:
        return self._generator("text dropout", sample_id, epoch, place).random() < self.term.text_dropout

    def _generator(self, purpose: str, sample_id: str, epoch: int, place: int) -> np.random.Generator:
        return seeds.generator(purpose, *self.key, epoch, sample_id, place)


def _mask(conditioning: Conditioning, levels: int) -> Tensor | None:
    mask = generated(conditioning)
    return None if mask is None else repeated(mask, levels)
