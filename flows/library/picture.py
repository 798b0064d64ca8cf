"""One sample's picture or video, read when it is looked at."""

import base64
import io
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from PIL import Image

from cosmos_rl_core.storage import media
from stages.contracts import MEDIA
from stages.formats.members import Members
from stages.formats.samples import unit_name

FRAME_S = 1 / media.FPS


@dataclass(frozen=True)
class Picture:
    """A picture or a video of a sample. A notebook shows it; :meth:`pixels` and :meth:`save` give it to programs.

    Every access reads it again and checks its bytes. Raises :class:`ArtifactError` if they are not the bytes that were
    committed, or if the run keeps newer media only.
    """

    sample_id: str
    _unit: int
    _members: Members = field(repr=False, compare=False)

    def pixels(self) -> np.ndarray:
        """Return uint8 RGB ``[frames, height, width, 3]``; a picture has one frame."""
        return media.decode(*self.file())

    def file(self) -> tuple[str, bytes]:
        """Return the extension and the bytes of the lossless file: ``png``, or ``mkv`` for a video."""
        shard = unit_name(MEDIA, self._unit)
        names = self._members.names(shard)
        extension = media.IMAGE if f"{self.sample_id}.{media.IMAGE}" in names else media.VIDEO
        return extension, self._members.read(shard, f"{self.sample_id}.{extension}")

    def save(self, folder: str | Path) -> Path:
        """Write the lossless file ``<sample id>.<extension>`` into a folder, and return its path."""
        extension, data = self.file()
        path = Path(folder).expanduser() / f"{self.sample_id}.{extension}"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
        return path

    def _repr_html_(self) -> str:
        """Return an ``<img>`` for notebooks; a video is an animated WebP, which browsers play."""
        first, *others = (Image.fromarray(frame) for frame in self.pixels())
        buffer = io.BytesIO()
        moving = {"save_all": True, "append_images": others, "duration": 1000 * FRAME_S, "loop": 0} if others else {}
        first.save(buffer, format="WEBP", lossless=True, **moving)
        data = base64.b64encode(buffer.getvalue()).decode()
        return f'<img alt="{self.sample_id}" src="data:image/webp;base64,{data}">'
