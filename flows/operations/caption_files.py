"""A file with one and the same caption for each medium of a folder, with the bytes of cosmos-predict2.5's script."""

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from cosmos_rl_core.errors import ConfigError, unwritten
from cosmos_rl_core.storage import store

EXIT_CODES = {"images": 1, "videos": 2}
"""Exit code of that script if the folder of media is missing."""


class NoMediaError(ConfigError):
    """A folder of media that is missing."""

    def __init__(self, folder: Path) -> None:
        super().__init__(f"no folder {folder}; expected {'.jpg' if folder.name == 'images' else '.mp4'} files in it")
        self.own_exit_code = EXIT_CODES[folder.name]


@dataclass(frozen=True)
class Written:
    """Captions in files of a folder."""

    prompt: str
    folder: str
    created: int
    """Number of new files."""
    total: int
    """Number of all files of captions in the folder."""

    def lines(self) -> Iterator[str]:
        """Yield the lines to print, as the script does."""
        yield f"Creating prompt files with text: {self.prompt}"
        yield f"Created {self.created} prompt files in {self.folder}"
        yield f"Total prompt files: {self.total}"


def write_captions(folder: str, prompt: str, *, is_image: bool) -> Written:
    """Write ``metas/<stem>.txt`` next to ``videos/*.mp4`` or ``images/*.jpg`` where there is none.

    The file is the prompt, without a newline. Raises :class:`NoMediaError` if the folder of media is missing.
    """
    media = Path(folder, "images" if is_image else "videos")
    if not media.is_dir():
        raise NoMediaError(media)
    try:
        data = prompt.encode()
    except UnicodeError as error:
        raise ConfigError(f"the prompt is no text that can be encoded: {error}") from error
    metas = Path(folder, "metas")
    try:
        metas.mkdir(exist_ok=True)
    except OSError as error:
        raise unwritten(metas, error) from error
    created = 0
    for medium in sorted(media.glob("*.jpg" if is_image else "*.mp4")):
        file = metas / f"{medium.stem}.txt"
        if not os.path.lexists(file) and store.put_if_absent(str(file), data):
            created += 1
    return Written(prompt, str(metas), created, len([*metas.glob("*.txt")]))
