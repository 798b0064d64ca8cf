"""A folder that ``save_to_disk`` of Hugging Face's ``datasets`` wrote, on a disk or in S3.

A row is an image or a video with its caption, or a prompt, alone or with the pictures that it refers to. Other columns
of text, numbers, and lists and structs of them are metadata; values that JSON does not have (NaN, infinity) and null
are left out of it. One split of a ``DatasetDict`` is read. The package ``datasets`` is not needed.
"""

import math
import threading
from collections.abc import Iterator
from io import BytesIO
from typing import Any, BinaryIO, Literal, NamedTuple

import pyarrow as pa
from pydantic import BaseModel, Field, PositiveInt

from cosmos_rl_core.config.base import NOT_IDENTITY, UserPath
from cosmos_rl_core.config.train import DatasetOptions
from cosmos_rl_core.datasets import _arrow_files
from cosmos_rl_core.datasets._base import Item, ItemError, Picture, Prompt
from cosmos_rl_core.datasets._prompt_files import prompts_of
from cosmos_rl_core.datasets._references import MOST, Span, frame_in
from cosmos_rl_core.datasets._saved_folder import SavedFolder
from cosmos_rl_core.errors import ConfigError
from cosmos_rl_core.storage import store

CAPTIONS = ("prompt", "text", "caption")
"""Columns of captions, in the order in which they are looked for."""
MEDIA: dict[str, Literal["image", "video"]] = {"Image": "image", "Video": "video"}
"""Kind of media by the name of the feature that holds them."""
REFERENCES = "references"
"""Column of references that is read if there is one."""
ABOUT, ARROW = "dataset_info.json", ".arrow"


class Options(DatasetOptions):
    """Folder and columns."""

    name: Literal["hf"] = "hf"  # pyright: ignore[reportIncompatibleVariableOverride]

    local_dir: UserPath = Field(json_schema_extra=NOT_IDENTITY)
    """Path of the folder, or ``s3://bucket/prefix``. The identity of a run holds the prompts, not the path."""
    split: str = ""
    """Split of a folder with several. Default: the only one."""
    caption_column: str = ""
    """Column with the captions or prompts. Default: the first of ``prompt``, ``text``, ``caption``."""
    media_column: str = ""
    """Column with the images or videos. Default: the only one."""
    references_column: str = Field(default="", json_schema_extra={"neutral": ""})
    """Column with the pictures that prompts refer to, one or a list a row. Default: ``references``, if it has any."""
    first_frame: bool = Field(default=False, json_schema_extra={"neutral": False})
    """The first frame of each video is its reference, for models that make a video of a picture. Only prepared datasets
    take it."""
    size: tuple[PositiveInt, PositiveInt] = Field(default=(1024, 1024), json_schema_extra={"neutral": [1024, 1024]})
    """Height and width that first frames are scaled and cropped to: the size of the videos that are trained on."""


def prompts(options: Options) -> tuple[Prompt, ...]:
    """Return the prompts of all rows. Equal texts with equal references and metadata are one.

    Raises one :class:`ConfigError` that lists every row without a text or with a reference that cannot be used, or that
    names the damaged file.
    """
    if options.first_frame:
        raise ConfigError(
            f"{options.local_dir}: rows of prompts have no first frames; prepare a dataset from them (cosmos-flows "
            "preprocess), put pictures into a column of references, or leave first_frame out"
        )
    folder = _Folder(options)
    return prompts_of(options.local_dir, _prompts(folder, folder.references(options.references_column)))


