"""Conversations with images and videos as tensors, the inputs of VLMs of transformers. Without torchvision."""

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from cosmos_rl_core.datasets._base import ItemError
from cosmos_rl_core.errors import ConfigError, first_line, mistakes_in
from cosmos_rl_core.vlms import _media
from cosmos_rl_core.vlms._base import Changes, Clip, Kind, Processor, Visual, processor_of
from cosmos_rl_core.vlms._settings import BOTH, LEGACY_TEMPLATE, ImageSettings, json_object

Message = Mapping[str, Any]
"""A turn of a conversation, as in transformers: ``role``, and ``content``, a text or a list of parts.

Parts are ``{"type": "text", "text": ...}``, ``{"type": "image", "image": ...}`` and ``{"type": "video", "video": ...}``
with media as in :data:`cosmos_rl_core.vlms._media.Source`. A video of pixels also has ``fps``.
"""

ROLES = ("system", "user", "assistant", "tool")
_KEYS = {"text": {"type", "text"}, "image": {"type", "image"}, "video": {"type", "video", "fps"}}
_TYPE_IDS: dict[Kind, int] = {"image": 1, "video": 2}
"""Numbers of transformers for the kinds of tokens; text has 0."""


class Prompts:
    """Makes the inputs of the VLM in a folder, on the CPU. Reads no weights."""

    def __init__(self, path: str, changes: Changes | None = None, max_side: int | None = None) -> None:
        """Read processor, tokenizer and chat template of the folder ``path``.

        ``changes`` replace settings of its files. A medium with a height or width above ``max_side`` gets the size that
        it would get if its longer side were ``max_side``. Raises :class:`ConfigError` with every mistake in the
        settings.
        """
        self._max_side = max_side
        self.processor: Processor = processor_of(path, changes)
        self.tokenizer = _tokenizer(path)
        self._template = _chat_template(path)
        added = self.tokenizer.added_tokens_decoder.values()
        self._special = {token.content for token in added if token.special}
        mistakes = []
        if self._template is None and self.tokenizer.chat_template is None:
            mistakes.append("no chat template; expected chat_template.jinja, or chat_template in tokenizer_config.json")
        if self.tokenizer.pad_token_id is None:
            mistakes.append("the tokenizer has no pad_token")
        unknown = [token for token in self.processor.placeholders.values() if token not in self._special]
        if unknown:
            mistakes.append(f"the tokenizer has no special token {', '.join(unknown)}")
        if mistakes:
            raise mistakes_in(path, mistakes)

    def prepare(self, conversations: Sequence[Sequence[Message]]) -> dict[str, Tensor]:
        """Return the arguments of the model's forward for a batch, padded on the left.

        Always ``input_ids``, ``attention_mask`` and ``mm_token_type_ids`` (0 text, 1 image, 2 video), each
        ``[conversations, tokens]``; with media also their patches and grids. A conversation that does not end with the
        assistant's turn is followed by the beginning of that turn. Raises :class:`.ItemError` that names the message
        that cannot be used.
        """
        if not conversations:
            raise ItemError("no conversation, expected at least one")
        found = [self._conversation(conversation) for conversation in conversations]
        encoded = self.tokenizer([text for text, _ in found], padding=True, padding_side="left", return_tensors="pt")
        batch: dict[str, Tensor] = {name: encoded[name] for name in ("input_ids", "attention_mask")}
        batch["mm_token_type_ids"] = self.kinds(batch["input_ids"])
        return batch | joined([visual for _, visuals in found for visual in visuals])

    def kinds(self, input_ids: Tensor) -> Tensor:
        """Return the kind of each token as a number: 0 text, 1 image, 2 video."""
        kinds = torch.zeros_like(input_ids)
        for kind, token in self.processor.placeholders.items():
            kinds[input_ids == self.tokenizer.convert_tokens_to_ids(token)] = _TYPE_IDS[kind]
        return kinds

    def _conversation(self, conversation: Sequence[Message]) -> tuple[str, list[Visual]]:
        """Return the text of a conversation, with its placeholders replaced, and its media."""
        messages, parts = self.parsed(conversation)
        media = [(part["type"], self.visual(part, number)) for number, part in parts]
        text = self.rendered(messages, opens_answer=messages[-1]["role"] != "assistant")
        return "".join(self.replaced(text, media)), [visual for _, visual in media]

    def parsed(self, conversation: Sequence[Message]) -> tuple[list[dict[str, Any]], list[tuple[int, Message]]]:
        """Return the messages as the chat template takes them, and their media with the number of the message, from 1.

        Raises :class:`.ItemError` that names the message that cannot be used.
        """
        messages: list[dict[str, Any]] = []
        media: list[tuple[int, Message]] = []
        for number, message in enumerate(conversation, 1):
            with _in_message(number):
                parts = _parts(message)
                messages.append({"role": message["role"], "content": [self._shown(part) for part in parts]})
            media += [(number, part) for part in parts if part["type"] != "text"]
        if not messages:
            raise ItemError("a conversation without messages, expected at least one")
        return messages, media

    def rendered(self, messages: Sequence[Mapping[str, Any]], *, opens_answer: bool) -> str:
        """Return the chat template's text; ``opens_answer`` adds the beginning of the assistant's turn."""
        text: Any = self.tokenizer.apply_chat_template(
            [dict(message) for message in messages],
            chat_template=self._template,
            tokenize=False,
            add_generation_prompt=opens_answer,
        )
        return text

    def _shown(self, part: Message) -> dict[str, Any]:
        """Return a part as the chat template takes it. Raises :class:`.ItemError` on special tokens in a text."""
        if part["type"] != "text":
            return {"type": part["type"]}
        if found := sorted(token for token in self._special if token in part["text"]):
            # They would end the turn, or stand for media that are not there.
            raise ItemError(f"the text holds {', '.join(map(repr, found))}, special to the model; leave it out")
        return {"type": "text", "text": part["text"]}

    def visual(self, part: Message, number: int) -> Visual:
        """Return a medium of message ``number`` as the model takes it.

        Raises :class:`.ItemError` that names the message if it cannot be used.
        """
        kind: Kind = part["type"]
        with _in_message(number):
            if kind == "image":
                clip, settings = _media.image(part["image"]), self.processor.image
            else:
                clip = _media.video(part["video"], part.get("fps"), self.processor.sample)
                settings = self.processor.video
            return self.processor.visual(kind, self._pixels(kind, clip, settings), clip)

    def _pixels(self, kind: Kind, clip: Clip, settings: ImageSettings) -> Tensor:
        frames, height, width, _ = clip.pixels.shape
        size = self.processor.size(kind, frames, *within(height, width, self._max_side))
        pixels = torch.from_numpy(np.array(clip.pixels.transpose(0, 3, 1, 2), order="C"))
        return normalise(resize(pixels, size), settings)

    def split(self, text: str) -> list[str]:
        """Cut a text by :meth:`rendered` at its placeholders, and return the pieces: every second is a placeholder."""
        return re.split(f"({'|'.join(map(re.escape, self.processor.placeholders.values()))})", text)

    def replaced(self, text: str, media: Sequence[tuple[Kind, Visual]]) -> list[str]:
        """Return the text in pieces, cut like by :meth:`split`, with each placeholder replaced by its medium's text.

        Raises :class:`ConfigError` if the placeholders do not fit the media.
        """
        kinds = {token: kind for kind, token in self.processor.placeholders.items()}
        pieces = self.split(text)
        if [kinds[token] for token in pieces[1::2]] != [kind for kind, _ in media]:
            given, expected = [kind for kind, _ in media], ", ".join(kinds)
            raise ConfigError(
                f"the chat template writes {pieces[1::2]} for the media {given}; expected one for each, of {expected}"
            )
        for place, (_, visual) in zip(range(1, len(pieces), 2), media, strict=True):
            pieces[place] = visual.text
            if visual.before:
                pieces[place - 1] = self._led(pieces[place - 1], visual.before, pieces[place + 1])
        return pieces

    def _led(self, piece: str, before: str, following: str) -> str:
        """Insert ``before`` into the piece of text before a placeholder, in front of the marker that ends the piece.

        Raises :class:`ConfigError` if the placeholder is not between markers.
        """
        opener, closer = getattr(self.processor, "markers", ("", ""))
        if not (piece.endswith(opener) and following.startswith(closer)):
            raise ConfigError(
                f"the chat template does not write a clip between {opener} and {closer}; leave video.clip_markers out"
            )
        return f"{piece.removesuffix(opener)}{before}{opener}"


