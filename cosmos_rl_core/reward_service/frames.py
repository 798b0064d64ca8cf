"""Frames: bodies of requests in cosmos-rl's protocol. Each is a line of JSON and an array of samples.

Nothing of a frame is unpickled: the header of the ``.npy`` bytes is parsed alone, and their data is mapped. Arrays of
the prompts' references may follow, which cosmos-rl's protocol does not have.
"""

import json
import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Literal

import numpy as np

from cosmos_rl_core.datasets._references import MOST
from cosmos_rl_core.rewards._base import STORED_FPS
from cosmos_rl_core.rewards._base.answers import brief, finite

MAX_LINE_BYTES = 4 * 2**20
"""Largest line of JSON."""
MAX_HEADER_BYTES = 4096
"""Largest header of an array; numpy's takes 128 bytes."""
MAX_DEPTH = 32
"""Largest number of nested levels of lists and objects in the line of JSON. Messages to and from scorers add levels."""
MAX_SAMPLES = 4096
LATENT_CHANNELS = (16, 48)
"""Channels of latents of Wan 2.1 and Wan 2.2."""
SCORERS, REFERENCES = "scorers", "references"
"""Keys in the line of JSON: of the digests of the scorers that a client expects, by reward, and of the indices of each
sample's references among the arrays that follow the samples.
"""
Media = Literal["image", "video", "latent"]

_MAGIC = b"\x93NUMPY\x01\x00"
_GENEVAL = {"geneval_tags": "tag", "geneval_includes": "include"}
"""Keys that cosmos-rl's clients send, and the keys of the same values in GenEval's own metadata."""
_TOO_DEEP = f"the first line is nested too deeply; expected at most {MAX_DEPTH} levels"
_PICKLES = (b"PK\x03\x04", b"\x80")
"""First bytes of files by ``torch.save`` and ``pickle``."""


class FrameError(ValueError):
    """Bytes that are no frame. The message says what was found and what was expected."""


@dataclass(frozen=True)
class Stored:
    """An array in the file of a frame."""

    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    order: Literal["C", "F"]
    offset: int
    """Byte of the file at which its data begins."""

    def mapped(self, path: Path) -> np.ndarray:
        """Return the array of the file, mapped, read-only."""
        return np.memmap(path, self.dtype, "r", self.offset, self.shape, self.order)


@dataclass(frozen=True)
class Frame:
    """Facts of a frame; its arrays stay in the file."""

    prompts: tuple[str, ...]
    rewards: tuple[str, ...]
    """Names of the rewards that are asked for, in their order."""
    media: Media
    samples: Stored
    references: tuple[tuple[Stored, ...], ...]
    """The references of each sample's prompt, each uint8 ``[frames, height, width, 3]``."""
    metadata: tuple[Mapping[str, Any], ...]
    """The JSON values of each sample's prompt."""
    video_infos: tuple[Mapping[str, Any], ...] | None
    fps: tuple[float, ...]
    """Frames per second of each sample that is a video."""
    scorers: Mapping[str, str]
    """Digest of the scorer that the client expects, by the name of the reward."""

    @property
    def dtype(self) -> np.dtype[Any]:
        """Return the type of the samples' numbers."""
        return self.samples.dtype

    @property
    def shape(self) -> tuple[int, ...]:
        """Return the shape of all samples."""
        return self.samples.shape

    @property
    def kind(self) -> str:
        """Return a text that is equal for frames that can be scored together."""
        return f"{self.media} {self.dtype} {self.shape[1:]}"

    def array(self, path: Path) -> np.ndarray:
        """Return the samples of the file, mapped, read-only."""
        return self.samples.mapped(path)


def read(path: Path) -> Frame:
    """Read the line of JSON and the arrays' headers in a file. Raises :class:`FrameError` unless it is one frame."""
    with path.open("rb") as file:
        about, size = _about(file.readline(MAX_LINE_BYTES + 1)), path.stat().st_size
        numbers = _numbers(about)
        count = len({one for row in numbers for one in row})
        samples = _stored(file, size, last=count == 0)
        pictures = [_stored(file, size, last=i == count - 1) for i in range(count)]
    media, shape = _media(about), samples.shape
    _check_array(media, samples.dtype, shape)
    for one in pictures:
        _check_reference(one)
    prompts = _prompts(about, shape[0])
    if numbers and len(numbers) != shape[0]:
        raise FrameError(f"{REFERENCES}: {len(numbers)} lists for {shape[0]} samples")
    return Frame(
        prompts=tuple(prompts),
        rewards=_rewards(about),
        media=media,
        samples=samples,
        references=tuple(tuple(pictures[i] for i in row) for row in numbers or [()] * shape[0]),
        metadata=tuple(_metadata(about, shape[0])),
        video_infos=_rows(about, "video_infos", shape[0]),
        fps=tuple(_fps(about, shape[0])),
        scorers=_scorers(about),
    )


