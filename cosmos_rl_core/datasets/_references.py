"""Pictures that prompts refer to: read when a run is planned, and decoded from the store when it runs."""

import hashlib
import io
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image, ImageOps

from cosmos_rl_core.datasets._base import Reference

MOST = 8
"""Most references of a prompt."""
MOST_BYTES, MOST_PIXELS = 64 * 2**20, 2**26
"""Of a file, and of its picture."""


def read_reference(path: Path) -> Reference:
    """Return the reference in a file. Raises ``ValueError`` for a file that is not one whole picture of usual size."""
    if not path.is_file():
        raise ValueError(f"no file at {path}")
    try:
        data = path.read_bytes()
        height, width = decoded(data).shape[1:3]
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error}") from error
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error
    return Reference(digest=hashlib.sha256(data).hexdigest(), height=height, width=width, source=str(path.absolute()))


class References:
    """References by their paths, relative to a folder. Each file is read once."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._known: dict[str, Reference] = {}

    def at(self, paths: Any) -> tuple[Reference, ...]:
        """Return the references at a list of paths.

        Raises ``ValueError`` for another value, for too many, and for a file that cannot be used.
        """
        if not isinstance(paths, list) or not all(isinstance(path, str) and path for path in paths):
            raise ValueError(f'expected "references" to be a list of paths of pictures, found {paths!r:.80}')
        if len(paths) > MOST:
            raise ValueError(f'"references" has {len(paths)} paths, at most {MOST} are taken')
        for path in paths:
            if path not in self._known:
                self._known[path] = read_reference(self.folder / path)
        return tuple(self._known[path] for path in paths)


def decoded(data: bytes) -> np.ndarray:
    """Return the picture in the bytes of a file, as it is shown: uint8 RGB ``[1, height, width, 3]``.

    Transparent parts are white. Raises ``ValueError`` unless it is one whole picture of usual size.
    """
    if len(data) > MOST_BYTES:
        raise ValueError(f"{len(data) / 2**20:.0f} MiB, at most {MOST_BYTES // 2**20} are taken; make the file smaller")
    try:
        with Image.open(io.BytesIO(data)) as picture:
            if (frames := getattr(picture, "n_frames", 1)) > 1:
                raise ValueError(f"an animation of {frames} pictures; expected one picture, such as PNG")
            if picture.width * picture.height > MOST_PIXELS:
                size = f"{picture.height} x {picture.width} pixels"
                raise ValueError(f"{size}, at most {MOST_PIXELS} are taken; make the picture smaller")
            return np.asarray(_opaque(ImageOps.exif_transpose(picture)))[None]
    except (OSError, SyntaxError, Image.DecompressionBombError) as error:
        raise ValueError(f"no picture that can be decoded: {error}") from error


def _opaque(picture: Image.Image) -> Image.Image:
    if not picture.has_transparency_data:
        return picture.convert("RGB")
    picture = picture.convert("RGBA")
    return Image.alpha_composite(Image.new("RGBA", picture.size, "white"), picture).convert("RGB")
