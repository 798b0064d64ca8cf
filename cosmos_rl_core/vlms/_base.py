"""Interface of plugins for vision-language models (VLMs). None of them imports torch.

A plugin file has ``PROCESSORS``: a class like :class:`Processor` for each class of transformers that it serves.
"""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol

import numpy as np

from cosmos_rl_core import plugins
from cosmos_rl_core.canonical import from_json
from cosmos_rl_core.config.policy import ALL_LINEAR, LoraConfig
from cosmos_rl_core.errors import ConfigError
from cosmos_rl_core.vlms._settings import CONFIG, ImageSettings, VideoSettings
from cosmos_rl_core.weights import lora as adapters

if TYPE_CHECKING:
    from torch import Tensor

Kind = Literal["image", "video"]
Changes = Mapping[Kind, Mapping[str, Any]]
"""Settings that replace the settings in a model's folder, by kind of medium."""


@dataclass(frozen=True)
class Clip:
    """Frames that were taken from a video."""

    pixels: np.ndarray
    """uint8 RGB ``[frames, height, width, 3]``."""
    indices: tuple[int, ...]
    """Number of each frame in the video, from 0."""
    total: int
    """Number of frames in the video."""
    fps: float
    """Frames per second of the video."""

    @property
    def sampled_fps(self) -> float:
        """Return the number of frames that were taken for each second of the video."""
        return len(self.indices) / self.total * self.fps


class Visual(NamedTuple):
    """An image or a clip as the model takes it."""

    text: str
    """Text that replaces its placeholder in the prompt."""
    inputs: "dict[str, Tensor | list[Any]]"
    """Arguments of the model's forward, by name. Arguments of a batch are joined along the first dimension."""
    before: str = ""
    """Text that goes before the opening one of the processor's ``markers``. The chat template writes the placeholder
    between the markers."""


class WeightShapes(NamedTuple):
    """The shapes of the weights of a class of models, from ``config.json`` alone."""

    of: Callable[[Mapping[str, Any]], dict[str, tuple[int, ...]]]
    """Function from the object in ``config.json`` to shapes by name. It raises ``ConfigError`` for a missing number."""
    tables: tuple[str, ...]
    """Names of weights that are looked up, not multiplied."""
    output: str
    """Name of the weight of the output layer. A model whose output layer is a table has no weight of this name."""
    block: str
    """Regular expression of the beginning of the names of a repeated block's weights."""


class Processor(Protocol):
    """Turns media into what one class of models takes, by the settings in a model's folder."""

    placeholders: Mapping[Kind, str]
    """Token that the chat template writes for a medium, and that the model replaces by its features."""
    image: ImageSettings
    """How images are scaled."""
    video: VideoSettings
    """How videos are sampled and scaled."""

    def __init__(self, path: str, changes: Changes) -> None:
        """Read the settings of the folder ``path``. Raises one :class:`ConfigError` with every mistake in them."""

    def sample(self, total: int, fps: float) -> list[int]:
        """Return the frames to take from a video of ``total`` frames. Raises :class:`.ItemError` if it is too short."""
        ...

    def size(self, kind: Kind, frames: int, height: int, width: int) -> tuple[int, int]:
        """Return the height and width in pixels to scale a medium to. Raises :class:`.ItemError` on a bad shape."""
        ...

    def visual(self, kind: Kind, pixels: "Tensor", clip: Clip) -> Visual:
        """Return the model's inputs from normalised pixels ``[frames, 3, height, width]``; an image is one frame."""
        ...


Module = Literal["vision", "projector", "language"]
"""Parts of a VLM that are trained or frozen."""


def module_of(processor: Processor, name: str) -> Module:
    """Return the part of the model that a parameter belongs to, by its name.

    The processor's class may have ``modules``: the beginnings of the names of parameters of the projector and of the
    vision tower, which are tried in this order. All other parameters belong to the language model.
    """
    modules: Mapping[Module, tuple[str, ...]] = getattr(processor, "modules", {})
    found: list[Module] = [module for module, prefixes in modules.items() if name.startswith(prefixes)]
    return found[0] if found else "language"


def adapted(
    config: LoraConfig, linear: Collection[str], processor: Any, output: str, trains: Collection[str]
) -> list[str]:
    """Return the names of the linear modules that get an adapter: modules that ``config`` names, in parts that train.

    ``all-linear`` leaves the module ``output`` out, as in peft. Raises :class:`ConfigError` if no module is left.
    """
    suffixes = adapters.targets(config, linear)
    named = [name for name in linear if any(f".{name}".endswith(f".{suffix}") for suffix in suffixes)]
    every = config.target_modules == (ALL_LINEAR,)
    if kept := [n for n in named if module_of(processor, n) in trains and not (every and n == output)]:
        return kept
    known = sorted({name.rpartition(".")[2] for name in linear if module_of(processor, name) in trains})
    raise ConfigError(
        f"policy.lora.target_modules: no linear module of {', '.join(trains)} ends in "
        f"{', '.join(config.target_modules)}; known: {', '.join(known)}"
    )


def architecture(path: str | Path) -> str:
    """Return the name of the class of transformers that the folder ``path`` is a model of.

    Raises :class:`ConfigError` if there is no such folder or its ``config.json`` names none.
    """
    file = Path(path, CONFIG)
    try:
        found = from_json(file.read_text(encoding="utf-8")).get("architectures")
    except FileNotFoundError as error:
        raise ConfigError(f"{str(path)!r} has no {CONFIG}; expected the folder of a VLM of transformers") from error
    except (ValueError, AttributeError) as error:
        raise ConfigError(f"{file} is not a JSON object: {error}") from error
    if not isinstance(found, list) or len(found) != 1 or not isinstance(found[0], str):
        raise ConfigError(f"{file}: architectures is {found!r}, expected a list with the name of one class")
    return found[0]


def processor_of(path: str | Path, changes: Changes | None = None) -> Processor:
    """Return the processor of the VLM in the folder ``path``. Imports no torch.

    Raises :class:`ConfigError` like :func:`serving`, and with every mistake in its settings.
    """
    _, processor = serving(path)
    return processor(str(path), changes or {})


def serving(path: str | Path) -> tuple[str, type[Processor]]:
    """Return the name of the plugin that serves the VLM in the folder ``path``, and the class of its processor.

    Raises :class:`ConfigError` if no plugin serves its class, listing the known ones, or if two do. Plugins of
    installed packages are imported only if no other plugin serves it.
    """
    name = architecture(path)
    known: dict[str, dict[str, Any]] = {}
    for names in ((*plugins.own("vlms"), *plugins.loaded("vlms")), plugins.installed("vlms")):
        known |= {plugin: plugins.load("vlms", plugin).PROCESSORS for plugin in names}
        claims = sorted(plugin for plugin, processors in known.items() if name in processors)
        if len(claims) > 1:
            raise ConfigError(f"the VLM plugins {', '.join(claims)} all serve {name!r}; leave one out")
        if claims:
            return claims[0], known[claims[0]][name]
    every = sorted(f"{served} ({plugin})" for plugin, processors in known.items() for served in processors)
    raise ConfigError(f"no VLM plugin serves {name!r}, which {path}/{CONFIG} names; known: {', '.join(every)}")
