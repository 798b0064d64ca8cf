"""Sizes of latents, texts and trainable weights, from a pipeline's files alone: torch-free, so that plans can compute
them."""

import math
from collections.abc import Iterable, Mapping
from pathlib import Path

from cosmos_rl_core.config.policy import LoraConfig
from cosmos_rl_core.errors import ArtifactError, ConfigError
from cosmos_rl_core.models._spec import Geometry
from cosmos_rl_core.pipelines import counting, directories
from cosmos_rl_core.storage.tensor_headers import read_header
from cosmos_rl_core.weights import lora as adapters

FLOAT32_BYTES = 4
MAX_TOKENS = 2**20
"""Most tokens of one sample: twelve times those of 93 frames of 720p in Cosmos-Predict2.5, the largest video that a
model here was made for. It bounds transformers without positions, and those whose positions bound each axis alone."""
BUFFERS = ("pos_embed.pos_embed",)
"""Tensors in the safetensors of a transformer that are not weights: nothing trains them."""

Shapes = Mapping[str, tuple[int, ...]]
"""Shapes of tensors by name."""


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


def num_tokens(pipeline: str, size: tuple[int, int], frames: int) -> int:
    """Return the number of tokens of one sample's latents in the transformer. Raises like :func:`latent_shape`."""
    return math.prod(latent_shape(pipeline, size, frames)[1:]) // math.prod(patch_shape(pipeline))


def text_tokens(pipeline: str, max_prompt_length: int) -> int:
    """Return the number of text tokens of one prompt that the transformer gets."""
    tokenizer = directories.spec(pipeline).clip_tokenizer
    if tokenizer is None:
        return max_prompt_length
    return directories.read_json(pipeline, tokenizer, "tokenizer_config.json")["model_max_length"] + max_prompt_length


def check_prompt_length(pipeline: str, max_prompt_length: int) -> None:
    """Raise :class:`ConfigError` for more text tokens than the stock pipeline takes."""
    most = directories.spec(pipeline).max_prompt_length
    if most is not None and max_prompt_length > most:
        raise ConfigError(f"max_prompt_length is at most {most} for this model, found {max_prompt_length}")


def embedding_elements(pipeline: str, max_prompt_length: int, lora: LoraConfig | None = None) -> int:
    """Return the largest number of elements that are stored for one prompt's text embedding, without masks.

    If ``lora`` leaves the model's prefix frozen, they are the prefix's output.
    """
    spec, transformer = directories.spec(pipeline), directories.settings(pipeline, "transformer")
    prefix = frozen_prefix(pipeline, lora)
    width = prefix[max(prefix)][0] if prefix else spec.text_width(transformer)
    return text_tokens(pipeline, max_prompt_length) * width + spec.pooled_width(transformer)


def frozen_prefix(pipeline: str, lora: LoraConfig | None) -> Shapes:
    """Return the shapes of the matrices of a module that texts pass first and that training leaves unchanged, by name.

    Empty if the model's spec names no such module, or if one of its matrices is adapted. Full training changes every
    module. Raises :class:`ConfigError` for a LoRA target that names no matrix.
    """
    name = directories.spec(pipeline).frozen_prefix
    if name is None or lora is None:
        return {}
    matrices = matrices_of(weight_shapes(pipeline))
    prefix = {module: shape for module, shape in matrices.items() if module.startswith(f"{name}.")}
    return {} if prefix.keys() & set(adapters.adapted(lora, matrices)) else prefix


def weight_shapes(pipeline: str) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the transformer's tensors by name, as :func:`component_shapes` does."""
    return component_shapes(pipeline, directories.TRANSFORMER)


def component_shapes(pipeline: str, component: str) -> dict[str, tuple[int, ...]]:
    """Return the shapes of a component's tensors by name, from the headers of its safetensors files.

    Where a file is absent, its ``config.json`` is built without weights: seconds, in a process of its own.
    """
    folder = Path(pipeline, component)
    indices = sorted(folder.glob("*.safetensors.index.json"))
    places = directories.read_json(indices[0])["weight_map"].values() if indices else folder.glob("*.safetensors")
    files = [folder / place for place in sorted(set(places))]
    if not files or not all(file.is_file() for file in files):
        return counting.shapes(pipeline)[component]
    return file_shapes(files)


def file_shapes(files: Iterable[Path]) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the tensors of safetensors files by name, from their headers."""
    shapes: dict[str, tuple[int, ...]] = {}
    for file in files:
        try:
            with file.open("rb") as stream:
                shapes |= {entry.name: entry.shape for entry in read_header(stream)}
        except ArtifactError as error:
            raise ConfigError(f"{file}: {error}; fetch it again") from error
    return shapes


def elements(shapes: Shapes) -> int:
    """Return the number of elements of all tensors."""
    return sum(math.prod(shape) for shape in shapes.values())


def trainable_shapes(shapes: Shapes, lora: LoraConfig | None) -> dict[str, tuple[int, ...]]:
    """Return the shapes of trained tensors by name: all weights, or two factors of rank r for each targeted matrix.

    Matrices are the weights of linear modules, not of convolutions or tables. Raises like :func:`adapters.adapted`.
    """
    if lora is None:
        return {name: shape for name, shape in shapes.items() if name not in BUFFERS}
    matrices = matrices_of(shapes)
    factors: dict[str, tuple[int, ...]] = {}
    for module in adapters.adapted(lora, matrices):
        (rows, columns), rank = matrices[module], adapters.rank(lora, module)
        factors |= {f"{module}.lora_A.weight": (rank, columns), f"{module}.lora_B.weight": (rows, rank)}
    return factors


def trainable_elements(shapes: Shapes, lora: LoraConfig | None) -> int:
    """Return the number of trained elements. Raises like :func:`trainable_shapes`."""
    return elements(trainable_shapes(shapes, lora))


def matrices_of(shapes: Shapes) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the weights of linear modules, by the module's name."""
    linear = {name: shape for name, shape in shapes.items() if name.endswith(".weight") and len(shape) == 2}
    return {name.removesuffix(".weight"): shape for name, shape in linear.items()}
