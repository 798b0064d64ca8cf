"""What every model plugin needs to load a pipeline directory: only the components asked for, float32, frozen."""

import importlib
import inspect
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any, TypeVar

import accelerate
import torch
from diffusers import DiffusionPipeline
from torch import Tensor, nn

from cosmos_rl_core import plugins
from cosmos_rl_core.errors import ArtifactError
from cosmos_rl_core.models._base import COMPONENTS, EMPTY_TRANSFORMER, ModelPlugin, NotFiniteError
from cosmos_rl_core.pipelines import directories

Pipeline = TypeVar("Pipeline", bound=DiffusionPipeline)


def adapter_of(path: str) -> ModelPlugin:
    """The ``model.py`` of the model plugin for the pipeline directory ``path``.

    Raises :class:`ConfigError`, listing the known pipeline classes, if there is none.
    """
    plugin: ModelPlugin = plugins.load_model(directories.adapter_name(path))  # pyright: ignore[reportAssignmentType]
    return plugin


ALIGNMENT_BYTES = 64
"""Where PyTorch's allocator places tensors on the CPU."""
_LIBRARIES = ("diffusers", "transformers")
"""Whose classes have weights in a pipeline directory."""


def load_pipeline(cls: type[Pipeline], path: str, components: Sequence[str], device: torch.device) -> Pipeline:
    """The stock pipeline with the asked ``components`` (and the scheduler) loaded and every other one None.

    Reads safetensors alone, never a pickle. Raises :class:`ArtifactError` as :func:`read_part`.
    """
    check_components(components)
    asked = {name: there and _asked(name, components) for name, there in _parts(path).items()}
    parts = {name: read_part(path, name) for name in weighted_parts(path, [name for name in asked if asked[name]])}
    for part in parts.values():
        align(part.requires_grad_(False).eval().to(device))
    if EMPTY_TRANSFORMER in components:
        parts["transformer"] = empty_transformer(path)
    skipped = {name: None for name, wanted in asked.items() if not wanted}
    return cls.from_pretrained(path, local_files_only=True, **skipped | parts)


def weighted_parts(path: str, among: Collection[str] | None = None) -> list[str]:
    """Return the names of the parts of a pipeline directory that have weights, of all or ``among`` some."""
    index = directories.read_json(path, directories.INDEX)
    there = [name for name, is_there in _parts(path).items() if is_there and index[name][0] in _LIBRARIES]
    wanted = there if among is None else [name for name in there if name in among]
    return [name for name in wanted if issubclass(class_of(path, name), nn.Module)]


def read_part(path: str, name: str, **options: Any) -> nn.Module:
    """A part of the pipeline directory ``path`` with its weights, float32. ``options`` are ``from_pretrained``'s.

    Raises :class:`ArtifactError`, naming weights, if its files lack some or have some of another shape: the libraries
    make those up at random.
    """
    reading: Any = {"dtype": torch.float32, "use_safetensors": True, "local_files_only": True, **options}
    # Asked to go on at another shape, the libraries list all of them beside the weights that lack.
    reading |= {"output_loading_info": True, "ignore_mismatched_sizes": True}
    where = f"the files of {name!r} in the pipeline {path!r}"
    try:
        part, found = class_of(path, name).from_pretrained(Path(path, name), **reading)
    except NotImplementedError as error:
        # With a device_map, diffusers moves weights that it was to make up, which have no memory, before it lists them.
        if "meta tensor" not in str(error):
            raise
        raise ArtifactError(f"{where} lack weights, or have some of another shape; fetch them again") from error
    if missing := sorted(found["missing_keys"]):
        raise ArtifactError(f"{where} lack {_listed(missing)}; fetch them again")
    if others := sorted(found["mismatched_keys"]):
        shapes = [f"{key} is {list(there)}, expected {list(expected)}" for key, there, expected in others]
        raise ArtifactError(f"{where} do not fit its config.json: {_listed(shapes)}; fetch them again")
    return part


def _listed(names: Sequence[str]) -> str:
    """A few of them, and how many there are."""
    return f"{len(names)} weights: {', '.join(names[:3])}{', ...' * (len(names) > 3)}"