def _prompts(folder: "_Folder", references: str | None) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the place and the object of each row. ``references`` names its column of pictures; None without."""
    for file in folder.stamps:
        url = store.absolute(store.join(folder.url, file))
        rows: list[dict[str, Any]] = []
        try:
            for batch in folder.batches(file):
                given = batch.lists(references) if references else [[]] * batch.rows.num_rows
                for (text, about), places in zip(folder.captions(batch), given, strict=True):
                    spans = {REFERENCES: [Span(url, *place or (0, 0)) for place in places]} if places else {}
                    rows.append(about | spans | {"prompt": text})
        except ItemError as error:
            raise ConfigError(f"{store.join(folder.url, file)}: {error}") from error
        yield from ((f"{file}, row {number}", row) for number, row in enumerate(rows))


class Source:
    """Rows with media. A unit is an Arrow file; an item is named by the file and the number of its row."""

    many = True

    def __init__(self, options: Options):
        self._options = options
        self._places: dict[str, dict[str, tuple[int, int] | None]] = {}
        self._pictures: dict[str, list[tuple[int, int] | None]] = {}
        self._listing = threading.Lock()

    def stamps(self) -> dict[str, str]:
        """Return sizes and times, or ETags, of the Arrow files.

        Raises :class:`ConfigError` if the folder has another layout, or lacks the columns.
        """
        self._folder = _Folder(self._options)
        self._references = self._folder.references(self._options.references_column)
        column, kind = self._medium = self._folder.medium(self._options.media_column, self._references)
        if self._options.first_frame and kind == "image":
            raise ConfigError(f"{self._folder.url}: the column {column} has images; first_frame takes videos here")
        return self._folder.stamps

    def items(self, unit: str) -> list[Item]:
        """Return the items of a file. Raises :class:`ItemError` if it is damaged or has other columns."""
        column, kind = self._medium
        found: list[Item] = []
        here: dict[str, tuple[int, int] | None] = {}
        for batch in self._folder.batches(unit):
            places = batch.places(column)
            given = batch.lists(self._references) if self._references else [[]] * batch.rows.num_rows
            for place, pictures, (caption, metadata) in zip(places, given, self._folder.captions(batch), strict=True):
                name = f"{unit.removesuffix(ARROW)}-{len(found):06d}"
                here[name] = place
                if pictures:
                    self._pictures[name] = pictures
                found.append(Item(name, kind, caption, metadata))
        self._places[unit] = here
        return found

    def open(self, name: str) -> BinaryIO:
        """Open the medium of a row, whose file is read through once if it was not listed.

        Raises :class:`ItemError` if the row has none.
        """
        unit = name.rpartition("-")[0] + ARROW
        with self._listing:
            if unit not in self._places:
                self.items(unit)
        place = self._places[unit][name]
        if place is None:
            raise ItemError(f"no bytes in column {self._medium[0]}; a path alone is not read")
        start, end = place
        return BytesIO(store.read(store.join(self._folder.url, unit), start, end) if end > start else b"")

    def references(self, item: Item) -> list[Picture]:
        """Return the pictures that a row refers to, or the first frame.

        Raises :class:`ItemError` for one without bytes, and for a video that cannot be read.
        """
        pictures = self._pictures.get(item.name, [])
        if self._options.first_frame:
            if pictures:
                raise ItemError("the row has references; leave first_frame out, or the references")
            with self.open(item.name) as file:
                return [Picture(f"{item.name}, frame 0", frame_in(file, item.kind, 0, self._options.size))]
        if len(pictures) > MOST:
            raise ItemError(f"expected at most {MOST} references, found {len(pictures)}")
        if None in pictures:
            raise ItemError(f"reference {pictures.index(None) + 1}: no bytes; a path alone is not read")
        url = store.join(self._folder.url, item.name.rpartition("-")[0] + ARROW)
        spans = (place for place in pictures if place is not None)
        data = (store.read(url, start, end) if end > start else b"" for start, end in spans)
        return [Picture(f"reference {number}", one) for number, one in enumerate(data, 1)]


class _About(BaseModel):
    features: dict[str, Any]


class _Columns(NamedTuple):
    caption: str
    metadata: list[str]


class _Folder:
    """Arrow files of one split, and their columns."""

    url: str
    stamps: dict[str, str]
    """Stamps of the Arrow files, by name."""

    def __init__(self, options: Options) -> None:
        saved = SavedFolder(options.local_dir, options.split)
        self.url, self.stamps = saved.url, saved.stamps
        self._features = saved.json(_About, ABOUT).features
        first = store.join(self.url, next(iter(self.stamps)))
        try:
            self._schema = _arrow_files.schema_of(first)
        except ItemError as error:
            raise ConfigError(f"{first}: {error}") from error
        wanted = [options.caption_column] if options.caption_column else [*CAPTIONS]
        texts = [name for name in wanted if name in self._schema.names and _is_text(self._schema.field(name).type)]
        if not texts:
            raise self._no_column("a text", wanted, "caption_column")
        others = [field.name for field in self._schema if field.name != texts[0] and _is_json(field.type)]
        self._columns = _Columns(texts[0], others)

    def medium(self, wanted: str, references: str | None) -> tuple[str, Literal["image", "video"]]:
        """Return the column with media, and their kind. Raises :class:`ConfigError` unless exactly one fits.

        The column ``references`` is not considered.
        """
        kinds: dict[str, Literal["image", "video"]]
        kinds = {name: MEDIA[kind] for name in self._schema.names if (kind := self._kind(name)) in MEDIA}
        found = [name for name in kinds if wanted in ("", name) and name != references]
        if len(found) != 1 or not _is_medium(self._schema.field(found[0]).type):
            raise self._no_column("one media", [wanted] if wanted else [*kinds], "media_column")
        return found[0], kinds[found[0]]

    def references(self, wanted: str) -> str | None:
        """Return the column with references; None if there is none. Raises :class:`ConfigError` for another type."""
        name = wanted or REFERENCES
        if name in self._schema.names and _has_pictures(self._schema.field(name).type):
            return name
        if wanted or (name in self._schema.names and not _is_json(self._schema.field(name).type)):
            raise self._no_column("images or lists of them in the", [name], "references_column")
        return None

    def batches(self, file: str) -> Iterator[_arrow_files.Batch]:
        """Yield the batches of a file. Raises :class:`ItemError` if it is damaged or has other columns."""
        for batch in _arrow_files.batches(store.join(self.url, file)):
            if not batch.rows.schema.equals(self._schema):
                raise ItemError("its columns differ from the first file's")
            yield batch

    def captions(self, batch: _arrow_files.Batch) -> Iterator[tuple[str | None, dict[str, Any]]]:
        """Yield caption and metadata of each row; None for a caption that is null or blank."""
        text, others = self._columns
        for row in batch.rows.select([text, *others]).to_pylist():
            caption = row.pop(text)
            yield (caption or "").strip() or None, _plain(row)

    def _kind(self, column: str) -> str:
        feature = self._features.get(column)
        return str(feature.get("_type", "")) if isinstance(feature, dict) else ""

    def _no_column(self, kind: str, wanted: list[str], option: str) -> ConfigError:
        columns = ", ".join(f"{field.name} ({self._kind(field.name) or field.type})" for field in self._schema)
        names = f" ({' or '.join(wanted)})" if wanted else ""
        return ConfigError(f"{self.url} needs {kind} column{names}; it has: {columns}; set {option}")


def _is_text(kind: pa.DataType) -> bool:
    return pa.types.is_string(kind) or pa.types.is_large_string(kind)


def _is_medium(kind: pa.DataType) -> bool:
    if not pa.types.is_struct(kind) or (at := kind.get_field_index("bytes")) < 0:
        return False
    return pa.types.is_binary(kind.field(at).type) or pa.types.is_large_binary(kind.field(at).type)


def _has_pictures(kind: pa.DataType) -> bool:
    return _is_medium(kind.value_type if pa.types.is_list(kind) or pa.types.is_large_list(kind) else kind)


def _is_json(kind: pa.DataType) -> bool:
    if pa.types.is_struct(kind):
        return all(_is_json(kind.field(i).type) for i in range(kind.num_fields))
    if pa.types.is_list(kind) or pa.types.is_large_list(kind):
        return _is_json(kind.value_type)
    numbers = pa.types.is_integer(kind) or pa.types.is_float32(kind) or pa.types.is_float64(kind)
    return numbers or pa.types.is_boolean(kind) or _is_text(kind)


def _plain(value: Any) -> Any:
    """Return a value without null, NaN and infinity. ``datasets`` writes null for keys that an object lacks."""
    if isinstance(value, dict):
        return {name: _plain(other) for name, other in value.items() if not _is_absent(other)}
    if isinstance(value, list):
        return [None if _is_absent(other) else _plain(other) for other in value]
    return value


def _is_absent(value: Any) -> bool:
    return value is None or (isinstance(value, float) and not math.isfinite(value))
