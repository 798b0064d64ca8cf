"""Sizes of latents and texts, from a pipeline's files alone: torch-free, so that plans can compute them."""

import math
from collections.abc import Mapping, Sequence

from cosmos_rl_core.errors import ConfigError
from cosmos_rl_core.pipelines import directories
from cosmos_rl_core.pipelines.spec import REFERENCE_TOKENS, Geometry

FLOAT32_BYTES = 4
MAX_TOKENS = 2**20
"""Largest number of tokens of a sample: twelve times as many as 93 frames of 720p have in Cosmos-Predict2.5, the
largest video that a model here was made for. It is a limit for transformers without positions, and for transformers
whose positions limit each axis, but not the product."""

Shapes = Mapping[str, tuple[int, ...]]
"""Shapes of tensors by name."""

Pictures = Sequence[tuple[int, int]]
"""Height and width of each reference of a prompt, in pixels."""


def vae_geometry(pipeline: str) -> Geometry:
    """Return how the pipeline's VAE maps pixels to latents in the stock pipeline.

    Raises :class:`ConfigError` for a VAE that the model's spec does not list, and for settings that do not state it.
    """
    known, settings = directories.spec(pipeline).vaes, directories.settings(pipeline, "vae")
    if (found := settings.get("_class_name", "none")) not in known:
        raise ConfigError(f"{pipeline!r} has the VAE {found}; supported here: {', '.join(known)}")
    if (geometry := known[found].geometry(settings)) is None:
        raise ConfigError(f"{pipeline!r}: vae/config.json does not state how many pixels and frames a latent has")
    return geometry


def patch_shape(pipeline: str) -> tuple[int, int, int]:
    """Return latent frames, height and width of one token of the pipeline's transformer."""
    spec = directories.spec(pipeline)
    frames, height, width = spec.patch(directories.settings(pipeline, "transformer"))
    return frames, height * spec.packing, width * spec.packing


