"""Frames of cosmos-rl's protocol: a JSON line ``{"prompts": [...], "reward_fn": {"<name>": 1.0}, ...}``, a newline, the
bytes of an ``.npy`` file.
"""

import io
import json
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np


def frame(
    prompts: list[str],
    reward_fn: str,
    media_type: str,
    array: np.ndarray,
    fps: float | None = None,
    digest: str = "",
    metadata: Sequence[Mapping[str, Any]] = (),
) -> bytes:
    """Return the body of a request: one prompt and one entry of ``array`` per sample.

    ``media_type`` is ``image`` (uint8 ``[B, height, width, 3]``), ``video`` (uint8 ``[B, 3, frames, height, width]``)
    or ``latent`` (float16 ``[B, channels, frames, height, width]``). ``fps``, frames per second, is for videos, as
    pixels or latents. For services that tell of their scorers: ``digest`` of the only one that may answer, and
    ``metadata``, the JSON values of each prompt.
    """
    about: dict[str, Any] = {"prompts": prompts, "reward_fn": {reward_fn: 1.0}}
    if fps is not None:
        about["video_infos"] = [{"video_fps": fps}] * len(prompts)
    body = io.BytesIO()
    # Plain json.dumps leaves no newline in the line, and the service splits at the first.
    about |= {"media_type": media_type} | ({"scorers": {reward_fn: digest}} if digest else {})
    about |= {"metadata": [dict(one) for one in metadata]} if any(metadata) else {}
    body.write(json.dumps(about).encode() + b"\n")
    np.save(body, np.ascontiguousarray(array))
    return body.getvalue()
