"""A service that answers questions about pictures: its settings, and several questions at once."""

import base64
import os
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Literal

import httpx
from pydantic import Field, field_validator

from cosmos_rl_core.chat.client import Chat, RefusedError
from cosmos_rl_core.config.base import NOT_IDENTITY, Section
from cosmos_rl_core.errors import ConfigError

Content = list[dict[str, Any]]
"""Texts and pictures of a message, in the form of OpenAI's interface."""


class ChatSettings(Section):
    """The service, its model, and how it is asked. A base of the ``Options`` of plugins."""

    url: str = Field(json_schema_extra=NOT_IDENTITY)
    """Base URL of the service, as OpenAI's clients take it: ``http://host:8000/v1``."""
    model: str = Field(min_length=1)
    """The service's name of the model."""
    max_tokens: int = Field(default=512, ge=1)
    """Maximum number of tokens of an answer. An answer that reaches it is cut, so it is not used."""
    temperature: float = Field(default=0.0, ge=0.0)
    """Temperature of the model; 0 takes the likeliest token."""
    num_frames: int = Field(default=8, ge=1)
    """Number of evenly spaced frames that are sent of a video."""
    max_side: int = Field(default=1024, ge=1)
    """Largest height and width of a picture that is sent, in pixels. Larger ones are scaled down."""
    token_variable: str | None = Field(
        default=None, pattern=r"^(CAPTION|OPENAI)_[A-Z0-9_]+$", json_schema_extra=NOT_IDENTITY
    )
    """Name of the environment variable that holds the service's token. It begins with ``CAPTION_`` or ``OPENAI_``:
    variables of these names are given to stages. Default: no token."""
    concurrency: int = Field(default=8, ge=1, le=256, json_schema_extra=NOT_IDENTITY)
    """Number of concurrent requests."""
    timeout_s: float = Field(default=120.0, gt=0, json_schema_extra=NOT_IDENTITY)
    """Seconds in which one request must be answered."""
    tries: int = Field(default=6, ge=1, json_schema_extra=NOT_IDENTITY)
    """Number of tries of a request before the service counts as unavailable."""
    pause_s: float = Field(default=1.0, gt=0, json_schema_extra=NOT_IDENTITY)
    """Seconds before the second try; each further pause is twice as long. A service may ask for a longer pause."""

    @field_validator("url")
    @classmethod
    def _check_url(cls, url: str) -> str:
        try:
            parsed = httpx.URL(url)
        except httpx.InvalidURL as error:
            raise ValueError(f"this is no http(s) URL ({error}); expected one such as http://host:8000/v1") from error
        if parsed.scheme not in ("http", "https") or not parsed.host:
            raise ValueError("this is no http(s) URL; expected one such as http://host:8000/v1")
        if parsed.userinfo or parsed.query:
            raise ValueError(
                "the URL holds a user, a password or a query; take it out, and name a token by token_variable"
            )
        return url.rstrip("/")


@dataclass(frozen=True)
class Question:
    """One message about some pictures."""

    name: str
    """Name of the sample or medium that is asked about, for error messages."""
    content: Callable[[], Content]
    """Makes the message when its turn comes. Raises ``ValueError`` if it cannot be made."""


class ChatService:
    """Asks the service, with several questions at once."""

    def __init__(self, settings: ChatSettings, environment: Mapping[str, str] | None = None) -> None:
        """Take the settings, and environment variables; None takes the variables of this process."""
        self._settings, self._environment = settings, os.environ if environment is None else environment

    def token(self) -> str:
        """Return the token that the settings name, "" without one.

        Raises :class:`ConfigError` if the environment does not hold it.
        """
        name = self._settings.token_variable
        if name is None:
            return ""
        token = self._environment.get(name, "").strip()
        if not (token and token.isascii() and token.isprintable()):
            found = "is not a token that a header can hold" if token else "is not set"
            raise ConfigError(f"{name} {found}; token_variable names it for the token of {self._settings.url}")
        return token

    def answers(self, questions: Iterable[Question]) -> Iterator[str | ValueError]:
        """Yield the answer to each question, or the error that says why it has none, in order.

        Raises ``UnavailableError`` if the service is away, and :class:`ConfigError` if it would refuse all questions.
        """
        settings, stop = self._settings, threading.Event()
        limits = {"timeout_s": settings.timeout_s, "tries": settings.tries, "pause_s": settings.pause_s}
        with (
            Chat(settings.url, self.token(), stop, **limits) as chat,
            ThreadPoolExecutor(settings.concurrency) as pool,
        ):
            try:
                yield from pool.map(lambda question: self._answer(chat, question), questions)
            finally:
                # Threads that wait for another try would delay an error.
                stop.set()

    def _answer(self, chat: Chat, question: Question) -> str | ValueError:
        settings = self._settings
        try:
            content = question.content()
        except ValueError as error:
            return error
        request = {"model": settings.model, "messages": [{"role": "user", "content": content}]}
        request |= {"max_tokens": settings.max_tokens, "temperature": settings.temperature}
        try:
            return chat.answer(request, question.name)
        except RefusedError as error:
            return error


def picture_part(data: bytes, kind: Literal["jpeg", "png"]) -> dict[str, Any]:
    """Return the part of a message that holds a picture."""
    return {"type": "image_url", "image_url": {"url": f"data:image/{kind};base64,{base64.b64encode(data).decode()}"}}


def text_part(text: str) -> dict[str, Any]:
    """Return the part of a message that holds a text."""
    return {"type": "text", "text": text}