def _about(line: bytes) -> dict[str, Any]:
    if not line.endswith(b"\n"):
        found = f"no newline in the first {MAX_LINE_BYTES} bytes" if len(line) > MAX_LINE_BYTES else "no newline"
        raise FrameError(f"{found}; expected a line of JSON, a newline and the bytes of an .npy file")
    try:
        about = json.loads(line, parse_constant=_refuse, parse_float=_finite)
        # JSON can spell half a surrogate pair, which no file can hold.
        json.dumps(about, ensure_ascii=False).encode()
    except (ValueError, RecursionError) as error:
        if isinstance(error, RecursionError):
            raise FrameError(_TOO_DEEP) from error
        raise FrameError(f"the first line is no JSON: {brief(error)}") from error
    if not isinstance(about, dict):
        raise FrameError("the first line is no JSON object")
    if _is_deeper(about, MAX_DEPTH):
        raise FrameError(_TOO_DEEP)
    return about


def _refuse(constant: str) -> Any:
    raise ValueError(f"{constant} is no JSON number")


def _finite(text: str) -> float:
    if not math.isfinite(value := float(text)):
        raise ValueError(f"{brief(text)} is larger than any float")
    return value


def _is_deeper(value: Any, levels: int) -> bool:
    """Return whether lists and objects are nested in more than so many levels."""
    if not isinstance(value, dict | list):
        return False
    parts = value.values() if isinstance(value, dict) else value
    return levels == 0 or any(_is_deeper(part, levels - 1) for part in parts)


def _stored(file: BinaryIO, size: int, *, last: bool) -> Stored:
    """Return the array that begins at the file's position, and go to its end.

    Raises :class:`FrameError` if the file, of ``size`` bytes, ends before it, or goes on after the ``last`` array.
    """
    dtype, shape, order = _header(file)
    offset = file.tell()
    data, expected = size - offset, math.prod(shape) * dtype.itemsize
    if data < expected or (last and data != expected):
        raise FrameError(f"{data} bytes after the array's header; its shape {shape} of {dtype} takes {expected}")
    file.seek(offset + expected)
    return Stored(dtype, shape, order, offset)


def _header(file: BinaryIO) -> tuple[np.dtype[Any], tuple[int, ...], Literal["C", "F"]]:
    """Return dtype, shape and order of the array whose header begins here."""
    magic = file.read(len(_MAGIC))
    if magic.startswith(_PICKLES):
        raise FrameError("the array is a pickle, as torch.save writes it, and pickles are not read; use numpy.save")
    if magic != _MAGIC:
        raise FrameError(f"the array begins with {magic!r}; expected an .npy file of version 1.0, from numpy.save")
    try:
        fortran: bool
        shape, fortran, dtype = np.lib.format.read_array_header_1_0(file, max_header_size=MAX_HEADER_BYTES)
    except Exception as error:  # what numpy raises depends on the nonsense that it reads
        raise FrameError(f"the header of the .npy bytes cannot be read: {brief(error)}") from error
    if dtype.hasobject or dtype.names is not None or dtype.kind not in "uif" or dtype.itemsize > 8:
        raise FrameError(f"an array of {brief(dtype)}; expected numbers of at most 8 bytes")
    if not dtype.isnative:
        raise FrameError(f"an array of {brief(dtype)}; expected the byte order of this machine ({sys.byteorder})")
    if min(shape, default=0) < 0:
        raise FrameError(f"an array of the shape {shape}; expected no number below 0")
    return dtype, tuple(map(int, shape)), "F" if fortran else "C"


def _media(about: Mapping[str, Any]) -> Media:
    """Return the form of the samples. An absent or unknown form counts as latents, as in cosmos-rl."""
    match str(about.get("media_type")).lower():
        case "image":
            return "image"
        case "video":
            return "video"
        case _:
            return "latent"


_EXPECTED = {
    "image": "uint8 [samples, height, width, 3]",
    "video": "uint8 [samples, 3, frames, height, width]",
    "latent": "float16 [samples, 16 or 48, frames, height, width], other floats, or the bytes of bfloat16 as uint8",
}


