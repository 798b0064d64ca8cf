"""Loading of pipeline directories: only the components that are needed, float32, frozen, in eval mode."""

import importlib
import inspect
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import accelerate
import torch
from diffusers import DiffusionPipeline
from torch import nn

from cosmos_rl_core.parallel.kept import frozen
from cosmos_rl_core.pipelines import directories
from cosmos_rl_core.pipelines.modules import read_module

COMPONENTS = ("transformer", "vae", "text")
"""Components that a stage can load. Only `embed` needs text encoders; `rollout`, `encode` and `finetune` need the
VAE."""

_READS_PROMPTS = ("text_encoder", "tokenizer", "processor", "image_encoder", "image_processor")
"""Beginnings of the names of the parts that the component ``text`` has: they read texts, and pictures that prompts
refer to."""

EMPTY_TRANSFORMER = "empty transformer"
"""Component to name instead of ``transformer``: its weights stay on the meta device until the caller reads them; its
buffers are real."""

EMPTY_VAE = "empty vae"
"""Component to name instead of ``vae`` where nobody reads its numbers: weights and buffers stay on the meta device."""

GUARDRAIL = "guardrail"
"""Another component of plugins with a ``guardrail_package``: needed with the text encoders, where it refuses prompts,
and with the VAE, where it checks decoded media."""

PREFIX = "prefix"
"""Another component of plugins with a ``frozen_prefix``. With it ``encode_prompts`` returns the output of that module,
float32, under a name of its own. `embed` stores that output for policies that do not train the module."""


def load_pipeline(
    cls: type[DiffusionPipeline], path: str, components: Sequence[str], device: torch.device, **given: Any
) -> Any:
    """Return the stock pipeline with these ``components`` (and the scheduler) loaded and every other one None.

    ``given`` are parts, by name, that replace the directory's own. Only safetensors are read, never a pickle.
    Raises :class:`ArtifactError` like :func:`read_part`.
    """
    parts = load_parts(path, components, device)
    skipped = [name for name, library in _libraries(path).items() if library is None or not _of(name, components)]
    return cls.from_pretrained(path, local_files_only=True, **dict.fromkeys(skipped) | parts | given)


def load_parts(path: str, components: Sequence[str], device: torch.device, **options: Any) -> dict[str, nn.Module]:
    """Load the parts of these ``components`` that have weights, and return them by name.

    ``options`` go to ``from_pretrained``.

    Weights are read straight to the device: all ranks of a machine share the CPU's memory. Raises
    :class:`ArtifactError` like :func:`read_part`.
    """
    reading = {"dtype": torch.float32, **options}
    parts: dict[str, nn.Module] = {
        name: frozen(class_of(path, name), Path(path, name), _files_of(path, name), device, **reading)
        for name in weighted_parts(path, components)
    }
    if EMPTY_TRANSFORMER in components:
        parts["transformer"] = empty_transformer(path)
    if EMPTY_VAE in components:
        parts["vae"] = empty(path, "vae").requires_grad_(False).eval()
    return parts


def weighted_parts(path: str, components: Sequence[str] | None = None) -> list[str]:
    """Return the names of a pipeline's parts that have weights: of ``components`` only, or of all if that is None."""
    names = [name for name, library in _libraries(path).items() if library in ("diffusers", "transformers")]
    wanted = names if components is None else [name for name in names if _of(name, components)]
    return [name for name in wanted if issubclass(class_of(path, name), nn.Module)]


def read_part(path: str, name: str, **options: Any) -> nn.Module:
    """Return a part of the pipeline directory ``path`` with its weights, float32.

    ``options`` go to ``from_pretrained``. Raises :class:`ArtifactError` like
    :func:`cosmos_rl_core.pipelines.modules.read_module`.
    """
    reading = {"dtype": torch.float32, **options}
    return read_module(class_of(path, name), Path(path, name), _files_of(path, name), **reading)


def _files_of(path: str, name: str) -> str:
    """Return the words by which error messages name a part's files."""
    return f"the files of {name!r} in the pipeline {path!r}"


def absent(path: str) -> dict[str, None]:
    """Return the parts that a pipeline directory was saved without, as arguments of ``from_pretrained``."""
    return dict.fromkeys(name for name, library in _libraries(path).items() if library is None)


def empty(path: str, name: str) -> nn.Module:
    """Return a part of the pipeline directory ``path`` with weights and buffers on the meta device."""
    cls = class_of(path, name)
    with accelerate.init_empty_weights(include_buffers=True):
        if hasattr(cls, "load_config"):
            return cls.from_config(cls.load_config(path, subfolder=name, local_files_only=True))
        return cls(cls.config_class.from_pretrained(Path(path, name), local_files_only=True))


def empty_transformer(path: str) -> nn.Module:
    """Return the transformer of the pipeline directory ``path`` with weights on the meta device and real buffers."""
    cls = class_of(path, "transformer")
    with accelerate.init_empty_weights(include_buffers=False):
        transformer = cls.from_config(cls.load_config(path, subfolder="transformer", local_files_only=True))
    return transformer.requires_grad_(False).eval()


def stock_arguments(pipeline: DiffusionPipeline, size: tuple[int, int], frames: int) -> dict[str, Any]:
    """Return the arguments of a stock pipeline's call for media of ``size`` (height, width in pixels) and ``frames``.

    ``use_resolution_binning`` is off: with it SANA's pipeline makes the nearest size of its own list, then scales and
    crops.
    """
    known = inspect.signature(type(pipeline).__call__).parameters
    wanted = {"height": size[0], "width": size[1], "num_frames": frames, "frames": frames}
    wanted["use_resolution_binning"] = False
    return {name: value for name, value in wanted.items() if name in known}


def initialise(transformer: nn.Module, seed: int) -> None:
    """Replace the weights, in place, by the class's own random initialisation: a function of config and seed.

    Call it before an adapter is added.
    """
    with torch.random.fork_rng(devices=[]), torch.device("cpu"):
        torch.manual_seed(seed)
        fresh = type(transformer).from_config(transformer.config)  # pyright: ignore[reportAttributeAccessIssue, reportCallIssue]
    transformer.load_state_dict(fresh.state_dict())


def class_of(path: str, part: str) -> Any:
    """Return the class of a part of a pipeline directory."""
    library, name = directories.read_json(path, directories.INDEX)[part]
    return getattr(importlib.import_module(library), name)


def _libraries(path: str) -> dict[str, str | None]:
    """Return the library of each part that a pipeline directory's index lists; None for parts saved without files."""
    index = directories.read_json(path, directories.INDEX)
    return {name: value[0] for name, value in index.items() if isinstance(value, list)}


def _of(part: str, components: Sequence[str]) -> bool:
    """Return whether a part belongs to one of ``components``. The scheduler is always loaded."""
    name = "text" if part.startswith(_READS_PROMPTS) else part
    return name == "scheduler" or name in components
