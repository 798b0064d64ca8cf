"""The interface of a model plugin: a family of stock pipelines as a velocity field on latents.

One convention everywhere: ``t`` in [0, 1], ``x_t = (1 - t) x_0 + t noise``, ``velocity = noise - x_0``. t and sigma are
the same number and never in a half type. Only plugins scale timesteps, pack tokens, mask texts and normalise latents.

A plugin is a folder with two modules.

- ``__init__.py`` assigns a :class:`cosmos_rl_core.pipelines.spec.ModelSpec` to ``SPEC``. Plans import it, so it imports
  no torch.
- ``model.py`` defines a subclass of :class:`Model` and ``load``, which is that class, or a function with the same
  arguments that returns one. If ``from_pretrained`` cannot load the stock pipeline by itself, ``model.py`` also has a
  function ``load_stock(path, guardrail, device, transformer)``. It returns the stock pipeline, with ``transformer``
  instead of the directory's own unless that is None.
"""

from abc import abstractmethod
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from diffusers import DiffusionPipeline
from torch import Tensor, nn

from cosmos_rl_core.errors import ConfigError
from cosmos_rl_core.models import _loading
from cosmos_rl_core.models._conditioning import Conditioning
from cosmos_rl_core.models._encoder import Encoder
from cosmos_rl_core.parallel.precision import keep_float32
from cosmos_rl_core.pipelines import checkpoints, directories, sizes
from cosmos_rl_core.pipelines.spec import Levels
from cosmos_rl_core.sampling.schedule import Schedule, schedule_of


class Model(Encoder):
    """A loaded pipeline, or the parts of it that a stage needs. Every model plugin has a subclass.

    A subclass sets ``stock_class`` and defines ``_encode_prompt``, ``encode_media``, ``decode`` and ``velocity``.
    :class:`cosmos_rl_core.models._media.ImageModel` and :class:`cosmos_rl_core.models._media.VideoModel` define
    ``encode_media`` and ``decode`` for the VAEs of diffusers. A subclass whose spec has ``context_parallel`` also
    defines ``split_sequence``. Everything else follows from the pipeline's files and the spec; override what differs.

    A subclass uses ``self.transformer``, ``self._vae``, ``self.pipeline`` (the stock pipeline, None in the place of
    parts that were not loaded), ``self._transformer_config`` (settings), ``self._path`` and ``self._device``.
    """

    stock_class: type[DiffusionPipeline]
    """The pipeline's class in diffusers."""
    scheduler: Any
    """The pipeline's own diffusers scheduler: the source of the noise schedule."""
    negative_prompt: str = ""
    """Text that guidance steers away from if a recipe sets none: the default of the stock pipeline."""
    embedded_guidance_scale: float = 1.0
    """Guidance that the transformer takes as an input, if it has one. Set it before ``velocity``."""

    def __init__(self, path: str, components: tuple[str, ...], device: torch.device) -> None:
        """Load ``components`` of the pipeline directory ``path``: float32, frozen, in eval mode.

        ``components`` are names such as ``COMPONENTS`` in :mod:`cosmos_rl_core.models._loading`. Raises
        :class:`ConfigError` for a pipeline that the spec does not allow.
        """
        checkpoints.check(path)
        self._path, self._device = path, device
        self.pipeline: Any = self._load_pipeline(components)
        self._transformer_config = directories.settings(path, "transformer")
        self.scheduler = self.pipeline.scheduler
        if self.pipeline.transformer is not None:
            keep_float32(self.pipeline.transformer)

    def _load_pipeline(self, components: tuple[str, ...]) -> Any:
        """Return the stock pipeline with these components loaded; every other component is None."""
        return _loading.load_pipeline(self.stock_class, self._path, components, self._device)

    @property
    def transformer(self) -> nn.Module:
        """Return the denoiser."""
        return self.pipeline.transformer

    @property
    def _vae(self) -> Any:
        return self.pipeline.vae

    def latent_shape(self, size: tuple[int, int], frames: int) -> tuple[int, ...]:
        """Return the shape of one sample's latents, without batch: ``[C, H, W]`` or ``[C, T, H, W]``.

        ``size`` is height and width in pixels. Raises :class:`ConfigError` for a size or a number of frames that the
        pipeline cannot make.
        """
        channels, *shape = sizes.latent_shape(self._path, size, frames)
        is_image = sizes.vae_geometry(self._path).temporal is None
        return (channels, *shape[1:]) if is_image else (channels, *shape)

    def schedule(self, num_steps: int, size: tuple[int, int], frames: int) -> Schedule:
        """Return the noise levels of ``num_steps`` steps of the pipeline's own scheduler, for media of this size.

        Raises like :func:`cosmos_rl_core.sampling.schedule.schedule_of`.
        """
        spec, shift = directories.spec(self._path), None
        if spec.shift is not None:
            shift = spec.shift(sizes.num_tokens(self._path, size, frames), num_steps, self.scheduler.config)
        return schedule_of(
            self.scheduler,
            num_steps,
            shift=shift,
            always_shifts=spec.always_shifts,
            sigmas=self._stock_sigmas(num_steps),
        )

    def _stock_sigmas(self, num_steps: int) -> Levels | None:
        """Return the levels of the spec. Override it if the stock pipeline rounds them otherwise."""
        return directories.spec(self._path).stock_sigmas(num_steps, self.scheduler.config)

    @abstractmethod
    def encode_media(self, pixels: Tensor) -> Tensor:
        """Encode uint8 RGB ``[B, frames, height, width, 3]`` to normalised float32 latents ``[B, *latent_shape]``.

        The latents are the mode of the posterior, not a draw from it.
        """

    def encode_posterior(self, pixels: Tensor) -> tuple[Tensor, Tensor]:
        """Encode pixels like :meth:`encode_media`, and return the posterior's mode and standard deviation.

        Both are normalised float32 ``[B, *latent_shape]``: ``mode + deviation * noise`` equals a draw by the stock VAE,
        shifted and scaled, up to rounding. Only for VAEs with a posterior; the spec says which VAEs have one.
        """
        raise NotImplementedError(f"{type(self).__name__} does not define encode_posterior")

    @abstractmethod
    def decode(self, latents: Tensor) -> Tensor:
        """Decode normalised latents ``[B, *latent_shape]`` to uint8 RGB ``[B, frames, height, width, 3]``.

        Raises :class:`cosmos_rl_core.models._media.NotFiniteError` if a decoded value is not finite. Give the pixels to
        :meth:`screen` before anybody sees them.
        """

    def screen(self, frames: np.ndarray) -> np.ndarray | None:
        """Give decoded frames ``[frames, height, width, 3]`` to the guardrail, and return the frames that may be shown.

        None means that the guardrail refuses them. The default returns them unchanged: most models have no guardrail.
        """
        return frames

    @abstractmethod
    def velocity(self, x_t: Tensor, t: Tensor, conditioning: Conditioning) -> Tensor:
        """Predict ``noise - x_0`` at ``x_t`` and ``t`` (float ``[B]`` in [0, 1]): float32, the shape of ``x_t``.

        ``conditioning`` is batched. If it has given frames, the result does not depend on ``x_t`` at these frames, and
        their velocity is 0. Plans call it on the meta device too, to count its operations.
        """

    def guide(self, conditional: Tensor, unconditional: Tensor, guidance_scale: float) -> Tensor:
        """Combine two velocities like the stock pipeline does at ``guidance_scale`` above 1.

        The default is ``unconditional + guidance_scale (conditional - unconditional)``.
        """
        return unconditional + guidance_scale * (conditional - unconditional)

    def unguided(self, t: Tensor) -> Tensor | None:
        """Return a bool mask ``[B]``: True where the stock pipeline does not guide at time ``t``, ``[B]``.

        None, the default, means that it guides at all times.
        """
        return None

    def split_sequence(self, group: dist.ProcessGroup) -> None:
        """Share the tokens of every forward pass among the processes of ``group``. All of them call this.

        Call it after LoRA is added. Raises ``NotImplementedError`` for a model without context parallelism.
        """
        raise NotImplementedError(f"{type(self).__name__} has no context parallelism")