def _check_array(media: Media, dtype: np.dtype[Any], shape: tuple[int, ...]) -> None:
    rank, channels = (4, (3,)) if media == "image" else (5, (3,) if media == "video" else LATENT_CHANNELS)
    fits = len(shape) == rank and shape[-1 if media == "image" else 1] in channels and 0 not in shape
    is_bytes = dtype == np.uint8
    fits = fits and (is_bytes if media != "latent" else dtype.kind == "f" or (is_bytes and shape[-1] % 2 == 0))
    if not fits:
        raise FrameError(f"{media} as {dtype} {list(shape)}; expected {_EXPECTED[media]}")
    if shape[0] > MAX_SAMPLES:
        raise FrameError(f"{shape[0]} samples, at most {MAX_SAMPLES}")


def _numbers(about: Mapping[str, Any]) -> list[list[int]]:
    """Return the indices of each sample's references among the arrays after the samples; no lists without the key.

    Raises :class:`FrameError` unless the indices are all whole numbers from 0 to the largest.
    """
    rows = about.get(REFERENCES, [])
    if not isinstance(rows, list) or not all(isinstance(row, list) and len(row) <= MOST for row in rows):
        raise FrameError(f"{REFERENCES}: expected a list of lists, one a sample, of at most {MOST} numbers each")
    if len(rows) > MAX_SAMPLES:
        raise FrameError(f"{REFERENCES}: {len(rows)} lists, at most {MAX_SAMPLES}")
    found = [one for row in rows for one in row]
    if not all(isinstance(one, int) and not isinstance(one, bool) for one in found):
        raise FrameError(f"{REFERENCES}: expected whole numbers, each the place of a picture after the samples")
    if {*found} != {*range(len({*found}))}:
        raise FrameError(f"{REFERENCES}: expected every number from 0 to the largest, found {brief(sorted({*found}))}")
    return rows


def _check_reference(found: Stored) -> None:
    shape = found.shape
    if found.dtype != np.uint8 or len(shape) != 4 or shape[-1] != 3 or 0 in shape:
        expected = "expected uint8 [frames, height, width, 3]"
        raise FrameError(f"{REFERENCES}: a picture as {found.dtype} {list(shape)}; {expected}")


def _prompts(about: Mapping[str, Any], count: int) -> Sequence[str]:
    prompts = about.get("prompts")
    if not isinstance(prompts, list) or not all(isinstance(prompt, str) for prompt in prompts):
        raise FrameError("prompts: expected a list of texts")
    if len(prompts) != count:
        raise FrameError(f"{len(prompts)} prompts for {count} samples")
    return prompts


def _rewards(about: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the rewards with a weight above 0."""
    asked = about.get("reward_fn")
    weighed = isinstance(asked, dict) and all(
        isinstance(weight, int | float) and not isinstance(weight, bool) for weight in asked.values()
    )
    if not isinstance(asked, dict) or not weighed:
        raise FrameError("reward_fn: expected an object with a weight by the name of each reward")
    if not (names := tuple(name for name, weight in asked.items() if weight > 0)):
        raise FrameError("reward_fn: no reward has a weight above 0")
    return names


def _rows(about: Mapping[str, Any], key: str, count: int) -> tuple[Mapping[str, Any], ...] | None:
    """Return a list of objects, one a sample, or None if the key is absent."""
    if (rows := about.get(key)) is None:
        return None
    if not isinstance(rows, list) or len(rows) != count or not all(isinstance(row, dict) for row in rows):
        raise FrameError(f"{key}: expected a list of {count} objects, one a sample")
    return tuple(rows)


def _metadata(about: Mapping[str, Any], count: int) -> Sequence[Mapping[str, Any]]:
    """Return for each sample its prompt's metadata, merged with its video infos and the tags of GenEval, if sent."""
    rows: list[dict[str, Any]] = [dict(row) for row in _rows(about, "metadata", count) or [{}] * count]
    for row, info in zip(rows, _rows(about, "video_infos", count) or [{}] * count, strict=True):
        row.update(info)
    for key, name in _GENEVAL.items():
        if (values := about.get(key)) is not None:
            if not isinstance(values, list) or len(values) != count:
                raise FrameError(f"{key}: expected a list of {count}, one a sample")
            for row, own in zip(rows, values, strict=True):
                row[name] = own
    return rows


def _fps(about: Mapping[str, Any], count: int) -> Iterator[float]:
    for info in _rows(about, "video_infos", count) or [{}] * count:
        fps = finite(info.get("video_fps", STORED_FPS))
        if fps is None or fps <= 0:
            raise FrameError(
                f"video_infos: video_fps = {brief(info['video_fps'])}; expected frames per second, above 0"
            )
        yield fps


def _scorers(about: Mapping[str, Any]) -> Mapping[str, str]:
    expected = about.get(SCORERS, {})
    if not isinstance(expected, dict) or not all(isinstance(digest, str) for digest in expected.values()):
        raise FrameError(f"{SCORERS}: expected an object with a digest by the name of each reward")
    return expected
