"""Facts of a medium, read from its file without decoding all of it."""

from typing import IO, BinaryIO, NamedTuple

from cosmos_rl_core.datasets import _clips, _copies


class Facts(NamedTuple):
    """Identity and shape of a medium."""

    medium: str
    """Sha256 of its bytes."""
    size_bytes: int
    height: int
    """Height in pixels, as it is shown: turned by the file's own orientation."""
    width: int
    frames: int
    """Frames; 1 for an image."""
    fps: float
    """Mean frames per second; 0 for an image."""


def probe(file: BinaryIO, kind: str) -> Facts:
    """Return the facts of a medium.

    Every byte is hashed. An image is decoded; of a video every packet is read and the first frame decoded. Raises
    :class:`ItemError` with the reason if the file is damaged. Errors of reading ``file`` pass unchanged.
    """
    copy, found, size = _copies.copied(file)
    with copy, _clips.damage():
        shape = _video(copy) if kind == "video" else _image(copy)
    return Facts(found, size, *shape)


def _image(file: IO[bytes]) -> tuple[int, int, int, float]:
    with _clips.image(file) as (picture, turn):
        width, height = picture.size[::-1] if turn in _clips.SIDEWAYS else picture.size
        return height, width, 1, 0.0


def _video(file: IO[bytes]) -> tuple[int, int, int, float]:
    with _clips.video(file) as container:
        if not container.streams.video:
            raise ValueError("it has no video stream")
        if (first := next(container.decode(video=0), None)) is None:
            raise ValueError("no frame can be decoded")
        turned = first.rotation % 180 != 0
        height, width = (first.width, first.height) if turned else (first.height, first.width)
        rate = container.streams.video[0].average_rate
        container.seek(0)
        frames = sum(packet.size > 0 for packet in container.demux(video=0))
        return height, width, frames, float(rate or 0)
