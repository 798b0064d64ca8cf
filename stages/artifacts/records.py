"""The sealed files of a slot besides its manifests (:mod:`stages.artifacts.manifest`).

They record how a generation's work is divided, which of its shards are finished, that it was ended, which of its parts
were deleted, and that the artifact of another slot is in its place. Each names the place that it was written for, and
readers check it.
"""

import json
import re
from collections.abc import Iterator
from typing import Any, ClassVar, Self, TypeVar

from pydantic import Field, ValidationError

from cosmos_rl_core.canonical import digest
from cosmos_rl_core.config.base import Section
from cosmos_rl_core.errors import ArtifactError
from cosmos_rl_core.storage import store
from cosmos_rl_core.storage.sealed import RESTORE, seal, unseal
from stages.artifacts.request import InputContents

Found = TypeVar("Found", bound=Section)

ROOTS = ("runs", "dataset")
"""The folders at the root of a store."""


def place_of(slot: str) -> str:
    """Return the slot's path in its store, or its name if it is in no store. It does not change when the store is
    moved.
    """
    names = slot.rstrip("/").split("/")
    return "/".join(names[max((i for i, name in enumerate(names) if name in ROOTS), default=-1) :])


def records_in(folder: str) -> Iterator[tuple[str, str]]:
    """Yield folder and name of each record in the folders of a folder, sorted, such as markers or decisions.

    Files of other programs, such as file managers, are left out.
    """
    for inside in sorted(name for name in store.names(folder) if "." not in name):
        yield from ((inside, name) for name in sorted(store.names(store.join(folder, inside))) if is_record(name))


def is_record(name: str) -> bool:
    """Return whether a file may be a marker or a decision by its name, which is a number."""
    return re.fullmatch(r"[0-9]{4,}\.json", name) is not None


def store_of(url: str) -> str:
    """Return the store that a slot or a folder of slots lies in."""
    return url.rstrip("/").removesuffix(place_of(url)).rstrip("/")


def parsed(kind: type[Found], body: dict[str, Any], url: str) -> Found:
    """Return the section that a sealed body holds. Raises :class:`ArtifactError`, naming ``url``, if it holds none."""
    try:
        return kind.model_validate(body)
    except ValidationError as error:
        raise ArtifactError(f"{url} does not hold the record that this version expects: {error}; {RESTORE}") from error


class FileEntry(Section):
    """One file of an artifact."""

    path: str
    """Relative to the slot."""
    size: int
    sha256: str


class Sealed(Section):
    """The contents of a sealed file. A subclass names its kind."""

    kind: ClassVar[str]

    def sealed(self) -> bytes:
        """Return the file's bytes."""
        return seal(self.kind, self.model_dump(mode="json"))


class Record(Sealed):
    """One sealed file of a slot."""

    place: str
    """The slot, by :func:`place_of`."""
    generation: int = Field(ge=1)

    @classmethod
    def unsealed(cls, data: bytes, url: str, slot: str, generation: int) -> Self:
        """Return the record of a slot's generation from the bytes found at ``url``.

        Raises :class:`ArtifactError` if they are damaged, or were written for another slot or generation.
        """
        return cls.checked(unseal(data, cls.kind, url), url, slot, generation)

    @classmethod
    def checked(cls, body: dict[str, Any], url: str, slot: str, generation: int) -> Self:
        """Return the record of an unsealed body, like :meth:`unsealed`."""
        found = parsed(cls, body, url)
        if (found.place, found.generation) != (place_of(slot), generation):
            raise ArtifactError(
                f"{url} was written for generation {found.generation} of {found.place}, and is found as generation "
                f"{generation} of {place_of(slot)}; put it back, and {RESTORE} what belongs here"
            )
        return found

    @classmethod
    def url(cls, slot: str, generation: int, *part: str) -> str:
        """Return where a slot keeps the record of a generation, or of one part of it."""
        return store.join(slot, ".".join((cls.kind, str(generation), *part, "json")))

    @classmethod
    def read(cls, slot: str, generation: int, *part: str) -> Self | None:
        """Read the record of a generation, or of one part; None if there is none. Raises like :meth:`unsealed`."""
        url = cls.url(slot, generation, *part)
        data = store.read_if_exists(url)
        return None if data is None else cls.unsealed(data, url, slot, generation)


