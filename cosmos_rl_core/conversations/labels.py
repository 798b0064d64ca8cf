"""The places of answers in the text of a chat template. Supervised training has a loss on answers only."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

from cosmos_rl_core.datasets._base import ItemError
from cosmos_rl_core.errors import ConfigError

Turns = Literal["all", "last"]
"""Whether every turn of the assistant is trained on, or the last one only."""
Render = Callable[[Sequence[Mapping[str, Any]], bool], str]
"""Function from messages to the template's text; if the second argument is true, with the header of another answer."""


class Answers(NamedTuple):
    """A conversation as text, and the places of its answers in it."""

    text: str
    spans: list[tuple[int, int]]
    """Begin and end of each trained answer in the text: after the header, up to and with the end of the turn."""


def answers_in(render: Render, messages: Sequence[Mapping[str, Any]], end: str, turns: Turns) -> Answers:
    """Return the text of a conversation and the places of its answers. ``end`` is the token that ends a turn.

    Qwen's templates do not mark answers, so prefixes are rendered: an answer begins where the conversation before it,
    with the header of an answer, ends. Raises :class:`ItemError` if the template writes a prefix in another way than
    the whole conversation, for example without the reasoning of earlier turns: the model would be trained on texts
    that it never sees.
    """
    text = render(messages, False)
    numbers = [number for number, message in enumerate(messages) if message["role"] == "assistant"]
    spans: list[tuple[int, int]] = []
    for number in numbers if turns == "all" else numbers[-1:]:
        header, turn = render(messages[:number], True), render(messages[: number + 1], False)
        if not text.startswith(turn) or not turn.startswith(header):
            hint = "; turns = 'last' trains on the last turn alone" if number != numbers[-1] else ""
            raise ItemError(
                f"message {number + 1}: the chat template writes this answer otherwise when it is the newest one, so "
                f"its place cannot be found{hint}"
            )
        stop = turn.rfind(end, len(header))
        if stop < 0:
            raise ItemError(f"message {number + 1}: the chat template does not end the answer with {end!r}")
        spans.append((len(header), stop + len(end)))
    return Answers(text, spans)


PROBE = tuple(
    {"role": role, "content": [{"type": "text", "text": text}]}
    for role, text in (("user", "a"), ("assistant", "b"), ("user", "c"), ("assistant", "d"))
)
"""A conversation of two turns, with which templates are tested."""


def check_template(render: Render, end: str, turns: Turns) -> None:
    """Raise :class:`ConfigError` if no conversation of several turns could be trained on with this template."""
    try:
        answers_in(render, PROBE, end, turns)
    except ItemError as error:
        raise ConfigError(f"the chat template does not fit turns = {turns!r}: {error}") from error
