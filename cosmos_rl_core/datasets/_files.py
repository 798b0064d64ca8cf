"""Kinds of media by extension, and captions in files: shared by all sources."""

import json
from pathlib import PurePath
from typing import Any, Literal

from cosmos_rl_core.canonical import canonical_json
from cosmos_rl_core.datasets._base import ItemError

IMAGES = frozenset({".jpg", ".jpeg", ".png", ".webp"})
VIDEOS = frozenset({".mp4", ".mkv", ".mov", ".webm"})
PROMPT = "prompt"
"""The key of the caption in an object."""
REFERENCES = "references"
"""The key of the pictures that a caption refers to."""


def kind_of(name: str) -> Literal["image", "video"]:
    """Return the kind of a medium by its extension."""
    return "video" if PurePath(name).suffix.lower() in VIDEOS else "image"


def parsed(name: str, data: bytes) -> Any:
    """Return the text of a file, or the value in it if it is JSON.

    Raises :class:`ItemError` if it cannot be read, or has values that are not plain JSON: NaN, half a surrogate pair.
    """
    try:
        text = data.decode("utf-8-sig")
        value = json.loads(text) if name.lower().endswith(".json") else text
        canonical_json(value)
    except (ValueError, RecursionError) as error:
        raise ItemError(f"{name}: cannot be read: {line(error)}") from error
    return value


def caption_in(name: str, value: Any, key: str = PROMPT) -> tuple[str, dict[str, Any]]:
    """Return the caption in a file that :func:`parsed` read, without surrounding white space, and the other values.

    JSON is an object, with the caption under ``key``; any other file is text. Raises :class:`ItemError` if there is no
    caption.
    """
    if not name.lower().endswith(".json"):
        return checked(name, value), {}
    metadata = dict(value) if isinstance(value, dict) else {}
    return checked(name, metadata.pop(key, None), key), metadata


def checked(name: str, caption: Any, key: str = PROMPT) -> str:
    """Return a caption without surrounding white space. Raises :class:`ItemError` if it is no text, or empty."""
    if not isinstance(caption, str):
        raise ItemError(f'{name}: no caption; expected an object with the text "{key}"')
    if not caption.strip():
        raise ItemError(f"{name}: the caption is empty")
    return caption.strip()


def line(error: Exception) -> str:
    """Return an error's message as one line."""
    return " ".join(str(error).split()) or type(error).__name__
