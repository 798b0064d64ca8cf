"""Pictures of samples for pages: small ones as data URIs, and full ones as browsers show and play them."""

import base64
import io
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Self

from PIL import Image

from cosmos_rl_core.datasets._reference_pixels import decoded
from cosmos_rl_core.errors import ArtifactError
from cosmos_rl_core.storage import media
from stages.formats.references import Pictures
from stages.formats.samples import StoredSample

SIDES = (192, 128, 96, 64)
"""Longest sides of small pictures, in pixels. A file takes the first at which all its pictures fit into it."""
EXACT_SIDE = 128
"""Longest side in pixels up to which a picture keeps every pixel."""
REFERENCE_SIDE = 96
"""Longest side in pixels of the small picture of a reference."""
REFERENCES_KEPT = 1024
"""Most small pictures of references in memory."""
FULL_BYTES = 2**19
"""Size in bytes of the largest PNG that is shown as it is. A larger PNG becomes a JPEG in full size."""
QUALITY, FULL_QUALITY = 75, 92


@dataclass(frozen=True)
class Thumb:
    """A small picture."""

    source: str
    """A data URI; "" without a picture."""
    missing: str = ""
    """Why there is no picture."""
    width: int = 0
    height: int = 0

    @classmethod
    def of(cls, sample: StoredSample, side: int = SIDES[0]) -> Self:
        """Return the small picture of a sample."""
        why = missing(sample)
        return cls("", why) if why else cls.encoded(strip(sample), side)

    @classmethod
    def encoded(cls, frames: list[Image.Image], side: int) -> Self:
        """Return frames side by side, each of at most ``side`` pixels."""
        exact = max(frames[0].size) <= min(EXACT_SIDE, side)
        frames = [frame.copy() for frame in frames]
        for frame in frames:
            frame.thumbnail((side, side), Image.Resampling.LANCZOS)  # leaves a smaller one as it is
        width, height = frames[0].size
        image = Image.new("RGB", (width * len(frames), height))
        for place, frame in enumerate(frames):
            image.paste(frame, (place * width, 0))
        buffer = io.BytesIO()
        image.save(buffer, format="webp", lossless=exact, quality=QUALITY, method=4)
        return cls(f"data:image/webp;base64,{base64.b64encode(buffer.getvalue()).decode('ascii')}", "", *image.size)

    @property
    def pixelated(self) -> bool:
        """Return whether a page enlarges the picture without smoothing."""
        return self.height <= EXACT_SIDE // 2


class References:
    """Small pictures of the references of prompts, read from the store that a slot is in."""

    def __init__(self, slot: str) -> None:
        self._pictures = Pictures(slot)
        self._thumbs = lru_cache(REFERENCES_KEPT)(self._read)
        self.faults: dict[str, str] = {}
        """Reasons why references could not be shown when they were last asked for, by their digests."""

    def of(self, digests: Sequence[str]) -> tuple[Thumb, ...]:
        """Return the small pictures of references. For a missing or damaged reference, ``Thumb.missing`` says so."""
        return tuple(self._of(one) for one in digests)

    def _of(self, digest: str) -> Thumb:
        try:
            thumb = self._thumbs(digest)
        except ArtifactError as error:
            self.faults[digest] = str(error)
            return Thumb("", str(error))
        self.faults.pop(digest, None)
        return thumb

    def _read(self, digest: str) -> Thumb:
        data, fault = self._pictures.looked_at(digest)
        if fault:
            # Without the address: equal artifacts give equal pages, wherever their store is.
            raise ArtifactError(f"no picture: the reference {digest[:12]} is {fault}")
        return Thumb.encoded(framed(decoded(data)), REFERENCE_SIDE)


def strip(sample: StoredSample) -> list[Image.Image]:
    """Return a picture, or the first, middle and last frame of a video, shrunk to the largest of :data:`SIDES`."""
    return framed(sample.pixels)


def framed(frames: Any) -> list[Image.Image]:
    """Return the first, middle and last of uint8 frames ``[frames, height, width, 3]``, shrunk like :func:`strip`."""
    images = [Image.fromarray(frames[i]) for i in sorted({0, len(frames) // 2, len(frames) - 1})]
    for image in images:
        image.thumbnail((SIDES[0], SIDES[0]), Image.Resampling.LANCZOS)
    return images


def within(strips: dict[str, list[Image.Image]], most_bytes: int) -> dict[str, Thumb]:
    """Return small pictures by name, of the largest size at which all data URLs together have at most ``most_bytes``.

    If even the smallest size needs more bytes, it is taken.
    """
    found: dict[str, Thumb] = {}
    for side in SIDES:
        found = {name: Thumb.encoded(frames, side) for name, frames in strips.items()}
        if sum(len(one.source) for one in found.values()) <= most_bytes:
            break
    return found


def missing(sample: StoredSample) -> str:
    """Return why a sample has no picture; "" if it has one."""
    if sample.why_lost:
        return f"no picture: the sample {sample.why_lost}"
    if not sample.has_media:
        return "no picture: the sample was not decoded (rollout.decode_share)"
    return "" if sample.media else "the picture was deleted (rollout.keep.media)"


def full(sample: StoredSample) -> tuple[str, bytes]:
    """Return the ending and the bytes of a sample in full size: PNG or JPEG, or a video that browsers play."""
    if sample.extension == media.VIDEO:
        return "mp4", media.playable(sample.pixels)
    if len(sample.media) <= FULL_BYTES:
        return media.IMAGE, sample.media
    buffer = io.BytesIO()
    Image.fromarray(sample.pixels[0]).save(buffer, format="jpeg", quality=FULL_QUALITY)
    return "jpg", buffer.getvalue()
