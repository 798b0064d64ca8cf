"""Conversations as tokens, labels and media, on which a VLM is trained."""

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

from cosmos_rl_core.conversations.labels import Turns, answers_in, check_template
from cosmos_rl_core.datasets._base import ItemError
from cosmos_rl_core.errors import ConfigError
from cosmos_rl_core.vlms._base import Visual
from cosmos_rl_core.vlms._prompts import Message, Prompts

IGNORED = -100
"""Label of a token without loss, as in transformers."""
Span = tuple[int, int]
"""Begin and end of a range of characters or tokens."""


class Encoded(NamedTuple):
    """A conversation as the model takes it."""

    input_ids: Tensor
    """Ids of the tokens, ``[tokens]``."""
    labels: Tensor
    """Ids of the tokens of answers, :data:`IGNORED` elsewhere, ``[tokens]``."""
    kinds: Tensor
    """Kind of each token: 0 text, 1 image, 2 video, ``[tokens]``."""
    visuals: list[Visual]
    """The media, in order."""
    places: list[Span]
    """Range of the tokens of each medium, with the text of its times between them."""


class Cut(NamedTuple):
    """Numbers of tokens, labels and media that a limit on the length has cut off."""

    tokens: int
    labels: int
    media: int


class Encoder:
    """Makes tokens and labels of conversations, with the files of one VLM."""

    def __init__(self, prompts: Prompts, turns: Turns = "all") -> None:
        """Raise :class:`ConfigError` if answers cannot be found in the text that the chat template writes."""
        self.prompts = prompts
        self.turns: Turns = turns
        end = prompts.tokenizer.eos_token
        if not isinstance(end, str):
            raise ConfigError("the tokenizer has no eos_token, which ends a turn")
        self.end = end
        check_template(self._render, end, turns)

    def encode(self, conversation: Sequence[Message], max_length: int) -> tuple[Encoded, Cut]:
        """Return a conversation of at most ``max_length`` tokens, and the numbers of what was cut off.

        The tokens equal the stock processor's tokens of the whole text. A token that begins in the header before an
        answer has no label. Raises :class:`ItemError` if the conversation cannot be used, or has no label left.
        """
        messages, media = self.prompts.parsed(conversation)
        if silent := [n for n, m in enumerate(messages, 1) if m["role"] == "assistant" and not _words(m).strip()]:
            raise ItemError(f"message {silent[0]}: an empty answer")
        found = answers_in(self._render, messages, self.end, self.turns)
        visuals = [self.prompts.visual(part, number) for number, part in media]
        kinds = [part["type"] for _, part in media]
        pieces = self.prompts.replaced(found.text, list(zip(kinds, visuals, strict=True)))
        made = self.prompts.tokenizer("".join(pieces), return_offsets_mapping=True, return_tensors="pt")
        tokens = _Places(made["offset_mapping"][0])
        input_ids: Tensor = made["input_ids"][0]
        labels = torch.full_like(input_ids, IGNORED, device="cpu")
        for begin, end in _moved(found.spans, self.prompts.split(found.text), pieces):
            first, last = tokens.within(begin, end)
            labels[first:last] = input_ids[first:last]
        ends = [*accumulate(map(len, pieces))]
        places = [tokens.within(begin, end) for begin, end in zip(ends[::2], ends[1::2], strict=False)]
        whole = Encoded(input_ids, labels, self.prompts.kinds(input_ids), visuals, places)
        return shortened(whole, max_length)

    def _render(self, messages: Sequence[Message], opens_answer: bool) -> str:
        return self.prompts.rendered(messages, opens_answer=opens_answer)


class _Places:
    """The characters of each token."""

    def __init__(self, offsets: Tensor) -> None:
        self.starts, self.stops = offsets.T.tolist()

    def within(self, begin: int, end: int) -> Span:
        """Return the range of tokens that lie within a range of characters."""
        return bisect_left(self.starts, begin), bisect_right(self.stops, end)


def _moved(spans: Sequence[Span], before: Sequence[str], after: Sequence[str]) -> list[Span]:
    """Translate places in a text to places in the same text after some of its pieces were replaced.

    ``before`` and ``after`` are all its pieces before and after the replacement.
    """
    ends = [*accumulate(map(len, before))]
    grown = [0, *accumulate(len(new) - len(old) for old, new in zip(before, after, strict=True))]
    return [tuple(place + grown[bisect_right(ends, place)] for place in span) for span in spans]  # pyright: ignore[reportReturnType]


def shortened(encoded: Encoded, max_length: int) -> tuple[Encoded, Cut]:
    """Return the first ``max_length`` tokens, or fewer, so that no medium is cut, and the numbers of what was cut off.

    Raises :class:`ItemError` if no label is left.
    """
    length = len(encoded.input_ids)
    keep = min(length, max_length)
    for begin, end in encoded.places:
        if begin < keep < end or (begin == keep < length):
            # The token that opens the medium is cut off with it.
            keep = max(begin - 1, 0)
    kept = sum(end <= keep for _, end in encoded.places)
    found = Encoded(
        encoded.input_ids[:keep],
        encoded.labels[:keep],
        encoded.kinds[:keep],
        encoded.visuals[:kept],
        encoded.places[:kept],
    )
    before, after = (int((one.labels != IGNORED).sum()) for one in (encoded, found))
    if after == 0:
        why = f", within the first {keep} of {length} tokens" if before else ""
        raise ItemError(f"no token of an answer{why}")
    return found, Cut(length - keep, before - after, len(encoded.visuals) - kept)


def _words(message: Message) -> str:
    """Return the texts of a message."""
    return "".join(part.get("text", "") for part in message["content"])
