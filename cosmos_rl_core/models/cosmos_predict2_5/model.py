"""Cosmos-Predict2.5 as a velocity field."""

import inspect
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from diffusers import AutoencoderKLWan, Cosmos2_5_PredictBasePipeline
from diffusers.pipelines.cosmos import pipeline_cosmos2_5_predict as stock
from torch import Tensor, nn
from transformers import AutoTokenizer

from cosmos_rl_core.errors import ConfigError
from cosmos_rl_core.models import _loading
from cosmos_rl_core.models._conditioning import Conditioning, Entries
from cosmos_rl_core.models._loading import EMPTY_TRANSFORMER, GUARDRAIL, PREFIX
from cosmos_rl_core.models._media import VideoModel
from cosmos_rl_core.models._pictures import BILINEAR
from cosmos_rl_core.models._refusals import Refusals
from cosmos_rl_core.models.cosmos_predict2_5 import FROZEN_PREFIX, GUARDRAIL_PACKAGE
from cosmos_rl_core.parallel.context_parallel import Peers, SelfAttention
from cosmos_rl_core.parallel.sharding import WHOLE, load_base
from cosmos_rl_core.pipelines import directories
from cosmos_rl_core.pipelines.spec import CONDITIONAL_LATENTS, CONDITIONAL_MASK

EMBEDS, PROJECTED = "prompt_embeds", "projected_prompt_embeds"
"""Names of text embeddings in a conditioning: before the frozen prefix, and after it."""
_GIVEN_T = 1e-4
"""Noise level that the transformer gets for given frames: the stock pipeline's ``conditional_frame_timestep``."""


class CosmosPredict25(VideoModel):
    """Cosmos-Predict2.5. Conditioning: ``prompt_embeds`` or, with the frozen prefix, ``projected_prompt_embeds``; and
    given frames.

    Padding is not masked, so all prompts of a run need the same ``max_prompt_length``; the stock pipeline has 512.
    The first latent frames of a video depend on its first frames alone. Given frames are therefore the latents of an
    image, or of 1 plus a multiple of 4 frames.

    It also loads the components ``guardrail`` and ``prefix``. Raises :class:`ConfigError` if the guardrail's package is
    not installed.
    """

    stock_class = Cosmos2_5_PredictBasePipeline
    negative_prompt = stock.DEFAULT_NEGATIVE_PROMPT

    def __init__(self, path: str, components: tuple[str, ...], device: torch.device) -> None:
        self._guardrail = _guardrail(device) if GUARDRAIL in components else None
        self._prefix = _load_prefix(path, device) if PREFIX in components else None
        super().__init__(path, tuple(name for name in components if name not in (GUARDRAIL, PREFIX)), device)

    def _load_pipeline(self, components: tuple[str, ...]) -> Cosmos2_5_PredictBasePipeline:
        return _load_pipeline(self._path, components, self._device)

    def encode_prompts(self, prompts: list[str], max_prompt_length: int) -> list[Conditioning]:
        """Return embeddings ``[max_prompt_length, layers x hidden size]``, or their projection if ``prefix`` is loaded.

        They are on the CPU; the system prompt is among the tokens. If the guardrail is loaded, raises
        :class:`ConfigError` for prompts that it refuses.
        """
        self._check(prompts)
        return super().encode_prompts(prompts, max_prompt_length)

    def encode_with(
        self,
        prompt: str,
        references: Sequence[np.ndarray],
        max_prompt_length: int,
        size: tuple[int, int],
        frames: int,
    ) -> Conditioning:
        """Return the conditioning of a prompt with its first frames. Raises like :meth:`encode_prompts`."""
        self._check([prompt])
        return super().encode_with(prompt, references, max_prompt_length, size, frames)

    def _check(self, prompts: Sequence[str]) -> None:
        """Raise :class:`ConfigError` if the guardrail is loaded and refuses some of the prompts."""
        if self._guardrail is None:
            return
        if unsafe := [prompt for prompt in prompts if prompt and not self._guardrail.check_text_safety(prompt)]:
            found = ", ".join(unsafe[:5])
            raise ConfigError(f"the guardrail refuses {len(unsafe)} prompts; take them out: {found}")

    def _encode_references(self, references: Sequence[np.ndarray], size: tuple[int, int], frames: int) -> Entries:
        return self._encode_first_frames(references, size, frames, BILINEAR)

    def _encode_prompt(self, prompt: str, max_prompt_length: int) -> Entries:
        embeds, _ = self.pipeline.encode_prompt(
            prompt, do_classifier_free_guidance=False, max_sequence_length=max_prompt_length, device=self._device
        )
        if self._prefix is None:
            return {EMBEDS: embeds[0].cpu()}
        return {PROJECTED: self._prefix(embeds)[0].cpu()}

    def screen(self, frames: np.ndarray) -> np.ndarray | None:
        """Give the frames to the guardrail if it is loaded, and return them, maybe with other pixels.

        None means that it refuses them.
        """
        return frames if self._guardrail is None else self._guardrail.check_video_safety(frames)

    def velocity(self, x_t: Tensor, t: Tensor, conditioning: Conditioning) -> Tensor:
        """Predict the velocity; the transformer gets float32 t itself for each latent frame, and 1e-4 at given ones."""
        batch, _, frames, height, width = x_t.shape
        t = t.to(torch.float32).view(batch, 1, 1, 1, 1)
        given = conditioning.get(CONDITIONAL_MASK, x_t.new_zeros(batch, 1, frames, 1, 1))
        if CONDITIONAL_MASK in conditioning:
            x_t = x_t.where(given == 0, conditioning[CONDITIONAL_LATENTS])
        projected, scale = PROJECTED in conditioning, self.pipeline.vae_scale_factor_spatial
        with _skipped(self.transformer, FROZEN_PREFIX) if projected else nullcontext():
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
        """Share tokens with :func:`split`."""
        split(self.transformer, group)


