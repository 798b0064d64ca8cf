"""The facts of a model that plans and checks read: a value without torch."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

from cosmos_rl_core.pipelines.comfyui import Name

Settings = Mapping[str, Any]
"""The ``config.json`` of a component, with defaults of its class for settings that the file leaves out."""

Levels = np.ndarray | list[float]
"""Noise levels, one a step."""

CONDITIONAL_LATENTS, CONDITIONAL_MASK = "conditional_latents", "conditional_mask"
"""Shared entries of a video whose first latent frames are given: their normalised latents, ``[C, T, H, W]``, zero after
them; and a mask ``[1, T, 1, 1]``, 1 at given frames and 0 at frames to generate. Both float32."""

REFERENCE_TOKENS = "reference_tokens"
"""Shared entry of references that add tokens: ``[S, D]``, the transformer's tokens of all references in order."""


@dataclass(frozen=True)
class Geometry:
    """The map of a VAE from pixels to latents."""

    channels: int
    """Channels of a latent."""
    spatial: int
    """Pixels along a side of one latent."""
    temporal: int | None = None
    """Frames of one latent frame after the first; None if the VAE encodes images only."""


@dataclass(frozen=True)
class Vae:
    """One class of VAE."""

    geometry: Callable[[Settings], Geometry | None]
    """Function of the VAE's settings: its geometry, or None if they do not state it."""
    defaults: Settings = field(default_factory=dict)
    """Defaults of the class for the settings that ``geometry`` reads."""
    posterior: bool = False
    """The encoder returns a normal distribution, ``latent_dist``. The model then defines ``encode_posterior``."""


def patch_size(transformer: Settings) -> tuple[int, int, int]:
    """Return latent frames, height and width of one token from the setting ``patch_size``, a number or all three."""
    patch = transformer["patch_size"]
    frames, height, width = (1, patch, patch) if isinstance(patch, int) else patch
    return frames, height, width


def rope_positions(transformer: Settings) -> tuple[int, int, int]:
    """Return the setting ``rope_max_seq_len`` for each of frames, height and width."""
    most = transformer["rope_max_seq_len"]
    return most, most, most


def falling_sigmas(num_steps: int, _scheduler: Settings) -> np.ndarray:
    """Return ``num_steps`` levels from 1 to ``1 / num_steps``, evenly spaced, float64."""
    return np.linspace(1.0, 1 / num_steps, num_steps)


Shift = Callable[[int, int, Settings], float]
"""Function of the transformer's tokens of one image, the number of steps and the scheduler's settings: the ``mu`` that
a stock pipeline gives its scheduler. A linear shift takes level s to ``mu s / (1 + (mu - 1) s)``; an exponential one
has ``exp(mu)`` instead of mu."""


def linear_shift(max_shift: float) -> Shift:
    """Return a shift that is linear in tokens, through two points of the scheduler's settings.

    They are (base_image_seq_len, base_shift) and (max_image_seq_len, max_shift), ``max_shift`` being the stock
    pipeline's default for the last. Source: Stable Diffusion 3, arXiv:2403.03206, section 5.3.2; the line and the other
    defaults are the stock pipeline's.
    """

    def shift(image_tokens: int, _num_steps: int, scheduler: Settings) -> float:
        tokens = scheduler.get("base_image_seq_len", 256), scheduler.get("max_image_seq_len", 4096)
        shifts = scheduler.get("base_shift", 0.5), scheduler.get("max_shift", max_shift)
        slope = (shifts[1] - shifts[0]) / (tokens[1] - tokens[0])
        return image_tokens * slope + (shifts[0] - slope * tokens[0])

    return shift


