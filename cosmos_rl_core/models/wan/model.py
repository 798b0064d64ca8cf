"""Wan as a velocity field."""

import math
from collections.abc import Sequence
from functools import cached_property

import numpy as np
import torch
from diffusers import WanPipeline
from torch import Tensor

from cosmos_rl_core.models._conditioning import Conditioning, Entries
from cosmos_rl_core.models._wan import WanModel
from cosmos_rl_core.pipelines import directories, sizes
from cosmos_rl_core.pipelines.spec import CONDITIONAL_LATENTS, CONDITIONAL_MASK


class Wan(WanModel):
    """Wan 2.1, and the 5B model of Wan 2.2, whose transformer takes a time for each token.

    Conditioning: ``prompt_embeds``, zero after the last token; and given frames if Wan 2.2 gets references.
    """

    stock_class = WanPipeline

    @cached_property
    def _times_by_token(self) -> bool:
        """Return whether the pipeline repeats the time for each token."""
        return bool(directories.read_json(self._path, directories.INDEX).get("expand_timesteps"))

    def _encode_references(self, references: Sequence[np.ndarray], size: tuple[int, int], frames: int) -> Entries:
        return self._encode_first_frames(references, size, frames)

    def velocity(self, x_t: Tensor, t: Tensor, conditioning: Conditioning) -> Tensor:
        """Predict the velocity; the transformer gets ``1000 t`` in float32, never rounded.

        Wan 2.2 gets it for each token, with 0 at given frames.
        """
        time = (t * self.scheduler.config.num_train_timesteps).to(torch.float32)
        given = conditioning.get(CONDITIONAL_MASK)
        if given is not None:
            x_t = x_t.where(given == 0, conditioning[CONDITIONAL_LATENTS])
        velocity = self.transformer(
            hidden_states=x_t,
            timestep=self._of_tokens(time, x_t, given) if self._times_by_token else time,
            encoder_hidden_states=conditioning["prompt_embeds"],
            return_dict=False,
        )[0].float()
        return velocity if given is None else velocity * (1 - given)

    def _of_tokens(self, time: Tensor, x_t: Tensor, given: Tensor | None) -> Tensor:
        """Return the time ``[B]`` of each token of ``x_t``, ``[B, S]``: 0 at given latent frames."""
        patch = sizes.patch_shape(self._path)
        frames, *sides = (length // side for length, side in zip(x_t.shape[2:], patch, strict=True))
        by_frame = time[:, None].expand(-1, frames)
        if given is not None:
            by_frame = by_frame * (1 - given[:, 0, :: patch[0], 0, 0])
        return by_frame[..., None].expand(-1, -1, math.prod(sides)).flatten(1)


load = Wan
