"""Facts of a medium, read from its file without decoding all of it."""

from typing import IO, BinaryIO, NamedTuple

from cosmos_rl_core.datasets import _clips, _copies


class Shape(NamedTuple):
    """Size and length of a medium."""

    height: int
    """Height in pixels, as it is shown: turned by the file's own orientation."""
    width: int
    frames: int
    """Frames that are shown; 1 for an image."""
    fps: float
    """Mean frames per second; 0 for an image."""


class Facts(NamedTuple):
    """Identity and shape of a medium."""

    medium: str
    """Sha256 of its bytes."""
    size_bytes: int
    height: int
    width: int
    frames: int
    fps: float


def probe(file: BinaryIO, kind: str) -> Facts:
    """Return the facts of a medium. Every byte of it is hashed.

    Raises :class:`ItemError` like :func:`shape`. Errors of reading ``file`` pass unchanged.
    """
    copy, found, size = _copies.copied(file)
    with copy:
        return Facts(found, size, *shape(copy, kind))


def shape(file: IO[bytes] | str, kind: str) -> Shape:
    """Return size and length of a medium. ``file`` is local: an error of reading it counts as damage.

    An image is decoded. Every packet of a video is read, and its first frame is decoded. Raises :class:`ItemError`
    with the reason if the file is damaged.
    """
    with _clips.damage():
        return _video(file) if kind == "video" else _image(file)


def _image(file: IO[bytes] | str) -> Shape:
    with _clips.image(file) as (picture, turn):
        width, height = picture.size[::-1] if turn in _clips.SIDEWAYS else picture.size
        return Shape(height, width, 1, 0.0)


def _video(file: IO[bytes] | str) -> Shape:
    with _clips.video(file) as container:
        if not container.streams.video:
            raise ValueError("it has no video stream")
        if (first := next(container.decode(video=0), None)) is None:
            raise ValueError("no frame can be decoded")
        _clips.check_whole(first)
        turned = first.rotation % 180 != 0
        height, width = (first.width, first.height) if turned else (first.height, first.width)
        rate = container.streams.video[0].average_rate
        container.seek(0)
        # Packets that an edit list leaves out are decoded and not shown.
        frames = sum(packet.size > 0 and not packet.is_discard for packet in container.demux(video=0))
        return Shape(height, width, frames, float(rate or 0))
