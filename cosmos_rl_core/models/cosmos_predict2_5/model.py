"""Cosmos-Predict2.5 as a velocity field."""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import diffusers
import torch
import torch.distributed as dist
from diffusers import AutoencoderKLWan, Cosmos2_5_PredictBasePipeline
from diffusers.models.transformers import transformer_cosmos
from diffusers.pipelines.cosmos import pipeline_cosmos2_5_predict as stock
from torch import Tensor, nn
from transformers import AutoTokenizer

from cosmos_rl_core.errors import ArtifactError, ConfigError
from cosmos_rl_core.models import _loading
from cosmos_rl_core.models._base import (
    CONDITIONAL_LATENTS,
    CONDITIONAL_MASK,
    EMPTY_TRANSFORMER,
    GUARDRAIL,
    PREFIX,
    Conditioning,
)
from cosmos_rl_core.models._video import VideoAdapter
from cosmos_rl_core.models.cosmos_predict2_5 import FROZEN_PREFIX, GUARDRAIL_PACKAGE
from cosmos_rl_core.models.cosmos_predict2_5.split import split
from cosmos_rl_core.parallel.sharding import WHOLE, load_base
from cosmos_rl_core.pipelines import checkpoints, directories

EMBEDS, PROJECTED = "prompt_embeds", "projected_prompt_embeds"
"""Names of text embeddings in a conditioning: before the frozen prefix, and after it."""
_GIVEN_T = 1e-4
"""Noise level that the transformer is told of given frames: the stock pipeline's ``conditional_frame_timestep``."""


class CosmosPredict25(VideoAdapter):
    """See :class:`cosmos_rl_core.models._base.Model`. Conditioning: ``prompt_embeds`` or, where they have been through
    the projection, ``projected_prompt_embeds``; and frames where some are given.

    Every token position counts, also padding: prompts of one run need one ``max_prompt_length``, 512 in the stock.
    """

    negative_prompt = stock.DEFAULT_NEGATIVE_PROMPT

    def __init__(self, path: str, components: tuple[str, ...], device: torch.device) -> None:
        checkpoints.check(path)
        self._guardrail = _guardrail(device) if GUARDRAIL in components else None
        self._prefix = _load_prefix(path, device) if PREFIX in components else None
        stock_parts = tuple(name for name in components if name not in (GUARDRAIL, PREFIX))
        super().__init__(_load_pipeline(path, stock_parts, device), path, device)

    def encode_prompts(self, prompts: list[str], max_prompt_length: int) -> list[Conditioning]:
        """One by one; on the CPU. ``[max_prompt_length, layers x hidden size]``, the system prompt among the tokens; or
        as they come out of the projection, if that was loaded.

        Raises :class:`ConfigError` for a prompt that the guardrail, if it was loaded, does not let pass.
        """
        self._check_prompts(prompts)
        return super().encode_prompts(prompts, max_prompt_length)

    def _encode_prompt(self, prompt: str, max_prompt_length: int) -> Conditioning:
        embeds, _ = self._pipeline.encode_prompt(
            prompt, do_classifier_free_guidance=False, max_sequence_length=max_prompt_length, device=self._device
        )
        if self._prefix is None:
            return {EMBEDS: embeds[0].cpu()}
        return {PROJECTED: self._prefix(embeds)[0].cpu()}

    def encode_negative(self, prompt: str, max_prompt_length: int) -> Conditioning:
        """Never shown to the guardrail: the stock pipeline shows it prompts alone."""
        (encoded,) = super().encode_prompts([prompt], max_prompt_length)
        return encoded

    def _check_prompts(self, prompts: list[str]) -> None:
        if self._guardrail is None:
            return
        if unsafe := [prompt for prompt in prompts if prompt and not self._guardrail.check_text_safety(prompt)]:
            raise ConfigError(f"the guardrail refuses {len(unsafe)} prompts; take them out: {', '.join(unsafe[:5])}")

    def encode_media(self, pixels: Tensor) -> Tensor:
        """``[B, frames, height, width, 3]`` to ``[B, C, T, H, W]``. Its first latent frames depend on the first frames
        alone: those given to a video are the latents of an image, or of 1 plus a multiple of 4 frames, by themselves.
        """
        return super().encode_media(pixels)

    def decode(self, latents: Tensor) -> Tensor:
        """``[B, C, T, H, W]`` to ``[B, frames, height, width, 3]``, as the guardrail, if it was loaded, lets it pass.

        Raises :class:`ArtifactError` for a video that it lets not pass at all.
        """
        return self._checked(super().decode(latents))

    def _checked(self, pixels: Tensor) -> Tensor:
        if self._guardrail is None:
            return pixels
        videos = [self._guardrail.check_video_safety(video) for video in pixels.cpu().numpy()]
        if any(video is None for video in videos):
            raise ArtifactError("the guardrail refuses a generated video; see its log, and train on other prompts")
        return torch.stack([torch.from_numpy(video) for video in videos]).to(pixels.device)

    def velocity(self, x_t: Tensor, t: Tensor, conditioning: Conditioning) -> Tensor:
        """The transformer is fed t itself, float32, for each latent frame: ``[B, 1, T, 1, 1]``, 1e-4 at given ones."""
        batch, _, frames, height, width = x_t.shape
        t = t.to(torch.float32).view(batch, 1, 1, 1, 1)
        given = conditioning.get(CONDITIONAL_MASK, x_t.new_zeros(batch, 1, frames, 1, 1))
        if CONDITIONAL_MASK in conditioning:
            x_t = x_t.where(given == 0, conditioning[CONDITIONAL_LATENTS])
        projected, scale = PROJECTED in conditioning, self._pipeline.vae_scale_factor_spatial
        with _passed_over(self.transformer, FROZEN_PREFIX) if projected else nullcontext():
            velocity = self.transformer(
                hidden_states=x_t,
                condition_mask=given.expand(-1, -1, -1, height, width),
                timestep=given * _GIVEN_T + (1 - given) * t,
                encoder_hidden_states=conditioning[PROJECTED if projected else EMBEDS],
                padding_mask=x_t.new_zeros(1, 1, height * scale, width * scale),
                return_dict=False,
            )[0].float()
        return velocity * (1 - given)

    def split_sequence(self, group: dist.ProcessGroup) -> None:
        """Share tokens as :func:`.split.split` does."""
        split(self.transformer, group)


