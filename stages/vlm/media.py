"""The media of conversations, by their names and digests."""

from collections.abc import Iterator
from contextlib import closing, contextmanager
from typing import BinaryIO

from cosmos_rl_core.config.vlm.chat_datasets import ChatDatasetOptions
from cosmos_rl_core.datasets import _copies
from cosmos_rl_core.datasets._base import ItemError
from cosmos_rl_core.errors import DatasetError
from cosmos_rl_core.storage import store


def place_of(options: ChatDatasetOptions, name: str) -> str:
    """Return the path or URL of a medium. Raises :class:`ItemError` for a name that another server would be asked for.

    Without ``media_path`` names are absolute.
    """
    if "://" in name and not name.startswith("s3://"):
        raise ItemError("media are files, on a disk or in S3; fetch it, and name the file")
    if options.media_path and "://" not in name and not name.startswith("/"):
        return store.join(options.media_path, name)
    if "://" not in name and not name.startswith("/"):
        raise ItemError("its name is relative; set media_path")
    return name


@contextmanager
def opened(options: ChatDatasetOptions, name: str, sha256: str) -> Iterator[BinaryIO]:
    """Open a copy of a medium. Raises :class:`DatasetError` if its bytes are not the indexed ones."""
    place = place_of(options, name)
    try:
        with closing(store.stream(place)) as file:
            copy, found, _ = _copies.copied(file)
    except FileNotFoundError as error:
        raise DatasetError(f"{place} is gone since it was indexed; restore it, or start another run") from error
    with copy:
        if found != sha256:
            raise DatasetError(f"{place} has changed since it was indexed; restore it, or start another run")
        yield copy
