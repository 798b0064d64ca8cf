"""Settings, inputs and file names of the stages that prepare datasets without the model that is trained."""

from typing import ClassVar, Literal

from pydantic import Field

from cosmos_rl_core.config.base import NOT_IDENTITY
from cosmos_rl_core.config.shared import StageConfig
from cosmos_rl_core.config.train import AnyCaptioner, AnyDataset
from cosmos_rl_core.datasets._base import Reference

RECORDS = "records/"
"""Prefix of files with times, reasons and answers. All other files are results, and their bytes are the content."""


class Index(StageConfig):
    """One part of a dataset: the items that its sources have gained and lost since the earlier parts."""

    name = "index"
    elastic = True
    version = 2
    torch = False
    inputs = {"parts": "many"}
    ITEMS: ClassVar[str] = "items.parquet"
    """One row per new item, with the digests of its medium and its caption, the facts of the medium, and references."""
    REMOVED: ClassVar[str] = "removed.parquet"
    """One row per item of an earlier part that has gone, or has another medium or caption now."""
    LEFT_OUT: ClassVar[str] = "left_out.parquet"
    """One row per unit or item that cannot be used now, with the reason; earlier parts may list it too."""
    DIFFERING: ClassVar[str] = f"{RECORDS}differing.parquet"
    """One row per item whose files differ though their stamps are equal; written if all files are verified."""
    STAMPS: ClassVar[str] = f"{RECORDS}stamps.parquet"
    """One row per unit of the sources, with the stamp that says whether it has changed."""
    sources: dict[str, AnyDataset]
    """Plugins that list the files, by the names that people give them."""
    stamps: str
    """Digest of the sources' stamps when the Request was made. With other stamps it is another part."""
    verify: bool = Field(default=False, json_schema_extra={"neutral": False})
    """Whether files are read even if their stamps say that they have not changed."""
    captioned: bool = True
    """Whether an item without a caption is left out."""
    min_size: tuple[int, int] = (1, 1)
    """Least height and width in pixels."""
    min_frames: int = 1
    """Fewest frames of a medium."""
    max_frames: int | None = Field(default=None, json_schema_extra={"neutral": None})
    """Most frames of a medium; None for any number."""
    max_seconds: float | None = Field(default=None, json_schema_extra={"neutral": None})
    """Longest duration of a video in seconds; None for any."""
    duplicates: Literal["keep", "drop"] = Field(default="keep", json_schema_extra={"neutral": "keep"})
    """Whether an item is kept or left out if another item has the same medium and caption."""
    max_left_out: float = Field(default=0.05, json_schema_extra=NOT_IDENTITY)
    """Share of all items that may be left out. Affects success, not the result."""
    units_per_shard: int = 256
    """Units in one shard."""


class Caption(StageConfig):
    """Captions for the items of one part of a dataset that have none in their files."""

    name = "caption"
    elastic = True
    version = 1
    torch = False
    inputs = {"parts": "many", "captions": "many"}
    CAPTIONS: ClassVar[str] = "captions.parquet"
    """One row per item that got a caption: the caption, and the captioner that wrote it."""
    REFUSED: ClassVar[str] = f"{RECORDS}refused.parquet"
    """One row per item that got none, with the reason."""
    ASKED: ClassVar[str] = f"{RECORDS}asked.parquet"
    """One row per medium that the captioner was asked about: whether it refused, and the seconds that it took."""
    captioner: AnyCaptioner
    part: int
    """Number of the part that is captioned, among the input ``parts``, which are all parts of the dataset."""
    sources: dict[str, AnyDataset]
    """Plugins that open the media, by the names that people give them."""
    max_left_out: float = Field(default=0.05, json_schema_extra=NOT_IDENTITY)
    """Share of all items that may get no caption. Affects success, not the result."""
    media_per_shard: int = 64
    """Media in one shard."""


class Describe(Caption):
    """The captions of :class:`Caption` from a captioner that needs torch; the ranks share the media."""

    name = "describe"
    version = 1
    distributed = True
    torch = True
    media_per_shard: int = 8

    @property
    def param_dtype(self) -> str:
        """Return the type that the captioner computes in."""
        return getattr(self.captioner, "param_dtype", "float32")


class References(StageConfig):
    """The bytes of the pictures that prompts refer to, in a pool that all runs of a store share."""

    name = "references"
    version = 1
    torch = False
    references: tuple[Reference, ...]
    """The pictures and clips, each once, in the order of their digests."""
