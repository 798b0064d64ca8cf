"""Shapes of a pipeline's weights, and of the weights that training changes, from files alone: torch-free, for plans."""

import math
from collections.abc import Iterable
from pathlib import Path

from cosmos_rl_core.config.policy import LoraConfig
from cosmos_rl_core.errors import ArtifactError, ConfigError
from cosmos_rl_core.pipelines import directories, sizes
from cosmos_rl_core.pipelines.sizes import Shapes
from cosmos_rl_core.storage.tensor_headers import read_header
from cosmos_rl_core.weights import counting
from cosmos_rl_core.weights import lora as adapters

BUFFERS = {"pos_embed.pos_embed": "pos_embed.proj.weight"}
"""Names of tensors in a transformer's safetensors that are not weights, because nothing trains them. The value is the
weight of the neighbouring module: if that is of a linear module, not of a convolution, the tensor is a weight after
all."""
CONVOLUTION = 4
"""Number of dimensions of the weight of a convolution over pictures."""


def embedding_elements(pipeline: str, max_prompt_length: int, lora: LoraConfig | None = None) -> int:
    """Return the largest number of elements that are stored for one prompt's text embedding, without masks.

    If ``lora`` leaves the model's prefix frozen (:func:`frozen_prefix`), the output of the prefix is stored.
    """
    spec, transformer = directories.spec(pipeline), directories.settings(pipeline, "transformer")
    prefix = frozen_prefix(pipeline, lora)
    width = prefix[max(prefix)][0] if prefix else spec.text_width(transformer)
    return sizes.text_tokens(pipeline, max_prompt_length) * width + spec.pooled_width(transformer)


def frozen_prefix(pipeline: str, lora: LoraConfig | None) -> Shapes:
    """Return, by name, the shapes of the matrices of the frozen module that text embeddings pass first.

    Empty if the model's spec names no such module, or if training changes it: full training changes every module, LoRA
    the ones whose matrices it adapts. Raises :class:`ConfigError` for a LoRA target that names no matrix.
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

    If a file is absent, a separate process builds the component from its ``config.json`` without weights, in seconds.
    """
    folder = Path(pipeline, component)
    indices = sorted(folder.glob("*.safetensors.index.json"))
    places = directories.read_json(indices[0])["weight_map"].values() if indices else folder.glob("*.safetensors")
    files = [folder / place for place in sorted(set(places))]
    if not files or not all(file.is_file() for file in files):
        return counting.shapes(pipeline)[component]
    return file_shapes(files)


def file_shapes(files: Iterable[Path]) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the tensors of safetensors files by name, from their headers.

    Raises :class:`ConfigError` if a header is damaged.
    """
    shapes: dict[str, tuple[int, ...]] = {}
    for file in files:
        try:
            with file.open("rb") as stream:
                shapes |= {entry.name: entry.shape for entry in read_header(stream)}
        except ArtifactError as error:
            raise ConfigError(f"{file}: {error}; fetch it again") from error
    return shapes


def count_elements(shapes: Shapes) -> int:
    """Return the number of elements of all tensors."""
    return sum(math.prod(shape) for shape in shapes.values())


def trainable_shapes(shapes: Shapes, lora: LoraConfig | None) -> dict[str, tuple[int, ...]]:
    """Return the shapes of trained tensors by name: all weights, or two factors of rank r for each targeted matrix.

    Matrices are the weights of linear modules, not of convolutions or tables. Raises like :func:`adapters.adapted`.
    """
    if lora is None:
        return {name: shape for name, shape in shapes.items() if not _is_buffer(name, shapes)}
    matrices = matrices_of(shapes)
    factors: dict[str, tuple[int, ...]] = {}
    for module in adapters.adapted(lora, matrices):
        (rows, columns), rank = matrices[module], adapters.rank(lora, module)
        factors |= {f"{module}.lora_A.weight": (rank, columns), f"{module}.lora_B.weight": (rows, rank)}
    return factors


def _is_buffer(name: str, shapes: Shapes) -> bool:
    return name in BUFFERS and len(shapes.get(BUFFERS[name], ())) == CONVOLUTION


def trainable_elements(shapes: Shapes, lora: LoraConfig | None) -> int:
    """Return the number of trained elements. Raises like :func:`trainable_shapes`."""
    return count_elements(trainable_shapes(shapes, lora))


def matrices_of(shapes: Shapes) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the weights of linear modules, by the module's name."""
    linear = {name: shape for name, shape in shapes.items() if name.endswith(".weight") and len(shape) == 2}
    return {name.removesuffix(".weight"): shape for name, shape in linear.items()}