def load(path: str, components: tuple[str, ...], device: torch.device) -> CosmosPredict25:
    """Load the named components of the pipeline directory ``path``, float32, frozen, in eval mode.

    Takes ``guardrail`` and ``prefix`` besides. Raises :class:`ConfigError` if the first is not installed, and for a
    transformer that needs torchvision without it.
    """
    return CosmosPredict25(path, components, device)


def load_stock(
    path: str, guardrail: bool, device: torch.device, transformer: nn.Module | None = None
) -> Cosmos2_5_PredictBasePipeline:
    """The whole stock pipeline, float32, read straight to ``device``; without ``guardrail``, with one that lets
    everything pass. ``transformer``, if it is given, has the place of the directory's own."""
    own = "transformer" if transformer is None else EMPTY_TRANSFORMER
    pipeline = _load_pipeline(path, (own, "vae", "text"), device, device_map=device.type)
    if transformer is not None:
        pipeline.register_modules(transformer=transformer)
    if guardrail:
        pipeline.register_modules(safety_checker=_guardrail(device))
    return pipeline


class _Unchecked:
    """Stands where the guardrail would: the stock pipeline is neither made nor run without one."""

    def to(self, *_: Any) -> None:
        """Has no weights."""

    def check_text_safety(self, _: str) -> bool:
        """Lets every prompt pass."""
        return True


@contextmanager
def _passed_over(transformer: nn.Module, name: str) -> Iterator[None]:
    """Inside, the child module ``name`` of the transformer hands on what it is given."""
    module = transformer.get_submodule(name)
    assert not any(p.requires_grad for p in module.parameters()), f"{name} is trained, and so must not be passed over"
    setattr(transformer, name, nn.Identity())
    try:
        yield
    finally:
        setattr(transformer, name, module)


def _load_prefix(path: str, device: torch.device) -> nn.Module:
    """The base's projection of texts alone, with its weights."""
    module = _loading.empty_transformer(path).get_submodule(FROZEN_PREFIX).to_empty(device=device)
    load_base(nn.ModuleDict({FROZEN_PREFIX: module}), path, WHOLE)
    return module


def _guardrail(device: torch.device) -> Any:
    directories.check_installed(GUARDRAIL_PACKAGE, 'policy.diffusers.guardrail = "required"')
    checker: Any = stock.CosmosSafetyChecker()
    checker.to(device)
    return checker


def _load_pipeline(
    path: str, components: tuple[str, ...], device: torch.device, **reading: Any
) -> Cosmos2_5_PredictBasePipeline:
    """The stock pipeline with the asked ``components`` (and the scheduler) loaded and every other one None.
    ``reading`` is how ``from_pretrained`` is to read them.

    Part by part, because ``from_pretrained`` makes a guardrail of its own, or fails where the directory names one that
    is not installed.
    """
    _loading.check_components(components)
    if {"transformer", EMPTY_TRANSFORMER} & set(components):
        _check_pads(path)
    parts: dict[str, Any] = dict.fromkeys(("transformer", "vae", "text_encoder", "tokenizer"))
    if "transformer" in components:
        parts["transformer"] = _loading.read_part(path, "transformer", **reading)
    if "vae" in components:
        parts["vae"] = _loading.read_part(path, "vae", **reading)
    if "text" in components:
        parts["text_encoder"] = _loading.read_part(path, "text_encoder", **reading)
        parts["tokenizer"] = AutoTokenizer.from_pretrained(path, subfolder="tokenizer", local_files_only=True)
    for part in parts.values():
        if isinstance(part, nn.Module):
            part.requires_grad_(False).eval().to(device)
    if EMPTY_TRANSFORMER in components:
        parts["transformer"] = _loading.empty_transformer(path)
    # The constructor reads the settings of the VAE, also where it is not asked for.
    made = parts | {"vae": parts["vae"] or _without_weights(path), "safety_checker": _Unchecked()}
    pipeline = Cosmos2_5_PredictBasePipeline(scheduler=_scheduler(path), **made)
    pipeline.register_modules(vae=parts["vae"])
    return pipeline


def _scheduler(path: str) -> Any:
    name, _ = directories.scheduler(path)
    return getattr(diffusers, name).from_pretrained(path, subfolder="scheduler", local_files_only=True)


def _without_weights(path: str) -> Any:
    with torch.device("meta"):
        return AutoencoderKLWan.from_config(directories.read_json(path, "vae", "config.json"))


def _check_pads(path: str) -> None:
    """diffusers imports torchvision if it is there, and misses it in the first forward pass if it is not."""
    if directories.settings(path, "transformer")["concat_padding_mask"] and not hasattr(
        transformer_cosmos, "transforms"
    ):
        raise ConfigError("this transformer scales its padding mask by torchvision: pip install torchvision")
