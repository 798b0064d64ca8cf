"""Settings of image and video processors, read from the files of a model's folder as transformers reads them."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, TypeVar

from pydantic import Field, ValidationError, field_validator, model_validator

from cosmos_rl_core.canonical import from_json
from cosmos_rl_core.config.base import Section
from cosmos_rl_core.errors import ConfigError, mistakes_in

CONFIG = "config.json"
"""Name of the file with the settings of the model itself."""
BOTH, IMAGE, VIDEO = "processor_config.json", "preprocessor_config.json", "video_preprocessor_config.json"
LEGACY_TEMPLATE = "chat_template.json"
"""Name of the file in which older versions of transformers write a processor's chat template."""
FILES = {"image": (IMAGE,), "video": (VIDEO, IMAGE)}
"""Files with the settings of a kind of medium. The first file that exists is read, but :data:`BOTH` instead if it has a
table for the kind."""

STEPS: dict[str, Any] = {"do_resize": True, "do_rescale": True, "do_normalize": True, "do_convert_rgb": True}
STEPS |= {"resample": 3, "rescale_factor": 1 / 255}
"""Defaults of all stock processors."""

S = TypeVar("S", bound="ImageSettings")

_WAYS = {"fps", "num_frames"}
"""Settings that say how many frames to take."""


class Size(Section, extra="ignore"):
    """Bounds on the number of pixels, an area, although the files name an edge."""

    shortest_edge: int = Field(ge=1)
    """Least number of pixels."""
    longest_edge: int = Field(ge=1)
    """Greatest number of pixels."""

    @model_validator(mode="after")
    def _ordered(self) -> "Size":
        if self.shortest_edge > self.longest_edge:
            raise ValueError(f"shortest_edge {self.shortest_edge} is more than longest_edge {self.longest_edge}")
        return self


class ImageSettings(Section, extra="ignore"):
    """Scaling of pixels, and their patches. Settings of other names in the files have no effect."""

    size: Size
    """Bounds on the number of pixels."""
    patch_size: int = Field(ge=1)
    """Side of a patch in pixels."""
    temporal_patch_size: int = Field(ge=1)
    """Number of frames in a patch."""
    merge_size: int = Field(ge=1)
    """Side, in patches, of the square that becomes one token."""
    image_mean: tuple[float, float, float]
    """Mean of each channel, with white as 1."""
    image_std: tuple[float, float, float]
    """Deviation of each channel."""
    rescale_factor: float = Field(gt=0)
    """Factor that turns white, 255, into 1."""
    resample: Literal[3]
    """Filter that scales pixels: bicubic, in Pillow's numbers."""
    do_resize: Literal[True]
    """This and the next three must be true: every step of the stock processors is taken."""
    do_rescale: Literal[True]
    do_normalize: Literal[True]
    do_convert_rgb: Literal[True]

    @field_validator("image_std")
    @classmethod
    def _above_0(cls, deviations: tuple[float, float, float]) -> tuple[float, float, float]:
        if min(deviations) <= 0:
            raise ValueError("expected numbers above 0")
        return deviations

    @property
    def factor(self) -> int:
        """Return the side of a token in pixels. Height and width are multiples of it."""
        return self.patch_size * self.merge_size


class VideoSettings(ImageSettings, extra="ignore"):
    """Scaling of the pixels of videos, their patches, and the sampling of frames."""

    do_sample_frames: bool
    """Whether to take only some frames; otherwise every frame is taken."""
    fps: float | None = Field(gt=0)
    """Frames to take for each second."""
    num_frames: int | None = Field(ge=1)
    """Frames to take from any video."""
    min_frames: int = Field(ge=1)
    """Least number of frames that ``fps`` gives."""
    max_frames: int = Field(ge=1)
    """Greatest number of frames that ``fps`` gives."""
    cap_pixels_per_frame: bool
    """Whether ``max_video_tokens`` bounds the size of frames too."""
    max_video_tokens: int = Field(ge=1)
    """Tokens of a video or of a frame, as the family counts them."""
    clip_markers: bool = True
    """Whether the chat template's markers of vision stay around a clip whose steps in time have markers of their own:
    true as in transformers 5, false as in version 4. For processors that have it among their defaults."""

    @model_validator(mode="after")
    def _one_way_to_sample(self) -> "VideoSettings":
        if self.do_sample_frames and self.fps is not None and self.num_frames is not None:
            raise ValueError("fps and num_frames are both set; set one of them")
        return self


