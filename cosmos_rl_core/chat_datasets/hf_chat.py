"""Conversations in a folder that ``save_to_disk`` of Hugging Face's ``datasets`` wrote.

One column has the messages, ``role`` and ``content``, as a list or as JSON text. Media are files, named by their paths,
or bytes in the Arrow files. They are in the parts of messages, or in the columns ``image``, ``images``, ``video`` and
``videos``: a part without a medium takes the next one of the columns, or the one at its ``index``. The package
``datasets`` is not needed.
"""

from collections.abc import Iterator
from typing import Any, BinaryIO, Literal

from pydantic import Field

from cosmos_rl_core.canonical import from_json
from cosmos_rl_core.chat_datasets import _arrow_media
from cosmos_rl_core.chat_datasets._base import Message, Row, part_of, refused, row, text_part
from cosmos_rl_core.config.base import NOT_IDENTITY, UserPath
from cosmos_rl_core.config.vlm.chat_datasets import ChatDatasetOptions
from cosmos_rl_core.datasets import _arrow_files
from cosmos_rl_core.datasets._base import ItemError
from cosmos_rl_core.datasets._saved_folder import SavedFolder
from cosmos_rl_core.errors import ConfigError
from cosmos_rl_core.storage import store


class Options(ChatDatasetOptions):
    """Folder and column."""

    name: Literal["hf_chat"] = "hf_chat"  # pyright: ignore[reportIncompatibleVariableOverride]

    path: UserPath = Field(json_schema_extra=NOT_IDENTITY)
    """The folder, or ``s3://bucket/prefix``. The identity of a run holds the bytes of its files, not its path."""
    split: str = ""
    """Split of a folder with several. Default: the only one."""
    conversation_column_name: str = "conversations"
    """Column with the messages."""


def files(options: Options) -> list[str]:
    """Return the Arrow files."""
    folder = SavedFolder(options.path, options.split)
    return [store.join(folder.url, name) for name in folder.stamps]


def opened(options: Options, name: str) -> BinaryIO | None:
    """Open a medium that is inside an Arrow file; return None for a medium that is a file of its own."""
    return _arrow_media.opened(options.path, name)


def rows(options: Options) -> Iterator[Row]:
    """Yield every conversation of the folder."""
    number, column = 0, options.conversation_column_name
    for file in files(options):
        inside = file.removeprefix(options.path).lstrip("/")
        try:
            for batch in _arrow_files.batches(file):
                if column not in batch.rows.schema.names:
                    has = ", ".join(batch.rows.schema.names)
                    raise ConfigError(f"{file} has no column {column!r}, only {has}; set conversation_column_name")
                for value, media in _arrow_media.conversations(batch, column, inside):
                    yield _row(f"row {number}", value, media, options.system_prompt)
                    number += 1
        except ItemError as error:
            raise ConfigError(f"{file}: {error}") from error


UNREAD = ("function_call", "reasoning", "reasoning_content", "thinking", "tool_calls")
"""Fields of messages outside ``content`` that a chat template would write. Messages with one are refused."""


def _row(name: str, value: Any, media: _arrow_media.Columns, system_prompt: str) -> Row:
    try:
        found = from_json(value) if isinstance(value, str) else value
        if not isinstance(found, list):
            raise ItemError(f"{type(found).__name__}, expected a list of messages")
        messages = [_message(message, media) for message in found]
        if media.spare:
            raise ItemError(f"{media.spare} media in columns that no message has a place for")
        return row(name, messages, system_prompt)
    except ItemError as error:
        return refused(name, str(error))
    except ValueError as error:
        return refused(name, f"it is not JSON: {error}")


def _message(value: Any, media: _arrow_media.Columns) -> Message:
    if not isinstance(value, dict) or not isinstance(role := value.get("role"), str):
        raise ItemError("a message without a role")
    if lost := sorted(name for name in UNREAD if value.get(name)):
        raise ItemError(f"a message has {', '.join(lost)}, which is not read; write it into the content, or remove it")
    content = value.get("content")
    if isinstance(content, str):
        return {"role": role, "content": [text_part(content)]}
    if not isinstance(content, list):
        raise ItemError(f"the content of a message is {type(content).__name__}, expected a text or a list of parts")
    return {"role": role, "content": [part_of(media.filled(part)) for part in content]}