@dataclass(frozen=True, kw_only=True)
class References:
    """Pictures or clips that a prompt of a family refers to. The model then defines ``_encode_references``."""

    when: Callable[[Settings], bool] = lambda _: True
    """Function of the pipeline's index: whether this pipeline takes references. If not, the spec that
    ``directories.spec`` returns has None as ``references``."""
    fewest: int = 0
    """Smallest number of references of a prompt. 0: the family also makes media of text alone."""
    most: int = 1
    """Largest number of references of a prompt."""
    pipeline_class: str
    """Class of the stock pipeline that takes references; evaluations run it."""
    argument: str = "image"
    """Argument of the pipeline's call that has the references."""
    takes_list: bool = True
    """Whether the argument is a list of references for one prompt. False: one reference for each prompt of a batch."""
    with_argument: Callable[[int], Mapping[str, Any]] = lambda _: {}
    """Function of the number of frames of a prompt's reference, 1 for a picture: further arguments of a call that has
    the reference."""
    clips: bool = False
    """Whether the pipeline takes clips too, whose last frames a video continues. The argument then is a list of
    frames."""
    read_with_text: bool = False
    """Whether the text encoder reads references, with the negative prompt too. The model then defines
    ``_encode_prompt_with``."""
    token_size: Callable[[tuple[int, int]], tuple[int, int]] | None = None
    """Function of the height and width of a reference in pixels: the size to which it is scaled. It is for families
    whose references add tokens to the transformer's: as many whole tokens as fit into that size. None: references add
    no tokens. The function raises ``ConfigError`` for a size that the stock pipeline does not take."""
    entries: Callable[[Settings, tuple[int, ...]], Mapping[str, tuple[int, ...]]] = lambda *_: {}
    """Function of the transformer's settings and of the latents' shape, without a batch: the shapes of the shared
    entries that references give besides tokens, by name."""


