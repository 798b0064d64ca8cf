"""The media of conversations, by their names and digests."""

from collections.abc import Iterator
from contextlib import closing, contextmanager
from typing import BinaryIO

from cosmos_rl_core import plugins
from cosmos_rl_core.config.vlm.chat_datasets import ChatDatasetOptions
from cosmos_rl_core.datasets import _copies
from cosmos_rl_core.datasets._base import ItemError
from cosmos_rl_core.errors import DatasetError
from cosmos_rl_core.storage import store

ADVICE = "restore it, or index again (cosmos-flows rerun RUN --stage index)"


def place_of(options: ChatDatasetOptions, name: str) -> str:
    """Return the path or URL of a medium.

    Raises :class:`ItemError` for a URL of another server than S3, and for a relative name without ``media_path``.
    """
    if "://" in name and not name.startswith("s3://"):
        raise ItemError("media are files, on a disk or in S3; download this one, and name its file")
    if options.media_path and "://" not in name and not name.startswith("/"):
        return store.join(options.media_path, name)
    if "://" not in name and not name.startswith("/"):
        raise ItemError("its name is relative; make it absolute, or set media_path")
    return name


def stream_of(options: ChatDatasetOptions, name: str) -> BinaryIO:
    """Open a medium: a file, or the stream that its dataset's plugin opens.

    Raises like :func:`place_of`, and :class:`FileNotFoundError` if the file is missing.
    """
    of_plugin = getattr(plugins.load("chat_datasets", options.name), "opened", None)
    inside = None if of_plugin is None else of_plugin(options, name)
    return store.stream(place_of(options, name)) if inside is None else inside


@contextmanager
def opened(options: ChatDatasetOptions, name: str, sha256: str) -> Iterator[BinaryIO]:
    """Yield an open copy of a medium. Raises :class:`DatasetError` if it is gone or changed since it was indexed."""
    place = _at(options, name)
    try:
        with closing(stream_of(options, name)) as file:
            copy, found, _ = _copies.copied(file)
    except FileNotFoundError as error:
        raise DatasetError(f"{place} is gone since it was indexed; {ADVICE}") from error
    with copy:
        if found != sha256:
            raise DatasetError(f"{place} has changed since it was indexed; {ADVICE}")
        yield copy


def _at(options: ChatDatasetOptions, name: str) -> str:
    """Return the place of a medium for an error message: its path or URL, or only its name."""
    try:
        return place_of(options, name)
    except ItemError:
        return name
