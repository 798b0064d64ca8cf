"""What all model plugins share: parts of a stock pipeline, and sizes and noise levels as its files say."""

from abc import ABC, abstractmethod
from typing import Any

import torch
import torch.distributed as dist
from diffusers import DiffusionPipeline
from torch import Tensor, nn

from cosmos_rl_core.models import _loading
from cosmos_rl_core.models._base import Conditioning
from cosmos_rl_core.parallel.precision import keep_float32
from cosmos_rl_core.pipelines import directories, sizes
from cosmos_rl_core.sampling.schedule import Schedule, schedule_of


class Adapter(ABC):
    """Most of a :class:`cosmos_rl_core.models._base.Model`; what it makes of a prompt, latents and velocities are the
    plugin's."""

    negative_prompt = ""
    embedded_guidance_scale: float = 1.0

    def __init__(self, pipeline: DiffusionPipeline, path: str, device: torch.device) -> None:
        self._pipeline: Any = pipeline
        self._path, self._device = path, device
        self._transformer_config = directories.settings(path, "transformer")
        self.scheduler = self._pipeline.scheduler
        if self._pipeline.transformer is not None:
            keep_float32(self._pipeline.transformer)

    @property
    def transformer(self) -> nn.Module:
        """The denoiser."""
        return _loading.require(self._pipeline.transformer, "transformer")

    @property
    def _vae(self) -> Any:
        return _loading.require(self._pipeline.vae, "vae")

    @torch.no_grad()
    def encode_prompts(self, prompts: list[str], max_prompt_length: int) -> list[Conditioning]:
        """Encode one by one; on the CPU. Raises :class:`ConfigError` for more tokens than the stock pipeline takes."""
        _loading.require(self._pipeline.text_encoder, "text")
        sizes.check_prompt_length(self._path, max_prompt_length)
        return [self._encode_prompt(prompt, max_prompt_length) for prompt in prompts]

    def encode_negative(self, prompt: str, max_prompt_length: int) -> Conditioning:
        """Like any prompt."""
        (encoded,) = self.encode_prompts([prompt], max_prompt_length)
        return encoded

    @abstractmethod
    def _encode_prompt(self, prompt: str, max_prompt_length: int) -> Conditioning:
        """Embeddings, and masks where the transformer takes some, by name; no batch."""

    def latent_shape(self, size: tuple[int, int], frames: int) -> tuple[int, ...]:
        """``[C, H, W]`` of images, ``[C, T, H, W]`` of videos, as a plan reckons."""
        channels, *shape = _loading.require(sizes.latent_shape(self._path, size, frames), "vae")
        return (channels, *shape) if sizes.makes_videos(self._path) else (channels, *shape[1:])

    def guide(self, conditional: Tensor, unconditional: Tensor, guidance_scale: float) -> Tensor:
        """Return ``unconditional + guidance_scale (conditional - unconditional)``."""
        return unconditional + guidance_scale * (conditional - unconditional)

    def split_sequence(self, group: dist.ProcessGroup) -> None:
        """Raise ``NotImplementedError``: a model whose spec has ``context_parallel`` overrides this."""
        raise NotImplementedError(f"{type(self).__name__} has no context parallelism")

    def schedule(self, num_steps: int, size: tuple[int, int], frames: int) -> Schedule:
        """Return the noise levels of the pipeline's own scheduler, told the number of tokens if stock tells it."""
        spec = directories.spec(self._path)
        tokens = None if spec.max_shift is None else sizes.num_tokens(self._path, size, frames)
        sigmas = spec.stock_sigmas(num_steps, self.scheduler.config)
        return schedule_of(
            self.scheduler,
            num_steps,
            tokens,
            max_shift=spec.max_shift,
            always_shifts=spec.always_shifts,
            sigmas=sigmas,
        )