@dataclass(frozen=True, kw_only=True)
class ModelSpec:
    """The facts of a family of pipelines. The ``__init__.py`` of a model plugin assigns one to ``SPEC``.

    Give ``pipeline_classes``, ``vaes``, ``transformer_class`` and ``text_width``. Every other field has a default for a
    pipeline that does nothing special; read each field and set fields that differ. Functions of a component's
    settings read them by name and import no torch. The suite compares the facts with the classes in diffusers and with
    the stock pipeline.
    """

    pipeline_classes: tuple[str, ...]
    """Values of ``_class_name`` in ``model_index.json``. Two plugins cannot claim the same class."""
    vaes: Mapping[str, Vae]
    """Classes that the VAE of the pipeline can have, by name; ``cosmos_rl_core/models/_vaes.py`` has common ones."""
    transformer_class: str
    """Class of the pipeline's transformer."""
    transformer_defaults: Settings = field(default_factory=dict)
    """Defaults of that class for the settings that this spec reads. Older checkpoints leave some out."""
    refused_settings: Mapping[str, str] = field(default_factory=dict)
    """Settings of the index or the transformer that must be absent or off, each with the kind of model that it means,
    and after "; " what to do instead."""

    patch: Callable[[Settings], tuple[int, int, int]] = patch_size
    """Function of the transformer's settings: latent frames, height and width of one token."""
    positions: Callable[[Settings], tuple[int, int, int] | None] = lambda _: None
    """Function of the transformer's settings: most tokens along frames, height and width that it has positions for;
    None for any number."""
    packing: int = 1
    """Side of the square of latents that the pipeline packs into the channels of one token. 1: it packs none."""
    mask_channels: int = 0
    """Input channels of the transformer in addition to the latents' channels."""
    text_width: Callable[[Settings], int]
    """Function of the transformer's settings: elements of one text token."""
    pooled_width: Callable[[Settings], int] = lambda _: 0
    """Function of the transformer's settings: elements of a prompt's pooled embedding; 0 without one."""
    clip_tokenizer: str | None = None
    """Component whose ``model_max_length`` tokens precede the ``max_prompt_length`` tokens of a prompt."""
    text_positions: Callable[[Settings], int | None] = lambda _: None
    """Function of the transformer's settings: most text tokens that it has positions for; None for any number."""
    max_prompt_length: int | None = None
    """Most text tokens that the stock pipeline takes; None for any number."""
    prompt_length: int | None = None
    """The only ``max_prompt_length`` with which the transformer reads texts right; None for any number."""
    unread_padding: Mapping[str, str | None] = field(default_factory=dict)
    """Entries of a prompt's conditioning, ``[tokens, ...]``, whose last rows may be padding that the transformer does
    not read. Such rows are not stored. The value is the name of the mask, which is 0 at padding, or None if the padding
    itself is zero."""
    time_argument: str = "timestep"
    """Argument of the transformer that has the time. Its first argument is the state."""
    text_argument: str = "encoder_hidden_states"
    """Argument of the transformer that has the texts."""
    float32_modules: tuple[str, ...] = ()
    """Modules that the transformer's class keeps float32 in half-precision runs, by a part of their name."""
    joined_inputs: tuple[str, ...] = ()
    """Modules of the transformer whose input joins the tokens of all samples of a batch, which may differ in length.
    Adapters of them cannot have dropout."""
    context_parallel: bool = False
    """Processes can share the tokens of a video; the model then defines ``split_sequence``."""

    guardrail_package: str | None = None
    """Package of the safety checker that the stock pipeline requires. The model then loads the component
    ``GUARDRAIL`` of :mod:`cosmos_rl_core.interfaces.models`."""
    guidance_argument: Literal["guidance_scale", "true_cfg_scale"] = "guidance_scale"
    """Argument of the stock call that weighs two predictions."""
    guidance_offset: float = 0
    """Our ``guidance_scale`` minus that argument."""
    guidance_off: float = 1
    """Largest value of that argument without guidance: above it the stock pipeline predicts with both texts."""
    takes_negative: bool = True
    """The stock call has the argument ``negative_prompt``. False: it guides away from the empty prompt alone."""
    unguided_settings: Mapping[str, str] = field(default_factory=dict)
    """Settings of the index with which the stock pipeline ignores guidance, each with the kind of model it means."""
    guidance_options: tuple[str, ...] = ()
    """Settings among ``OPTIONS`` of ``cosmos_rl_core.pipelines.guidance`` that the stock call takes. The model then has
    attributes of these names, with the defaults of the call."""
    embedded_guidance_scale: float | None = None
    """Input of transformers with ``guidance_embeds``: the default of the stock call's ``guidance_scale``. None: the
    family has no such transformers."""
    supervised_guidance_scale: float | None = None
    """Input of these transformers in losses on media. None: ``embedded_guidance_scale``."""
    max_given_frames: int = 0
    """Most latent frames that can be given at the start of a video. Above 0 ``velocity`` takes
    :func:`cosmos_rl_core.interfaces.models.given_frames`."""
    stock_multiple: int = 1
    """Pixels. The stock pipeline refuses sides that are no multiple of it, whatever the VAE's own factor. 1: only
    the VAE and the transformer's patches decide."""
    shift: Shift | None = None
    """The shift that the stock pipeline gives its scheduler, in most families :func:`linear_shift`. None: no shift."""
    always_shifts: bool = False
    """The stock pipeline gives a shift even to schedulers that do not shift by size. Some schedulers refuse it."""
    stock_sigmas: Callable[[int, Settings], Levels | None] = lambda *_: None
    """Function of the number of steps and the scheduler's settings: noise levels that the stock pipeline gives its
    scheduler, as an array or as a list, which some schedulers do not take; None if the scheduler makes its own."""
    frozen_prefix: str | None = None
    """Module of the transformer that text embeddings pass first, and that makes them far smaller. Its output may be
    stored instead of the embeddings: the model then loads ``PREFIX`` of the interfaces, and ``velocity`` takes that
    output."""
    takes_instruction: bool = False
    """The stock call has the argument ``complex_human_instruction``. The model then has an attribute of that name."""

    references: References | None = None
    """References of a prompt; None if the family takes none."""
    comfyui: Name | None = None
    """Names of the transformer's modules in LoRA files that ComfyUI reads; None if it reads no LoRA of the family."""

    def defaults(self, class_name: str) -> Settings:
        """Return the defaults of a component's class for the settings that this spec reads."""
        if class_name == self.transformer_class:
            return self.transformer_defaults
        return self.vaes[class_name].defaults if class_name in self.vaes else {}