class Layout(Record):
    """The division of the work of a generation."""

    kind = "layout"
    recipe: str
    inputs: InputContents
    layout: dict[str, Any]
    halvings: int = Field(ge=0)
    """How often batches were halved, each time because memory ran out."""
    numerics: dict[str, Any]

    @property
    def shards(self) -> str:
        """Return the folder of finished shards that attempts with this layout, inputs and numerics share."""
        made_from = {"recipe": self.recipe, "inputs": self.inputs, "numerics": self.numerics}
        return shards_of(made_from, self.layout, self.generation)


def shards_of(made_from: dict[str, Any], layout: dict[str, Any], generation: int, **made_by: str) -> str:
    """Return the folder, in a slot, of the finished shards that attempts adopt from each other.

    ``made_from`` has the recipe, the inputs and the numerics.
    """
    return f"shards/{digest(made_from | {'layout': layout, 'generation': generation} | made_by)[:32]}"


class Marker(Record):
    """A record that a shard is finished."""

    kind = "marker"
    layout: str
    """Name of the folder that shards of the same layout and numerics share."""
    index: int = Field(ge=0)
    attempt: str
    files: dict[str, FileEntry]


class Invalidated(Record):
    """A record that a generation was ended."""

    kind = "invalidated"
    manifest: str | None
    """Digest of the bytes of the generation's manifest; None if it had none."""
    reason: str


class Dropped(Record):
    """A record that the files of one part of an artifact were deleted for good."""

    kind = "dropped"
    manifest: str
    """Digest of the bytes of the artifact's manifest."""
    part: str


class Reference(Record):
    """A record in the place of a manifest: it names an artifact in another slot of the store."""

    kind = "reference"
    slot: str
    """Slot that holds the artifact's files, by :func:`stages.artifacts.records.place_of`."""
    made: int = Field(ge=1)
    """The artifact's generation in that slot. A later end of that generation changes nothing here."""
    manifest: str
    """Digest of the bytes of the artifact's manifest."""
    fingerprint: str

    @classmethod
    def found(cls, data: bytes, url: str, slot: str, generation: int) -> Self | None:
        """Return the reference that lies in the place of a manifest; None if ``data`` is something else.

        Raises :class:`ArtifactError` if it is damaged, or was written for another slot or generation.
        """
        if b'"kind":"reference"' not in data:
            return None
        try:
            if json.loads(data)["body"]["kind"] != cls.kind:
                return None
        except (ValueError, TypeError, KeyError):
            return None
        return cls.unsealed(data, url, slot, generation)

    def source(self, slot: str) -> str:
        """Return the URL of the slot that it names, in the store of the slot that it was found in."""
        url = store.join(store_of(slot), self.slot)
        if self.slot == self.place:
            raise ArtifactError(f"{slot} refers to itself; restore it from a copy")
        return url


class Pinned(Sealed):
    """The numerics of a stage's first artifact in a run. Later artifacts must have equal ones."""

    kind = "numerics"
    stage: str
    numerics: dict[str, Any]

    @classmethod
    def read(cls, url: str, stage: str) -> Self | None:
        """Read the numerics at ``url``; None if there are none. Raises :class:`ArtifactError` for another stage's."""
        data = store.read_if_exists(url)
        if data is None:
            return None
        found = parsed(cls, unseal(data, cls.kind, url), url)
        if found.stage != stage:
            raise ArtifactError(f"{url} was written for {found.stage}, expected {stage}; {RESTORE}")
        return found
