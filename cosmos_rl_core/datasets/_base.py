"""Interface of dataset plugins.

A plugin file has a class ``Options`` (a :class:`DatasetOptions`) and the function ``prompts``. A dataset with media is
a :class:`MediaPlugin`, with a class ``Media`` and the function ``digest``. A dataset whose files can be indexed has a
class ``Source``.
"""

import hashlib
from collections.abc import Callable, Sequence
from typing import Any, BinaryIO, Literal, NamedTuple, Protocol

import numpy as np
from pydantic import Field

from cosmos_rl_core.config.base import NOT_IDENTITY, Section
from cosmos_rl_core.errors import ConfigError


class Reference(Section):
    """A picture or a clip that a prompt refers to."""

    digest: str = Field(pattern="^[0-9a-f]{64}$")
    """The sha256 of the bytes of its file."""
    height: int
    """Height in pixels of the upright picture; ``width`` likewise."""
    width: int
    frames: int = Field(default=1, json_schema_extra={"neutral": 1})
    """Number of frames, from the end of a clip, that models and rewards get; 1 for a picture."""
    source: str = Field(default="", json_schema_extra=NOT_IDENTITY)
    """Path or URL of the file that the plan read. The store keeps its bytes once the run has begun."""
    span: tuple[int, int] | None = Field(default=None, json_schema_extra=NOT_IDENTITY)
    """Offsets in the file at which its bytes begin and end; None for the whole file."""
    frame: int | None = Field(default=None, json_schema_extra=NOT_IDENTITY)
    """Number of the frame of a medium that is this picture, scaled and cropped; None for a file of its own."""

    @property
    def place(self) -> str:
        """Return the place from which its bytes were read, for messages."""
        if self.frame is not None:
            return f"{self.source}, frame {self.frame}"
        return self.source if self.span is None else "{}, bytes {} to {}".format(self.source, *self.span)


class Prompt(Section):
    """One prompt. Samples are grouped by ``id``, never by text."""

    id: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9.-]*$")
    """Stable id, unique within its prompt set, safe as a file name."""
    text: str
    """Input of the text encoder."""
    metadata: dict[str, Any] = {}
    """JSON values for rewards, e.g. the objects and counts that geneval looks for."""
    references: tuple[Reference, ...] = Field(default=(), json_schema_extra={"neutral": []})
    """Pictures or clips that the model conditions on, in order."""

    def __hash__(self) -> int:
        return hash((self.id, self.text))


def prompt_id(text: str, references: Sequence[str] = ()) -> str:
    """Return an id that depends on the prompt's text and the digests of its references alone, not on its dataset."""
    # No text has a zero byte, so no other prompt has these bytes.
    found = "\0".join([text, *references])
    return f"p-{hashlib.sha256(found.encode()).hexdigest()[:16]}"


class Media(Protocol):
    """Media set with random access: item ``i`` is the same on every machine, in every order."""

    prompts: tuple[Prompt, ...]
    """The prompts of all items."""
    item_ids: tuple[str, ...]
    """Id of each item: stable when items are added, safe as a file name."""

    @property
    def shape(self) -> tuple[int, int, int]:
        """Return frames, height and width of every item, from the options alone."""
        ...

    def __len__(self) -> int: ...

    def prompt_of(self, index: int) -> Prompt:
        """Return the prompt of item ``index`` without reading its pixels. Raises ``IndexError`` beyond the set."""
        ...

    def item(self, index: int) -> tuple[np.ndarray, Prompt]:
        """Return item ``index``: uint8 RGB pixels ``[frames, height, width, 3]`` (images: 1 frame), and its prompt.

        Raises :class:`ItemError` if its file cannot be used.
        """
        ...

    def fault(self, index: int) -> str | None:
        """Return the name of item ``index``'s file and why it cannot be used, or None. Decodes little of it."""
        ...


class MediaPlugin(Protocol):
    """Module of a dataset plugin with media."""

    Media: Callable[[Any], Media]

    def prompts(self, options: Any) -> tuple[Prompt, ...]:
        """Return the prompts of all items. Raises one :class:`ConfigError` with every mistake in the set."""
        ...

    def digest(self, options: Any) -> str:
        """Return the digest of names and bytes of the files that are read; "" if options define all items."""
        ...


class ItemError(ConfigError):
    """An item whose files cannot be used. The message says why. Only other files can help, no retry."""


class Item(NamedTuple):
    """A medium with its caption, as a source lists it. Nothing of the medium is decoded."""

    name: str
    """Name that is unique in the source, such as the stem of the item's files."""
    kind: Literal["image", "video"]
    caption: str | None
    """Caption of the medium; None if there is none yet."""
    metadata: dict[str, Any] = {}
    """JSON values next to the caption."""


class Picture(NamedTuple):
    """A picture that a caption refers to, as a source reads it."""

    name: str
    """Name of the picture in messages."""
    data: bytes


class Source(Protocol):
    """Files of media and captions, in units that change as a whole: the files of an item, or a shard of items.

    A source whose units are shards of many items may set ``many = True``: then few units are read at once. A source
    whose captions refer to pictures has a method ``references``. It takes an item that the source has just listed, and
    returns a :class:`Picture` for each reference, in order, or raises :class:`ItemError` if one cannot be read.
    """

    def stamps(self) -> dict[str, str]:
        """Return a stamp of each unit, by its name. Reads no file: a unit with an equal stamp counts as unchanged."""
        ...

    def items(self, unit: str) -> list[Item]:
        """Return the items of a unit. Raises :class:`ItemError` with the reason if it cannot be used."""
        ...

    def open(self, name: str) -> BinaryIO:
        """Open the medium of an item, by the item's name, as a seekable file.

        Raises :class:`ItemError` if it cannot be used, ``FileNotFoundError`` or ``KeyError`` if it has gone.
        """
        ...