def latent_shape(pipeline: str, size: tuple[int, int], frames: int) -> tuple[int, int, int, int]:
    """Return channels, frames (1 for images), height and width of one sample's latents.

    ``size`` is height and width in pixels. Raises :class:`ConfigError` for a size or a number of frames that the VAE,
    the transformer's patches and positions or the stock pipeline do not allow.
    """
    geometry, patch = vae_geometry(pipeline), patch_shape(pipeline)
    _check_sides(pipeline, size)
    _check_frames(frames, geometry, patch)
    length = 1 if geometry.temporal is None else 1 + (frames - 1) // geometry.temporal
    shape = (length, size[0] // geometry.spatial, size[1] // geometry.spatial)
    tokens = [n // side for n, side in zip(shape, patch, strict=True)]
    most = directories.spec(pipeline).positions(directories.settings(pipeline, "transformer"))
    media = f"inference_size {list(size)} and train_frames = {frames} are"
    if most and any(n > limit for n, limit in zip(tokens, most, strict=True)):
        raise ConfigError(
            f"{media} {tokens} tokens (frames, height, width); the transformer has positions for at most {list(most)}"
        )
    if (count := math.prod(tokens)) > MAX_TOKENS:
        raise ConfigError(f"{media} {count} tokens a sample, at most {MAX_TOKENS} are possible here; lower them")
    return (geometry.channels, *shape)


def multiples(pipeline: str) -> tuple[int, int]:
    """Return the pixels that height and width must be multiples of. Raises like :func:`vae_geometry`."""
    stock_multiple, spatial = directories.spec(pipeline).stock_multiple, vae_geometry(pipeline).spatial
    _, height, width = patch_shape(pipeline)
    return math.lcm(stock_multiple, spatial * height), math.lcm(stock_multiple, spatial * width)


def _check_sides(pipeline: str, size: tuple[int, int]) -> None:
    allowed = multiples(pipeline)
    if any(side < 1 or side % multiple for side, multiple in zip(size, allowed, strict=True)):
        expected = allowed[0] if allowed[0] == allowed[1] else list(allowed)
        raise ConfigError(
            f"inference_size {list(size)}: height and width must be multiples of {expected} pixels for this model"
        )


def _check_frames(frames: int, geometry: Geometry, patch: tuple[int, int, int]) -> None:
    """Raise :class:`ConfigError` unless the VAE and the patches divide the frames.

    The VAE keeps the first frame and makes one latent frame of each ``temporal`` others; a patch has ``patch[0]``
    latent frames.
    """
    if geometry.temporal is None:
        if frames != 1:
            raise ConfigError(f"train_frames = {frames}: this model makes images, whose frames are 1")
        return
    fewest, step = 1 + geometry.temporal * (patch[0] - 1), geometry.temporal * patch[0]
    if frames < fewest or (frames - fewest) % step:
        raise ConfigError(f"train_frames = {frames} must be {fewest} plus a multiple of {step} for this model")


def latent_elements(pipeline: str, size: tuple[int, int], frames: int) -> int:
    """Return the number of elements of one sample's latents. Raises like :func:`latent_shape`."""
    return math.prod(latent_shape(pipeline, size, frames))


def num_tokens(pipeline: str, size: tuple[int, int], frames: int, pictures: Pictures = ()) -> int:
    """Return the number of tokens of one sample in the transformer: of its latents, and of its prompt's references.

    Raises like :func:`latent_shape` and :func:`reference_tokens`.
    """
    own = math.prod(latent_shape(pipeline, size, frames)[1:]) // math.prod(patch_shape(pipeline))
    return own + num_reference_tokens(pipeline, pictures)


def num_reference_tokens(pipeline: str, pictures: Pictures) -> int:
    """Return the number of tokens that references add. Raises like :func:`reference_tokens`."""
    return sum(map(math.prod, reference_tokens(pipeline, pictures)))


def reference_tokens(pipeline: str, pictures: Pictures) -> tuple[tuple[int, int, int], ...]:
    """Return the numbers of tokens that each reference adds along frames, height and width; () if it adds no tokens.

    Raises :class:`ConfigError` for a size that the family does not take.
    """
    references = directories.spec(pipeline).references
    if references is None or references.token_size is None:
        return ()
    side, (_, *patch) = vae_geometry(pipeline).spatial, patch_shape(pipeline)
    encoded = map(references.token_size, pictures)
    return tuple((1, height // (side * patch[0]), width // (side * patch[1])) for height, width in encoded)


def reference_shapes(pipeline: str, pictures: Pictures, size: tuple[int, int], frames: int) -> Shapes:
    """Return the shapes of the shared entries that references add to a prompt's conditioning, by name.

    Raises like :func:`latent_shape` and :func:`reference_tokens`.
    """
    references = directories.spec(pipeline).references
    if references is None or not pictures:
        return {}
    latents = latent_shape(pipeline, size, frames)
    found = dict(references.entries(directories.settings(pipeline, "transformer"), latents))
    if tokens := reference_tokens(pipeline, pictures):
        found[REFERENCE_TOKENS] = (sum(map(math.prod, tokens)), latents[0] * math.prod(patch_shape(pipeline)))
    return found


def text_tokens(pipeline: str, max_prompt_length: int) -> int:
    """Return the number of text tokens of one prompt that the transformer gets."""
    tokenizer = directories.spec(pipeline).clip_tokenizer
    if tokenizer is None:
        return max_prompt_length
    return directories.read_json(pipeline, tokenizer, "tokenizer_config.json")["model_max_length"] + max_prompt_length


def check_prompt_length(pipeline: str, max_prompt_length: int) -> None:
    """Raise :class:`ConfigError` for more text tokens than the stock pipeline takes or the transformer has positions.

    If the transformer reads only texts of one length, every other length is refused.
    """
    spec = directories.spec(pipeline)
    if spec.prompt_length not in (None, max_prompt_length):
        raise ConfigError(f"max_prompt_length is {spec.prompt_length} for this model, found {max_prompt_length}")
    limits = spec.max_prompt_length, spec.text_positions(directories.settings(pipeline, "transformer"))
    most = min((limit for limit in limits if limit is not None), default=max_prompt_length)
    if max_prompt_length > most:
        raise ConfigError(f"max_prompt_length is at most {most} for this model, found {max_prompt_length}")
