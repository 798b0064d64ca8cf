"""Interface of plugins for datasets of conversations. None of them imports torch.

A plugin file has a class ``Options`` (a :class:`.ChatDatasetOptions`) and the functions ``files`` and ``rows``. If
media may be inside other files, it also has a function ``opened(options, name)``, which opens such a medium, and
returns None for a medium that is a file of its own.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from cosmos_rl_core.datasets._base import ItemError

MEDIA = ("image", "video")
"""Kinds of parts that name a file."""
ROLES = ("system", "user", "assistant", "tool")

Message = dict[str, Any]
"""``role``, and ``content``: a list of parts ``{"type": "text", "text": ...}``, ``{"type": "image", "image": NAME}``
and ``{"type": "video", "video": NAME}``. A name is relative to ``media_path``."""


class Row(NamedTuple):
    """A conversation of a dataset."""

    name: str
    """Place of the conversation in the files, for people."""
    messages: list[Message]
    reason: str = ""
    """Why the conversation cannot be used; "" if it can be."""


class ChatDatasetPlugin(Protocol):
    """Module of a plugin for datasets of conversations."""

    def files(self, options: Any) -> list[str]:
        """Return paths or URLs of the files with the texts. Raises :class:`.ConfigError` if they are not there."""
        ...

    def rows(self, options: Any) -> Iterator[Row]:
        """Yield every conversation. Opens no medium. Raises :class:`.ConfigError` for a file in another format."""
        ...


def row(name: str, messages: Sequence[Message], system_prompt: str) -> Row:
    """Return a row of messages. If they have no system text, ``system_prompt``, unless empty, is put before them.

    The row's ``reason`` names every mistake in the messages.
    """
    messages = list(messages)
    if system_prompt and not any(message["role"] == "system" for message in messages):
        messages.insert(0, {"role": "system", "content": [text_part(system_prompt)]})
    return Row(name, messages, "; ".join(_mistakes(messages)))


def refused(name: str, reason: str) -> Row:
    """Return the row of a conversation that cannot be read, with the reason."""
    return Row(name, [], reason)


def text_part(text: str) -> dict[str, str]:
    """Return a part with a text."""
    return {"type": "text", "text": text}


def media_of(messages: Sequence[Message]) -> list[tuple[str, str]]:
    """Return the kind and the name of each medium, in order."""
    parts = (part for message in messages for part in message["content"])
    return [(part["type"], part[part["type"]]) for part in parts if part["type"] in MEDIA]


def part_of(value: Any) -> dict[str, str]:
    """Return a part of a message from its value in a file; keys that are null count as absent.

    Raises :class:`~cosmos_rl_core.datasets._base.ItemError` if the value has another form.
    """
    if not isinstance(value, Mapping):
        raise ItemError(f"a part is {type(value).__name__}, expected an object")
    given = {name: other for name, other in value.items() if other is not None}
    kind = given.get("type")
    if kind not in ("text", *MEDIA):
        raise ItemError(f"a part of type {kind!r}; known: text, {', '.join(MEDIA)}")
    if given.keys() != {"type", kind}:
        raise ItemError(f"a part of type {kind!r} has {', '.join(sorted(given))}; expected type, {kind}")
    if not isinstance(given[kind], str):
        what = "a text" if kind == "text" else "the path of a file"
        raise ItemError(f"{kind} is {type(given[kind]).__name__}, expected {what}")
    return {"type": str(kind), str(kind): given[kind]}


def _mistakes(messages: Sequence[Message]) -> Iterator[str]:
    roles = [message["role"] for message in messages]
    if unknown := sorted({str(role) for role in roles if role not in ROLES}):
        yield f"unknown role {', '.join(unknown)}; known: {', '.join(ROLES)}"
    if "system" in roles[1:]:
        yield "a system text that is not the first message"
    if next((role for role in roles if role != "system"), "") == "assistant":
        yield "it begins with an answer"
    if "assistant" not in roles:
        yield "no answer"
    for number, message in enumerate(messages, 1):
        texts = [part["text"] for part in message["content"] if part["type"] == "text"]
        if message["role"] == "assistant" and not "".join(texts).strip():
            yield f"message {number}: an empty answer"
        if message["role"] == "assistant" and len(texts) < len(message["content"]):
            yield f"message {number}: an answer with a medium"
        if any("\ud800" <= letter <= "\udfff" for text in texts for letter in text):
            yield f"message {number}: half of a surrogate pair, which is no letter"
        empty = [part["type"] for part in message["content"] if not part[part["type"]] and part["type"] in MEDIA]
        if empty:
            yield f"message {number}: {empty[0]} without a name"
