"""Generated samples on disk, in units; `rollout` and `evaluate` write them.

Unit ``n`` has one file in each part of the artifact:

- ``media/<n>.tar``: ``<id>.png`` or ``<id>.mkv``, lossless, the pixels that rewards score; ``<id>.json`` for people;
- ``tensors/<n>.tar``, of rollouts only: ``<id>.safetensors`` with the final latents and the recorded sampler steps;
- ``index/<n>.json``: one row per sample with all other facts of it: prompt, seeds, noise levels, policy.

A sample whose row has ``"finite": false`` has no picture, and is never scored or trained on. A sample whose row has
``"decoded": false`` has no picture either, but its latents may be decoded later.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import pandas as pd
from safetensors.numpy import load

from cosmos_rl_core.canonical import canonical_json
from cosmos_rl_core.errors import ArtifactError
from cosmos_rl_core.storage import media, shards
from stages.artifacts.artifact import Artifact
from stages.artifacts.records import FileEntry
from stages.contracts import INDEX, MEDIA, TENSORS

KB_PER_SAMPLE = "kb_per_sample"
"""Key of the summary: the mean size of a sample's files in kB, with its share of the unit's index."""
REFUSED, BY_GUARDRAIL = "refused", "refused by the guardrail"
"""Key of the index for the reason why a decoded sample was not kept, and that reason. Other rows lack the key."""


DECODED = "decoded"
"""Key of the index, False for a finite sample whose latents were not decoded. Other rows lack the key."""


class Files(Protocol):
    """Files by name, read with every byte checked: an :class:`Artifact`, or the finished files of one."""

    def entry(self, name: str) -> FileEntry:
        """Return the size and digest of a file."""
        ...

    def read(self, name: str) -> bytes:
        """Return the bytes of a file."""
        ...

    def json(self, name: str) -> Any:
        """Return the contents of a JSON file."""
        ...


@dataclass(frozen=True)
class StoredSample:
    """One sample of a unit, with the parts of it that were read or made."""

    row: dict[str, Any]
    """The sample's row of the index."""
    extension: str = ""
    media: bytes = b""
    """The encoded picture or video; empty if there is none or it was not read."""
    tensors: bytes | None = None
    """A safetensors file; None if the sample has none or they were not read."""

    @property
    def sample_id(self) -> str:
        """Return the sample's id, unique in a run."""
        return self.row["sample_id"]

    @property
    def finite(self) -> bool:
        """Return whether latents and pixels are finite and no guardrail refused them."""
        return self.row["finite"]

    @property
    def has_media(self) -> bool:
        """Return whether there is a picture."""
        return has_media(self.row)

    @property
    def why_lost(self) -> str:
        """Return why a sample is lost, ``is not finite`` or ``was refused by ...``; "" if it is not lost."""
        return "" if self.finite else f"was {self.row[REFUSED]}" if REFUSED in self.row else "is not finite"

    @property
    def pixels(self) -> np.ndarray:
        """Return uint8 RGB ``[frames, height, width, 3]``. Raises :class:`ArtifactError` if there is no picture."""
        if self.why_lost:
            raise ArtifactError(f"sample {self.sample_id} {self.why_lost}: it has no picture")
        if not self.has_media:
            raise ArtifactError(f"sample {self.sample_id} was not decoded; `cosmos-flows decode` makes its picture")
        return media.decode(self.extension, self.media)

    @property
    def final_latents(self) -> np.ndarray | None:
        """Return the final latents, normalised, float32 ``[C, H, W]`` or ``[C, T, H, W]``; None if not read."""
        return None if self.tensors is None else load(self.tensors)["latents"]


def has_media(row: Mapping[str, Any]) -> bool:
    """Return whether the sample of a row of the index has a picture."""
    return row["finite"] and row.get(DECODED, True)


def unit_name(part: str, number: int) -> str:
    """Return the name of a unit's file in one part."""
    return f"{part}/{number:05d}.{'json' if part == INDEX else 'tar'}"


def num_units(artifact: Artifact) -> int:
    """Return the number of units of an artifact."""
    return len(artifact.names(f"{INDEX}/"))


def unit_files(number: int, samples: list[StoredSample]) -> dict[str, bytes]:
    """Return the files of a unit by name: its index, its media, and its tensors if the samples have any."""
    pictures = {f"{s.sample_id}.json": canonical_json(s.row) for s in samples}
    pictures |= {f"{s.sample_id}.{s.extension}": s.media for s in samples if s.has_media}
    tensors = {f"{s.sample_id}.safetensors": s.tensors for s in samples if s.tensors is not None}
    files = {
        unit_name(INDEX, number): canonical_json([s.row for s in samples]),
        unit_name(MEDIA, number): shards.pack(pictures),
    }
    return files | ({unit_name(TENSORS, number): shards.pack(tensors)} if tensors else {})


def read_rows(artifact: Files, number: int) -> list[dict[str, Any]]:
    """Read the index of one unit: one row per sample, in the order of generation."""
    return artifact.json(unit_name(INDEX, number))


def all_rows(artifact: Artifact) -> Iterator[dict[str, Any]]:
    """Read the index of all units: one row per sample, in order, with the number of its ``unit``."""
    for number in range(num_units(artifact)):
        yield from (row | {"unit": number} for row in read_rows(artifact, number))


def read_index(artifact: Artifact) -> pd.DataFrame:
    """Return the rows of :func:`all_rows` as a table."""
    return pd.DataFrame(list(all_rows(artifact)))


def undecoded(table: Any) -> Any:
    """Return a Boolean column for the index ``table``: whether a sample is finite and was not decoded."""
    return table[DECODED].eq(False) if DECODED in table else table["finite"].isna()


def read_unit(artifact: Files, number: int, part: str = MEDIA) -> Iterator[StoredSample]:
    """Read one unit's samples with their media or their tensors, in the order of generation."""
    files = shards.unpack(artifact.read(unit_name(part, number)))
    for row in read_rows(artifact, number):
        name = row["sample_id"]
        if part == TENSORS:
            yield StoredSample(row, tensors=files[f"{name}.safetensors"])
        elif has_media(row):
            extension = media.IMAGE if f"{name}.{media.IMAGE}" in files else media.VIDEO
            yield StoredSample(row, extension, files[f"{name}.{extension}"])
        else:
            yield StoredSample(row)


def read_samples(artifact: Artifact, part: str = MEDIA) -> Iterator[StoredSample]:
    """Read all samples of an artifact with their media or their tensors, in order."""
    for number in range(num_units(artifact)):
        yield from read_unit(artifact, number, part)


def key_of(place: int, sample_id: str) -> str:
    """Return the key, within an update, of a sample of the update's ``place``-th rollout."""
    return f"{place}/{sample_id}"


def place_of(key: str) -> tuple[int, str]:
    """Return the place of the rollout and the sample's id that a key of :func:`key_of` names."""
    place, _, sample_id = key.partition("/")
    return int(place), sample_id