def align(module: nn.Module) -> None:
    """Move weights on the CPU to where PyTorch allocates memory, on boundaries of :data:`ALIGNMENT_BYTES`.

    Weights read from a file lie wherever it has them, and some CPUs' matrix products round by the place of their
    operands: equal copies of a part would then not predict equally.
    """
    for tensor in (*module.parameters(), *module.buffers()):
        if tensor.is_cpu and tensor.data_ptr() % ALIGNMENT_BYTES:
            tensor.data = tensor.data.clone()


def absent(path: str) -> dict[str, None]:
    """The parts that a pipeline directory was saved without, which ``from_pretrained`` wants to be told again."""
    return {name: None for name, there in _parts(path).items() if not there}


def empty_transformer(path: str) -> nn.Module:
    """The transformer of the pipeline directory ``path`` with weights on the meta device and true buffers."""
    cls = class_of(path, "transformer")
    with accelerate.init_empty_weights(include_buffers=False):
        transformer = cls.from_config(cls.load_config(path, subfolder="transformer", local_files_only=True))
    return transformer.requires_grad_(False).eval()


def check_components(components: Sequence[str]) -> None:
    """Raise ``ValueError`` unless all are among :data:`COMPONENTS`, or the transformer without its weights."""
    unknown = set(components) - {*COMPONENTS, EMPTY_TRANSFORMER}
    if unknown:
        raise ValueError(f"unknown components {sorted(unknown)}; known: {', '.join(COMPONENTS)}")


def require(component: Any, name: str) -> Any:
    """The component itself, or an error that says which one was not loaded."""
    if component is None:
        raise RuntimeError(f"this needs the component {name!r}, which was not loaded")
    return component


def stock_arguments(pipeline: DiffusionPipeline, size: tuple[int, int], frames: int) -> dict[str, Any]:
    """How the call of a stock pipeline is asked for media of ``size`` (height and width in pixels) and ``frames``.

    SANA's would make the nearest of its own list of sizes instead, and scale and crop that.
    """
    known = inspect.signature(type(pipeline).__call__).parameters
    wanted = {"height": size[0], "width": size[1], "num_frames": frames, "frames": frames}
    wanted["use_resolution_binning"] = False
    return {name: value for name, value in wanted.items() if name in known}


def pixels_to_unit(pixels: Tensor) -> Tensor:
    """Uint8 pixels to float32 in [-1, 1], as the stock image processor scales them."""
    return 2.0 * (pixels.float() / 255.0) - 1.0


def unit_to_pixels(images: Tensor) -> Tensor:
    """Values in [-1, 1] to uint8, clamped and rounded half to even, as the stock image processor does for PIL.

    Raises :class:`NotFiniteError` at a value that is not finite, which would become black.
    """
    if not images.isfinite().all():
        raise NotFiniteError("decoded pixels are not finite")
    return ((images.float() * 0.5 + 0.5).clamp(0, 1) * 255).round().to(torch.uint8)


def initialise(transformer: nn.Module, seed: int) -> None:
    """Replace the weights, in place, with the class's own random initialisation: a function of config and seed.

    Call it before an adapter is added.
    """
    with torch.random.fork_rng(devices=[]), torch.device("cpu"):
        torch.manual_seed(seed)
        fresh = type(transformer).from_config(transformer.config)  # pyright: ignore[reportAttributeAccessIssue, reportCallIssue]
    transformer.load_state_dict(fresh.state_dict())


def _parts(path: str) -> dict[str, bool]:
    """Names of the parts that a pipeline directory's index lists, and whether they are there."""
    index = directories.read_json(path, directories.INDEX)
    return {name: value[0] is not None for name, value in index.items() if isinstance(value, list)}


def class_of(path: str, part: str) -> Any:
    library, name = directories.read_json(path, directories.INDEX)[part]
    return getattr(importlib.import_module(library), name)


def _asked(name: str, components: Sequence[str]) -> bool:
    if name.startswith(("text_encoder", "tokenizer")):
        return "text" in components
    return name == "scheduler" or name in components
