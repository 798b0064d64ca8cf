"""Settings of the model's own processor that scale media as cosmos-rl's examples of Cosmos-Reason2 do.

Their scripts give the settings of ``[custom.vision]`` to ``qwen_vl_utils`` (0.0.14), whose defaults are here.
"""

from pathlib import Path
from typing import Any

from cosmos_rl_core.errors import ConfigError
from cosmos_rl_core.importers.cosmos_rl.kinds import MODEL, has_chats
from cosmos_rl_core.importers.cosmos_rl.rows import Answer, Upstream, count, number
from cosmos_rl_core.vlms._base import architecture

VISION, MEDIA = "custom.vision", "policy.media"
TOKENS = {"image": (4, 16384), "video": (128, 768)}
"""Least and greatest number of tokens of an image and of two frames of a video."""
FPS_OF_SCRIPT, FPS_OF_TABLE = 1.0, 2.0
"""Frames a second without a table ``[custom.vision]``, and with a table without ``fps``."""
SHARE = 0.9
"""Share of the tokens of a conversation that the script gives to a video."""
QWEN3 = "Qwen3VLForConditionalGeneration"
SIDES = {QWEN3: 32, "Qwen2_5_VLForConditionalGeneration": 28}
"""Side of a token in pixels, by class."""
UNKNOWN = (
    "set it by hand, and for Qwen3-VL clip_markers = false: neither name nor folder of the model says whether it is of "
    "Qwen2.5-VL or of Qwen3-VL"
)
TOKENS_OF_CLIPS = (
    "as cosmos-rl's transformers, a version below 5: the tokens <|vision_start|> and <|vision_end|> are around the "
    "frames of a clip, and not around the clip too"
)
"""Reason in the report for the setting of :func:`tokens`."""


def settings(upstream: Upstream) -> dict[str, Any]:
    """Return the settings of media; {} for a file without the dataset of a script.

    If the model is unknown, the settings that depend on it are None.
    """
    if not has_chats(upstream):
        return {}
    video = _sampling(upstream)
    side = _side(upstream)
    if side is None:
        return {f"{MEDIA}.video.{name}": value for name, value in video.items()} | {f"{MEDIA}.video.size": None}
    video |= _bounds(upstream, side)
    found: dict[str, Any] = {f"{MEDIA}.video.{name}": value for name, value in video.items()}
    if any(upstream[f"{VISION}.{name}"] is not None for name in ("min_pixels", "max_pixels")):
        least, most = (_pixels(upstream, name, TOKENS["image"][at] * side**2) for at, name in enumerate(_AREA))
        found[f"{MEDIA}.image.size"] = {"shortest_edge": least, "longest_edge": most}
    return found


_AREA = ("min_pixels", "max_pixels")


def tokens(upstream: Upstream) -> dict[str, Any]:
    """Return the setting of the tokens of clips, for models of Qwen3-VL, with or without a script."""
    return {f"{MEDIA}.video.clip_markers": False} if _side(upstream) == SIDES[QWEN3] else {}


def _sampling(upstream: Upstream) -> dict[str, Any]:
    """Return the setting of how many frames of a video are taken: ``num_frames`` or ``fps``."""
    if (frames := upstream[f"{VISION}.nframes"]) is not None:
        if upstream[f"{VISION}.fps"] is not None:
            raise ConfigError(f"{VISION} has both nframes and fps; set one of them")
        return {"num_frames": count(frames)}
    fps = upstream[f"{VISION}.fps"]
    default = FPS_OF_TABLE if upstream.says(VISION) else FPS_OF_SCRIPT
    return {"fps": default if fps is None else float(number(fps))}


def _bounds(upstream: Upstream, side: int) -> dict[str, Any]:
    """Return the bounds on the pixels of a video.

    ``qwen_vl_utils`` bounds each frame: by ``max_pixels``, and by its share of the script's budget, twice over because
    two frames make a token. Qwen3-VL's processor bounds all frames together, Qwen2.5-VL's each frame.
    """
    length = upstream.count("policy.model_max_length")
    least = _pixels(upstream, "min_pixels", TOKENS["video"][0] * side**2)
    most = _pixels(upstream, "max_pixels", TOKENS["video"][1] * side**2)
    if side == SIDES["Qwen2_5_VLForConditionalGeneration"]:
        size, tokens = {"shortest_edge": least, "longest_edge": most}, length
    else:
        budget = int(length * side**2 * SHARE)
        size, tokens = {"shortest_edge": least, "longest_edge": 2 * budget}, max(1, most // side**2)
    return {"cap_pixels_per_frame": True, "max_video_tokens": tokens, "size": size}


def _pixels(upstream: Upstream, name: str, default: int) -> int:
    value = upstream[f"{VISION}.{name}"]
    return default if value is None else count(value)


def _side(upstream: Upstream) -> int | None:
    """Return the side of a token in pixels; None for a model whose generation is not known."""
    model = str(upstream[MODEL] or "")
    if Path(model).is_dir():
        return SIDES.get(architecture(model))
    name = model.lower()
    if "reason2" in name or "qwen3-vl" in name:
        return 32
    return 28 if "reason1" in name or "qwen2.5-vl" in name else None


def row(key: str, value: Any, upstream: Upstream) -> Answer:
    """Return the settings that depend on a key of ``[custom.vision]``. The script leaves out a key that is null.

    Raises :class:`ConfigError` for a key that has no counterpart here.
    """
    name = key.rpartition(".")[2]
    if name in _REFUSED:
        raise ConfigError(_REFUSED[name])
    found, wanted = settings(upstream), _DECIDES[name]
    return {key: held for key, held in found.items() if key.removeprefix(f"{MEDIA}.") in wanted}, ""


_REFUSED = {
    "resized_height": "media have bounds, not sizes: set min_pixels and max_pixels to height x width",
    "resized_width": "media have bounds, not sizes: set min_pixels and max_pixels to height x width",
    "video_start": "videos are read whole: cut the files first",
    "video_end": "videos are read whole: cut the files first",
}
_DECIDES = {
    "fps": ("video.fps",),
    "nframes": ("video.num_frames",),
    "min_pixels": ("video.size", "image.size"),
    "max_pixels": ("video.size", "video.max_video_tokens", "image.size"),
}
KEYS = (*_DECIDES, *_REFUSED)
"""Keys of ``[custom.vision]`` that :func:`row` translates."""