def guided_velocity(
    model: Model,
    x_t: Tensor,
    t: Tensor,
    conditioning: Conditioning,
    negative: Conditioning | None,
    guidance_scale: float,
    *,
    trains_unconditional: bool = True,
) -> Tensor:
    """Return the velocity with classifier-free guidance, the shape of ``x_t``.

    At a scale of 1 there is one forward pass, and no guidance. At any other scale there are two, and ``negative`` is
    needed, even at times that ``model.unguided`` names: all ranks of a sharded model must make the same passes. Both
    passes get the shared entries of ``conditioning``. Without ``trains_unconditional`` no gradient flows through the
    unconditional prediction; the values are the same. Raises ``ValueError`` if ``negative`` is missing.
    Source: arXiv:2207.12598, in the parametrisation of diffusers, where 1 is no guidance.
    """
    conditional = _velocity(model, x_t, t, conditioning)
    if guidance_scale == 1:
        return conditional
    if negative is None:
        raise ValueError(f"guidance_scale = {guidance_scale} needs negative conditioning")
    with torch.set_grad_enabled(trains_unconditional and torch.is_grad_enabled()):
        unconditional = _velocity(model, x_t, t, conditioning.guided_by(negative))
    guided = model.guide(conditional, unconditional, guidance_scale)
    if (unguided := model.unguided(t)) is None:
        return guided
    return conditional.where(unguided.view(-1, *[1] * (x_t.ndim - 1)), guided)


def _velocity(model: Model, x_t: Tensor, t: Tensor, conditioning: Conditioning) -> Tensor:
    """Return the model's velocity. Raises :class:`ConfigError` if it has a wrong shape, or if the model changed x_t."""
    before = x_t._version
    found = model.velocity(x_t, t, conditioning)
    if found.shape != x_t.shape or x_t._version != before:
        what = f"returns {list(found.shape)} for an x_t of {list(x_t.shape)}"
        what = "changes x_t in place" if x_t._version != before else what
        where = type(model).__module__
        raise ConfigError(f"{where}: velocity() {what}; expected a new tensor of the shape of x_t")
    return found
