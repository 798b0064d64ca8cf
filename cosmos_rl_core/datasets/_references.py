"""Pictures and clips that prompts refer to: read when a run is planned, and decoded from the store when it runs."""

import hashlib
import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from cosmos_rl_core.datasets import _clips, _copies
from cosmos_rl_core.datasets._base import Reference
from cosmos_rl_core.datasets._files import kind_of
from cosmos_rl_core.datasets._reference_pixels import decoded
from cosmos_rl_core.errors import UnreadableError
from cosmos_rl_core.storage import media, store

MOST = 8
"""Most references of a prompt."""


class Span(NamedTuple):
    """The place of a picture's or a clip's bytes inside a larger file, on a disk or in S3."""

    url: str
    start: int
    end: int


def read_reference(place: Path | Span) -> Reference:
    """Return the reference in a file, or in a part of one.

    Raises ``ValueError`` for bytes that are not one whole picture or clip of usual size.
    """
    if isinstance(place, Span):
        if place.start == place.end:
            raise ValueError("no bytes; a path alone is not read")
        return _reference(place.url, (place.start, place.end))
    if not place.is_file():
        raise ValueError(f"no file at {place}")
    try:
        return _reference(str(place.absolute()))
    except (OSError, UnreadableError) as error:
        raise ValueError(f"{place} cannot be read: {error}") from error
    except ValueError as error:
        raise ValueError(f"{place}: {error}") from error


def _reference(source: str, span: tuple[int, int] | None = None) -> Reference:
    return reference_of(store.read(source, *span or ()), source=source, span=span)


def reference_of(data: bytes, **place: Any) -> Reference:
    """Return the reference with these bytes. Raises ``ValueError`` unless they are a whole picture or clip."""
    frames, height, width, _ = decoded(data).shape
    return Reference(digest=hashlib.sha256(data).hexdigest(), height=height, width=width, frames=frames, **place)


def places_in(value: Any) -> list[Any]:
    """Return ``value`` if it is a list of at most :data:`MOST` places of references, else raise ``ValueError``."""
    if not isinstance(value, list) or not all(isinstance(one, str | Span) and one for one in value):
        raise ValueError(f'expected "references" to be a list of paths of pictures or clips, found {value!r:.80}')
    if len(value) > MOST:
        raise ValueError(f"expected at most {MOST} references, found {len(value)}")
    return value


class References:
    """References by their places: paths relative to a folder, or spans of other files. Each is read once.

    With ``inside`` the paths must lie in the folder.
    """

    def __init__(self, folder: Path | None, *, inside: bool = False) -> None:
        self.folder, self._inside = folder, inside
        self._known: dict[str | Span, Reference] = {}

    def at(self, places: Any) -> tuple[Reference, ...]:
        """Return the references at a list of places.

        Raises ``ValueError`` like :func:`places_in`, and for a reference that cannot be used.
        """
        for number, place in enumerate(places_in(places), 1):
            if place not in self._known:
                self._known[place] = self._read(number, place)
        return tuple(self._known[place] for place in places)

    def _read(self, number: int, place: str | Span) -> Reference:
        if isinstance(place, Span):
            try:
                return read_reference(place)
            except ValueError as error:
                raise ValueError(f"reference {number}: {error}") from error
        if self.folder is None:
            raise ValueError('"references" are paths, which only prompts in a file of this machine have')
        path = self.folder / place
        if self._inside and not path.resolve().is_relative_to(self.folder.resolve()):
            raise ValueError(f"the reference {place} is outside the folder {self.folder}; put it in a folder there")
        return read_reference(path)


def frames_of(medium: Path, frames: Sequence[int], size: tuple[int, int]) -> list[Reference]:
    """Return frames of a medium, scaled and cropped to a size, as references, decoding once. Raises ``ItemError``."""
    with medium.open("rb") as file:
        clips = _clips.read(file, kind_of(medium.name), [[frame] for frame in frames], size)
    digests = [hashlib.sha256(media.encode(clip)[1]).hexdigest() for clip in clips]
    source, (height, width) = str(medium.absolute()), size
    return [
        Reference(digest=digest, height=height, width=width, source=source, frame=frame)
        for digest, frame in zip(digests, frames, strict=True)
    ]


def bytes_of(reference: Reference) -> bytes:
    """Return the present bytes at the place that the plan read. They may have changed since.

    A frame of a medium is a PNG; a medium in a part of a file is a video. Raises :class:`ItemError` if it is damaged.
    """
    size = reference.height, reference.width
    if reference.frame is None:
        return store.read(reference.source, *reference.span or ())
    if reference.span is not None:
        return frame_in(io.BytesIO(store.read(reference.source, *reference.span)), "video", reference.frame, size)
    with Path(reference.source).open("rb") as file:
        return frame_in(file, kind_of(reference.source), reference.frame, size)


def frame_in(file: BinaryIO, kind: str, frame: int, size: tuple[int, int]) -> bytes:
    """Return a frame of a medium, scaled and cropped to a size, as PNG. Raises :class:`ItemError`."""
    copy, _, _ = _copies.copied(file)
    with copy:
        (clip,) = _clips.read(copy, kind, [[frame]], size)
    return media.encode(clip)[1]