@contextmanager
def _in_message(number: int) -> Iterator[None]:
    """Add the number of the message, counted from 1, to errors."""
    try:
        yield
    except ItemError as error:
        raise ItemError(f"message {number}: {error}") from error


def within(height: int, width: int, max_side: int | None) -> tuple[int, int]:
    """Scale a height and width by one factor so that none is above ``max_side``; each stays at least 1."""
    longest = max(height, width)
    if max_side is None or longest <= max_side:
        return height, width
    return max(1, round(height * max_side / longest)), max(1, round(width * max_side / longest))


def resize(pixels: Tensor, size: tuple[int, int]) -> Tensor:
    """Return uint8 pixels ``[frames, 3, height, width]`` scaled to ``size``: bicubic, with antialiasing.

    On the CPU the result equals torchvision's, which computes in integers there, too.
    """
    if pixels.shape[-2:] == size:
        return pixels
    return functional.interpolate(pixels, size, mode="bicubic", align_corners=False, antialias=True)


def normalise(pixels: Tensor, settings: ImageSettings) -> Tensor:
    """Return uint8 pixels ``[frames, 3, height, width]`` as float32, minus the mean and divided by the deviation."""
    # As in transformers, mean and deviation take the factor, not the pixels: another order rounds otherwise.
    mean, std = (
        (torch.tensor(values, device=pixels.device) * (1.0 / settings.rescale_factor)).view(-1, 1, 1)
        for values in (settings.image_mean, settings.image_std)
    )
    return pixels.to(torch.float32).sub_(mean).div_(std)


