"""Frames of cosmos-rl's protocol: a JSON line ``{"prompts": [...], "reward_fn": {"<name>": 1.0}, ...}``, a newline, the
bytes of an ``.npy`` file. The references of the prompts follow, if the service says that it reads them.
"""

import hashlib
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
    references: Sequence[Sequence[np.ndarray]] = (),
) -> bytes:
    """Return the body of a request: one prompt and one entry of ``array`` per sample.

    ``media_type`` is ``image`` (uint8 ``[B, height, width, 3]``), ``video`` (uint8 ``[B, 3, frames, height, width]``)
    or ``latent`` (float16 ``[B, channels, frames, height, width]``). ``fps``, frames per second, is for videos, as
    pixels or latents. Two arguments are for services that describe their scorers: ``digest``, of the only scorer that
    may answer, and ``metadata``, the JSON values of each prompt. ``references`` are the pictures of each sample's
    prompt, uint8 ``[frames, height, width, 3]``. Each picture is sent once, as ``.npy`` bytes at the end; the JSON line
    has, for each sample, the indices of its references among these pictures.
    """
    about: dict[str, Any] = {"prompts": prompts, "reward_fn": {reward_fn: 1.0}}
    if fps is not None:
        about["video_infos"] = [{"video_fps": fps}] * len(prompts)
    body = io.BytesIO()
    # Plain json.dumps leaves no newline in the line, and the service splits at the first.
    about |= {"media_type": media_type} | ({"scorers": {reward_fn: digest}} if digest else {})
    about |= {"metadata": [dict(one) for one in metadata]} if any(metadata) else {}
    numbers, pictures = _numbered(references)
    about |= {"references": numbers} if pictures else {}
    body.write(json.dumps(about).encode() + b"\n")
    for one in (array, *pictures):
        np.save(body, np.ascontiguousarray(one))
    return body.getvalue()


def _numbered(references: Sequence[Sequence[np.ndarray]]) -> tuple[list[list[int]], list[np.ndarray]]:
    """Return the indices of each sample's references in a list of distinct pictures, and that list."""
    known: dict[tuple[Any, ...], int] = {}
    pictures: list[np.ndarray] = []
    numbers: list[list[int]] = []
    for shown in references:
        numbers.append([])
        for one in shown:
            name = one.shape, hashlib.sha256(one.tobytes()).digest()
            if name not in known:
                known[name] = len(pictures)
                pictures.append(one)
            numbers[-1].append(known[name])
    return numbers, pictures
