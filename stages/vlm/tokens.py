"""Conversations as tokens, labels and named media, as they lie in artifacts."""

import io
from collections.abc import Mapping
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch

from cosmos_rl_core.config.vlm.chat_datasets import ChatDatasetOptions
from cosmos_rl_core.conversations.encoding import IGNORED, Encoded
from cosmos_rl_core.errors import DatasetError
from cosmos_rl_core.vlms._prompts import Prompts
from stages.artifacts.artifact import Artifact
from stages.formats.tables import read_table
from stages.vlm.contracts import VlmTokenize
from stages.vlm.media import opened

_MEDIUM = pa.struct(
    [(name, pa.string()) for name in ("kind", "source", "name", "sha256")]
    + [(name, pa.int32()) for name in ("begin", "end")]
)
_SCHEMA = pa.schema(
    [
        ("id", pa.string()),
        ("input_ids", pa.list_(pa.int32())),
        ("labels", pa.list_(pa.int32())),
        ("media", pa.list_(_MEDIUM)),
    ]
)
SHARDS_IN_MEMORY = 8
"""Most shards that a reader keeps in memory, the latest ones."""


class Medium(NamedTuple):
    """A medium and the range of its tokens."""

    kind: str
    source: str
    """Name of its dataset."""
    name: str
    sha256: str
    begin: int
    end: int


class Row(NamedTuple):
    """A conversation in a shard."""

    id: str
    input_ids: list[int]
    labels: list[int]
    """Begins and ends of the ranges of tokens with labels, one after the other."""
    media: list[dict[str, Any]]


def row_of(conversation: str, encoded: Encoded, names: list[tuple[str, str, str, str]]) -> Row:
    """Return the row of a conversation, given kind, dataset, name and digest of all its media."""
    has = np.concatenate([[0], (encoded.labels != IGNORED).numpy().astype(np.int8), [0]])
    edges = np.flatnonzero(np.diff(has)).tolist()
    media = [Medium(*name, *place)._asdict() for name, place in zip(names, encoded.places, strict=False)]
    return Row(conversation, encoded.input_ids.tolist(), edges, media)


def to_shard(rows: list[Row]) -> bytes:
    """Return rows as the bytes of a file."""
    buffer = io.BytesIO()
    pq.write_table(pa.Table.from_pylist([row._asdict() for row in rows], schema=_SCHEMA), buffer)
    return buffer.getvalue()


def rows_in(data: bytes) -> list[Row]:
    """Return the rows of a file."""
    return [Row(**row) for row in pq.read_table(io.BytesIO(data)).to_pylist()]


class Tokens:
    """The conversations of an artifact, each read when it is asked for."""

    def __init__(self, artifact: Artifact) -> None:
        self.artifact = artifact
        self.index: Any = read_table(artifact, VlmTokenize.INDEX)
        """One row per conversation."""
        self._places = [*zip(self.index["shard"].tolist(), self.index["row"].tolist(), strict=True)]
        self._shard = lru_cache(SHARDS_IN_MEMORY)(lambda name: rows_in(artifact.read(name)))

    def __len__(self) -> int:
        return len(self.index)

    def row(self, number: int) -> Row:
        """Return a conversation by its number in the index."""
        shard, row = self._places[number]
        return self._shard(shard)[row]


class Conversations:
    """The conversations of an artifact as inputs of the model. Media are read and processed at each access."""

    def __init__(self, tokens: Tokens, prompts: Prompts, sources: Mapping[str, ChatDatasetOptions]) -> None:
        self.tokens, self.prompts, self.sources = tokens, prompts, sources

    def __getitem__(self, number: int) -> Encoded:
        """Return a conversation. Raises :class:`DatasetError` if a medium has other bytes or gives other tokens now."""
        row = self.tokens.row(number)
        ids = torch.tensor(row.input_ids, dtype=torch.int64, device="cpu")
        labels = torch.full_like(ids, IGNORED, device="cpu")
        for begin, end in zip(row.labels[::2], row.labels[1::2], strict=True):
            labels[begin:end] = ids[begin:end]
        kinds = self.prompts.kinds(ids)
        media = [Medium(**medium) for medium in row.media]
        visuals = []
        for medium in media:
            with opened(self.sources[medium.source], medium.name, medium.sha256) as file:
                visuals.append(self.prompts.visual({"type": medium.kind, medium.kind: file}, 1))
            token = self.prompts.processor.placeholders["video" if medium.kind == "video" else "image"]
            found, expected = visuals[-1].text.count(token), int((kinds[medium.begin : medium.end] > 0).sum())
            if found != expected:
                raise DatasetError(
                    f"{medium.name} gives {found} tokens, expected {expected} as when it was tokenized; use the "
                    "packages of that time, or plan another run"
                )
        return Encoded(ids, labels, kinds, visuals, [(medium.begin, medium.end) for medium in media])