def read_settings(
    path: str,
    changes: Mapping[Any, Mapping[str, Any]],
    *,
    image: Mapping[str, Any],
    video: Mapping[str, Any],
    vision: Mapping[str, tuple[str, int]],
) -> tuple[ImageSettings, VideoSettings]:
    """Return the settings of the folder ``path`` for images and videos.

    ``image`` and ``video`` are the defaults of the stock processors; ``changes`` replace settings in the files.
    ``vision`` has, for each setting that must equal a setting in the model's ``vision_config``, the name and the
    default there. Raises one :class:`ConfigError` with every mistake.
    """
    images, mistakes = _read(path, "image", ImageSettings, image, changes.get("image", {}))
    videos, more = _read(path, "video", VideoSettings, video, changes.get("video", {}))
    mistakes += more
    mistakes += [f"unknown kind {kind!r} of medium; known: image, video" for kind in sorted({*changes} - {*FILES})]
    model = (json_object(path, CONFIG) or {}).get("vision_config")
    of_model = model if isinstance(model, dict) else {}
    for kind, settings in (("image", images), ("video", videos)):
        for name, (key, default) in vision.items():
            found, expected = getattr(settings, name, None), of_model.get(key, default)
            if settings is not None and found != expected:
                mistakes.append(f"{kind}: {name} is {found}, but {key} of the model's vision_config is {expected}")
    if images is None or videos is None or mistakes:
        raise mistakes_in(path, mistakes)
    return images, videos


def json_object(path: str, name: str) -> dict[str, Any] | None:
    """Return the object in a JSON file of the folder ``path``, or None if there is no such file.

    Raises :class:`ConfigError` if it is something else.
    """
    try:
        found = from_json(Path(path, name).read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except ValueError as error:
        raise ConfigError(f"{name} is not JSON: {error}") from error
    if not isinstance(found, dict):
        raise ConfigError(f"{name}: expected a JSON object, found {type(found).__name__}")
    return found


def _table(path: str, kind: Literal["image", "video"]) -> tuple[str, dict[str, Any]]:
    """Return the name of the file that has the settings of a kind of medium, and the settings."""
    both, table = json_object(path, BOTH), f"{kind}_processor"
    if both is not None and table in both:
        if not isinstance(both[table], dict):
            raise ConfigError(f"{BOTH}: {table} is {both[table]!r}, expected a table")
        return f"{BOTH}: {table}", both[table]
    for name in FILES[kind]:
        if (found := json_object(path, name)) is not None:
            return name, found
    raise ConfigError(f"no settings for {kind}s; expected {', '.join(FILES[kind])} or {BOTH} with {table}")


def _read(
    path: str, kind: Literal["image", "video"], cls: type[S], defaults: Mapping[str, Any], changes: Mapping[str, Any]
) -> tuple[S | None, list[str]]:
    """Return the settings of the folder ``path`` for a kind of medium, and the mistakes in them.

    As in transformers, a setting that a file leaves out or has as null has its default, and ``min_pixels`` and
    ``max_pixels`` replace ``size`` if ``defaults`` has them. ``changes`` replace settings in the files: ``num_frames``
    or ``fps`` turns sampling on and the other of the two off.
    """
    try:
        place, found = _table(path, kind)
    except ConfigError as error:
        return None, [str(error)]
    values = {**defaults, **{name: value for name, value in found.items() if value is not None}}
    known = [name for name, setting in cls.model_fields.items() if setting.is_required() or name in defaults]
    if isinstance(values["size"], dict) and "min_pixels" in defaults:
        edges = {"shortest_edge": values["min_pixels"], "longest_edge": values["max_pixels"]}
        values["size"] = {**values["size"], **{name: edge for name, edge in edges.items() if edge is not None}}
    if ways := _WAYS & changes.keys():
        values |= {"do_sample_frames": True, **(dict.fromkeys(_WAYS - ways))}
    mistakes = [
        f"{kind}: unknown setting {name!r}; known: {', '.join(known)}" for name in sorted(changes.keys() - {*known})
    ]
    try:
        return cls.model_validate({**values, **changes}), mistakes
    except ValidationError as error:
        for one in error.errors():
            name = ".".join(str(part) for part in one["loc"])
            where = f"{kind}.{name}" if one["loc"] and one["loc"][0] in changes else f"{place}: {name}"
            given = "" if isinstance(one["input"], dict) else f", found {one['input']!r}"
            mistakes.append(f"{where.rstrip(': ')}: {one['msg']}{given}")
        return None, mistakes
