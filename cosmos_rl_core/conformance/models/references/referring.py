"""Model plugins whose prompts have references, and the stock pipelines that take them."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import diffusers
import numpy as np
import torch
from PIL import Image
from torch import Tensor

from cosmos_rl_core import plugins, seeds
from cosmos_rl_core.config.policy import SolverConfig
from cosmos_rl_core.conformance.models import families, tiny_pipelines
from cosmos_rl_core.conformance.models.families import CPU, PICTURES, SIZE, Family
from cosmos_rl_core.errors import ConfigError
from cosmos_rl_core.models import _loading
from cosmos_rl_core.models._base import guided_velocity
from cosmos_rl_core.models._conditioning import Conditioning, generated, stack
from cosmos_rl_core.models._packing import pack, unpack
from cosmos_rl_core.pipelines import directories, guidance
from cosmos_rl_core.pipelines.spec import CONDITIONAL_LATENTS, References
from cosmos_rl_core.sampling.rollout import sample
from cosmos_rl_core.sampling.solvers import kernel_of

ABLE = [name for name in plugins.known("models") if plugins.load("models", name).SPEC.references]


@dataclass(frozen=True)
class Referring:
    """A family, and the stock pipeline of the same directory that takes references."""

    family: Family
    stock: Any
    frames: int
    """Frames of the generated media."""

    @property
    def references(self) -> References:
        """Return the part of the spec on references: how many the pipeline takes, and in which form."""
        found = directories.spec(self.family.folder).references
        assert found is not None
        return found

    @property
    def most(self) -> int:
        """Return the most references of a prompt that are tested."""
        return max(min(self.references.most, len(PICTURES)), self.fewest)

    @property
    def fewest(self) -> int:
        """Return the fewest references of a prompt."""
        return self.references.fewest

    def noise(self, size: tuple[int, int]) -> Tensor:
        """Return noise of a medium, in a batch of one."""
        shape = self.family.model.latent_shape(size, self.frames)
        return torch.from_numpy(seeds.normal(shape, "references"))[None].to(self.family.device)

    def encoded(self, prompt: str, pictures: Sequence[np.ndarray], size: tuple[int, int] = SIZE) -> Conditioning:
        """Return the conditioning of a prompt, unbatched."""
        return self.family.model.encode_with(prompt, pictures, self.family.length, size, self.frames)

    def negative(self, pictures: Sequence[np.ndarray]) -> Conditioning:
        """Return the conditioning of the model's negative prompt, unbatched."""
        model = self.family.model
        if self.references.read_with_text:
            return model.encode_negative_with(model.negative_prompt, pictures, self.family.length)
        return model.encode_negative(model.negative_prompt, self.family.length)

    def sample(
        self, prompt: str, pictures: Sequence[np.ndarray], size: tuple[int, int], scale: float, steps: int
    ) -> Tensor:
        """Return the latents of our Euler solver on the stock scheduler's noise levels."""
        model, frames = self.family.model, self.frames
        conditioning, negative = (
            stack([one], self.family.device) for one in (self.encoded(prompt, pictures, size), self.negative(pictures))
        )
        with mock.patch.object(model, "scheduler", self.stock.scheduler):
            taken = kernel_of(
                SolverConfig(solver="euler", num_steps=steps), lambda: model.schedule(steps, size, frames)
            )

        def velocity(x: Tensor, t: Tensor) -> Tensor:
            return guided_velocity(model, x, t, conditioning, negative, scale)

        given = conditioning.get(CONDITIONAL_LATENTS)
        return sample(velocity, self.noise(size), taken, mask=generated(conditioning), given=given).latents

    def run_stock(
        self, prompt: str, pictures: Sequence[np.ndarray], size: tuple[int, int], guidance_scale: float, num_steps: int
    ) -> Tensor:
        """Return the latents of the stock pipeline; without pictures, of the stock pipeline that takes texts alone."""
        family, spec = self.family, directories.spec(self.family.folder)
        stock = self.stock if pictures else family.stock
        given = guidance.stock_arguments(spec, guidance_scale, None, None, 1)
        given |= _loading.stock_arguments(stock, size, self.frames)
        images = [Image.fromarray(frame) for picture in pictures for frame in picture]
        if images:
            given[self.references.argument] = images if self.references.takes_list else images[0]
            given |= self.references.with_argument(len(pictures[0]))
        noise = self.noise(size)
        packed = spec.packing > 1
        made = stock(
            prompt=[prompt],
            latents=pack(noise) if packed else noise.clone(),
            num_inference_steps=num_steps,
            max_sequence_length=family.length,
            output_type="latent",
            return_dict=False,
            **given,
        )[0]
        of_output = families.of_tiny(family.name, "latents_of")
        return unpack(made, *noise.shape[2:]) if packed else of_output(stock, made) if of_output else made


def load_referring(name: str, root: Path, device: torch.device = CPU, **options: Any) -> Referring:
    """Write the tiny pipeline of a model plugin that takes references below ``root`` and load it.

    Raises :class:`ConfigError` if that pipeline takes none.
    """
    options = tiny_pipelines.with_references(name) | options
    folder = str(tiny_pipelines.save(name, root / name, **options))
    if (found := directories.spec(folder).references) is None:
        raise ConfigError(
            f"{tiny_pipelines.path_of(name)}: save wrote a pipeline for which references.when of the spec is false; "
            f"assign the arguments with which it takes references: {tiny_pipelines.OPTIONS} = {{...}}"
        )
    family = families.load_family(name, folder, device)
    stock = family.stock
    if found.pipeline_class != type(stock).__name__:
        stock = getattr(diffusers, found.pipeline_class).from_pretrained(folder, local_files_only=True)
        stock.register_modules(**{part: module for part, module in family.stock.components.items() if module})
        stock.set_progress_bar_config(disable=True)
    return Referring(family, stock, family.frames)