def _parts(message: Message) -> list[Message]:
    """Return the parts of a message. Raises :class:`.ItemError` if it has another form than :data:`Message`."""
    if not isinstance(message, Mapping) or message.keys() != {"role", "content"}:
        raise ItemError("expected role and content, and nothing else")
    if message["role"] not in ROLES:
        raise ItemError(f"role {message['role']!r}, expected one of {', '.join(ROLES)}")
    content = message["content"]
    parts = [{"type": "text", "text": content}] if isinstance(content, str) else content
    if not isinstance(parts, Sequence) or not all(isinstance(part, Mapping) for part in parts):
        raise ItemError("content is neither a text nor a list of parts")
    for part in parts:
        kind = part.get("type")
        if not isinstance(kind, str) or kind not in _KEYS:
            raise ItemError(f"a part of type {kind!r}, expected one of {', '.join(_KEYS)}")
        if kind not in part or not part.keys() <= _KEYS[kind]:
            found, known = (", ".join(sorted(keys)) for keys in (part.keys(), _KEYS[kind]))
            raise ItemError(f"a part of type {kind!r} has {found}; known: {known}")
        if kind == "text" and not isinstance(part["text"], str):
            raise ItemError(f"text is {type(part['text']).__name__}, expected a string")
        if kind == "text" and any("\ud800" <= letter <= "\udfff" for letter in part["text"]):
            raise ItemError("the text has half of a surrogate pair, which is no letter")
    return list(parts)


def joined(visuals: Sequence[Visual]) -> dict[str, Tensor]:
    """Return the inputs of all media by name, joined along the first dimension."""
    inputs: dict[str, list[Tensor]] = {}
    for visual in visuals:
        for name, value in visual.inputs.items():
            inputs.setdefault(name, []).append(torch.as_tensor(value, device="cpu"))
    return {name: torch.cat(values) for name, values in inputs.items()}


def _tokenizer(path: str) -> PreTrainedTokenizerBase:
    try:
        return AutoTokenizer.from_pretrained(path, local_files_only=True)
    except (OSError, ValueError, KeyError) as error:
        reason = first_line(error)
        raise ConfigError(f"{path}: no tokenizer that transformers reads, such as tokenizer.json: {reason}") from error


def _chat_template(path: str) -> str | None:
    """Return the chat template of the processor's files, or None if only the tokenizer's files may have one."""
    for name in (BOTH, LEGACY_TEMPLATE):
        template = (json_object(path, name) or {}).get("chat_template")
        if isinstance(template, str):
            return template
    return None
