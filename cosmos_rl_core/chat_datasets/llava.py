"""Conversations in LLaVA's format: one JSON list, with the files of media next to it.

A row is ``{"conversations": [{"from": "human", "value": ...}, {"from": "gpt", "value": ...}], "image": NAME or list}``,
with ``images``, ``video`` or ``videos`` as well. ``<image>`` and ``<video>`` in the texts are the places of the media,
in order; without any, media come first.
"""

import re
from collections.abc import Iterator
from typing import Any, Literal

from pydantic import Field

from cosmos_rl_core.canonical import from_json
from cosmos_rl_core.chat_datasets._base import MEDIA, Message, Row, refused, row, text_part
from cosmos_rl_core.config.base import NOT_IDENTITY, UserPath
from cosmos_rl_core.config.vlm.chat_datasets import ChatDatasetOptions
from cosmos_rl_core.datasets._base import ItemError
from cosmos_rl_core.errors import ConfigError
from cosmos_rl_core.storage import store

ROLES = {"human": "user", "user": "user", "gpt": "assistant", "assistant": "assistant", "system": "system"} | {
    "tool": "tool"
}
PLACE = re.compile(r"\n?<(image|video)>\n?")
"""A placeholder, with the line breaks that separate it from a text."""


class Options(ChatDatasetOptions):
    """File and folder."""

    name: Literal["llava"] = "llava"  # pyright: ignore[reportIncompatibleVariableOverride]

    annotation_path: UserPath = Field(json_schema_extra=NOT_IDENTITY)
    """JSON file of the conversations, or its URL. The identity of a run holds its bytes, not its path."""


def files(options: Options) -> list[str]:
    """Return the file of the conversations."""
    if store.size(options.annotation_path) is None:
        raise ConfigError(f"no file at annotation_path = {options.annotation_path!r}; expected a JSON list")
    return [options.annotation_path]


def rows(options: Options) -> Iterator[Row]:
    """Yield every conversation of the file."""
    (path,) = files(options)
    try:
        found = from_json(store.read(path))
    except ValueError as error:
        raise ConfigError(f"{options.annotation_path} is not JSON: {error}") from error
    if not isinstance(found, list):
        raise ConfigError(f"{options.annotation_path} is {type(found).__name__}, expected a list of conversations")
    for number, value in enumerate(found):
        try:
            yield row(f"row {number}", list(_messages(value)), options.system_prompt)
        except ItemError as error:
            yield refused(f"row {number}", str(error))


def _messages(value: Any) -> Iterator[Message]:
    """Yield the messages of a row. Raises :class:`ItemError` if it has another form, or its media do not fit."""
    if not isinstance(value, dict) or not isinstance(value.get("conversations"), list):
        raise ItemError("expected an object with a list `conversations`")
    left = {kind: _names(value, kind) for kind in MEDIA}
    turns = [_turn(turn) for turn in value["conversations"]]
    anywhere = any(PLACE.search(text) for _, text in turns)
    for role, text in turns:
        content = list(_parts(text, left)) if anywhere else [text_part(text)]
        if not anywhere and role == "user":
            content = [{"type": kind, kind: name} for kind, names in left.items() for name in names] + content
            left = {kind: [] for kind in MEDIA}
        yield {"role": role, "content": content}
    if spare := [name for names in left.values() for name in names]:
        raise ItemError(f"{len(spare)} media without a placeholder, the first is {spare[0]}")


def _turn(turn: Any) -> tuple[str, str]:
    if not isinstance(turn, dict) or not isinstance(text := turn.get("value"), str):
        raise ItemError("a turn without a text `value`")
    if (role := turn.get("from")) not in ROLES:
        raise ItemError(f"a turn from {role!r}; known: {', '.join(ROLES)}")
    return ROLES[role], text


def _names(value: dict[str, Any], kind: str) -> list[str]:
    """Return the names of the media of one kind."""
    names: list[str] = []
    for key in (kind, f"{kind}s"):
        found = value.get(key)
        some = [found] if isinstance(found, str) else [] if found is None else found
        if not isinstance(some, list) or not all(isinstance(name, str) for name in some):
            raise ItemError(f"{key} is {found!r}, expected a name or a list of names")
        names += some
    return names


def _parts(text: str, left: dict[str, list[str]]) -> Iterator[dict[str, str]]:
    """Yield the parts of a text; each placeholder takes the next medium of ``left``.

    Some datasets of videos write ``<image>`` for a video. Raises :class:`ItemError` if no medium is left.
    """
    pieces = PLACE.split(text)
    for number, piece in enumerate(pieces):
        if number % 2 == 0:
            if piece:
                yield text_part(piece)
            continue
        kind = "video" if piece == "image" and not left["image"] and left["video"] else piece
        if not left[kind]:
            raise ItemError(f"a placeholder <{piece}> without a medium")
        yield {"type": kind, kind: left[kind].pop(0)}