def load_stock(
    path: str, guardrail: bool, device: torch.device, transformer: nn.Module | None = None
) -> Cosmos2_5_PredictBasePipeline:
    """Return the whole stock pipeline, float32, read straight to ``device``.

    Without ``guardrail`` nothing is checked. With it a refused video becomes black, and
    :func:`cosmos_rl_core.models._refusals.refused` tells which videos were refused. ``transformer``, if given, replaces
    the directory's own.
    """
    own = "transformer" if transformer is None else EMPTY_TRANSFORMER
    pipeline = _load_pipeline(path, (own, "vae", "text"), device, device_map=device.type)
    if transformer is not None:
        pipeline.register_modules(transformer=transformer)
    if guardrail:
        guard = _guardrail(device)
        guard.check_video_safety = Refusals(guard.check_video_safety)
        pipeline.register_modules(safety_checker=guard)
    return pipeline


class _Unchecked:
    """Replaces the guardrail: the stock pipeline can be neither made nor called without one."""

    def to(self, *_: Any) -> None:
        """Do nothing: there are no weights."""

    def check_text_safety(self, _: str) -> bool:
        """Return True: every prompt passes."""
        return True


@contextmanager
def _skipped(transformer: nn.Module, name: str) -> Iterator[None]:
    """Replace the child module ``name`` of the transformer by the identity, within the context."""
    module = transformer.get_submodule(name)
    assert not any(p.requires_grad for p in module.parameters()), f"{name} is trained, and so cannot be skipped"
    setattr(transformer, name, nn.Identity())
    try:
        yield
    finally:
        setattr(transformer, name, module)


def _load_prefix(path: str, device: torch.device) -> nn.Module:
    """Return the base's projection of texts with its weights, without the rest of the transformer."""
    module = _loading.empty_transformer(path).get_submodule(FROZEN_PREFIX).to_empty(device=device)
    load_base(nn.ModuleDict({FROZEN_PREFIX: module}), path, WHOLE)
    return module


def _guardrail(device: torch.device) -> Any:
    directories.check_installed(GUARDRAIL_PACKAGE, 'policy.diffusers.guardrail = "required"')
    checker: Any = stock.CosmosSafetyChecker()
    checker.to(device)
    return checker


def _load_pipeline(
    path: str, components: tuple[str, ...], device: torch.device, **options: Any
) -> Cosmos2_5_PredictBasePipeline:
    """Return the stock pipeline with these ``components`` (and the scheduler) loaded and every other one None.

    ``options`` go to ``from_pretrained`` of each part. The pipeline's own ``from_pretrained`` cannot be used: it makes
    a guardrail, or fails if the directory names a guardrail that is not installed.
    """
    read = {"local_files_only": True}
    parts: dict[str, Any] = dict.fromkeys(("transformer", "text_encoder", "tokenizer"))
    parts |= _loading.load_parts(path, components, device, **options)
    if "text" in components:
        parts["tokenizer"] = AutoTokenizer.from_pretrained(path, subfolder="tokenizer", **read)
    vae = parts.pop("vae", None)
    # The constructor reads the settings of the VAE, loaded or not.
    with torch.device("meta"):
        settings: Any = AutoencoderKLWan.from_config(directories.read_json(path, "vae", "config.json"))
    pipeline = Cosmos2_5_PredictBasePipeline(
        **parts,
        vae=vae or settings,
        scheduler=_loading.class_of(path, "scheduler").from_pretrained(path, subfolder="scheduler", **read),
        safety_checker=_Unchecked(),  # pyright: ignore[reportArgumentType]
    )
    pipeline.register_modules(vae=vae)
    return pipeline


def split(transformer: Any, group: dist.ProcessGroup) -> None:
    """Share the tokens of every forward pass among the processes of ``group``. All of them call this, after LoRA.

    Raises :class:`ConfigError` if there are fewer attention heads than peers. A forward pass raises it if there are
    fewer tokens than peers.
    """
    peers = Peers(group, transformer.config["num_attention_heads"])
    signature = inspect.signature(transformer.forward)

    def flat_timesteps(_module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """Flatten noise levels of frames, ``[B, 1, T, 1, 1]``, to ``[B T]``, which the transformer does not repeat."""
        call = signature.bind(*args, **kwargs)
        call.arguments["timestep"] = call.arguments["timestep"].flatten()
        return call.args, call.kwargs

    def own_patches(_module: nn.Module, _args: Any, patches: Tensor) -> Tensor:
        """Cut ``[B, T, H, W, C]`` to ``[B, S_own, 1, 1, C]``, which the transformer flattens to tokens."""
        peers.begin(*patches.shape[:4])
        return patches.flatten(1, 3)[:, peers.own(), None, None]

    def own_positions(_module: nn.Module, _args: Any, positions: Tensor) -> Tensor:
        return positions[:, peers.own(positions.shape[1])]

    def own_times(_module: nn.Module, _args: Any, embeddings: tuple[Tensor, Tensor]) -> tuple[Tensor, ...]:
        return tuple(peers.spread(embedding) for embedding in embeddings)

    transformer.register_forward_pre_hook(flat_timesteps, with_kwargs=True)
    if transformer.learnable_pos_embed is not None:
        transformer.learnable_pos_embed.register_forward_hook(own_positions)
    transformer.patch_embed.register_forward_hook(own_patches)
    transformer.time_embed.register_forward_hook(own_times)
    for block in transformer.transformer_blocks:
        block.attn1.set_processor(SelfAttention(peers, norms_heads=True, unbind_dim=-2))
    peers.join_after(transformer)


load = CosmosPredict25
