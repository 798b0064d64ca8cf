"""Captions by a vision-language model behind an OpenAI-compatible service, such as vLLM's.

An image, or some frames of a video, is sent with an instruction to ``<url>/chat/completions``.
"""

import base64
import os
import threading
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from typing import Any, Literal

import httpx
from pydantic import Field, field_validator

from cosmos_rl_core.captioners._base import Medium, RefusedError
from cosmos_rl_core.captioners._chat import Chat
from cosmos_rl_core.config.base import NOT_IDENTITY
from cosmos_rl_core.config.train import CaptionerOptions
from cosmos_rl_core.datasets._base import ItemError
from cosmos_rl_core.datasets._pictures import pictures
from cosmos_rl_core.errors import ConfigError


class Options(CaptionerOptions):
    """The service, its model, and what it is asked."""

    by: Literal["endpoint"] = "endpoint"  # pyright: ignore[reportIncompatibleVariableOverride]

    url: str = Field(json_schema_extra=NOT_IDENTITY)
    """Base URL of the service, as OpenAI's clients take it: ``http://host:8000/v1``."""
    model: str = Field(min_length=1)
    """The service's name of the model."""
    instruction: str = Field(min_length=1)
    """Text that is sent with the pictures, for example ``Describe this video in one paragraph.``"""
    max_tokens: int = Field(default=512, ge=1)
    """Maximum number of tokens of a caption. A caption that reaches it is cut, so it is not used."""
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
    """Tries of a request before the service counts as unavailable."""
    pause_s: float = Field(default=1.0, gt=0, json_schema_extra=NOT_IDENTITY)
    """Seconds before the second try; each further pause is twice as long. A service may ask for a longer one."""

    @field_validator("url")
    @classmethod
    def _check_url(cls, url: str) -> str:
        try:
            parsed = httpx.URL(url)
        except httpx.InvalidURL as error:
            raise ValueError(f"is no http(s) URL ({error})") from error
        if parsed.scheme not in ("http", "https") or not parsed.host:
            raise ValueError("is no http(s) URL")
        if parsed.userinfo or parsed.query:
            raise ValueError("holds a user, a password or a query; name a token by token_variable")
        return url.rstrip("/")

    @property
    def asked(self) -> str:
        """Return the instruction."""
        return self.instruction


class Captioner:
    """Asks the service, for several media at once."""

    def __init__(self, options: Options, environment: Mapping[str, str] = os.environ) -> None:
        self._options, self._environment = options, environment

    def check(self) -> None:
        """Raise :class:`ConfigError` if the environment does not hold the token that the options name."""
        self._token()

    def captions(self, media: Sequence[Medium]) -> Iterator[str | RefusedError]:
        """Yield a caption of each medium, or why it has none, in order."""
        options, stop = self._options, threading.Event()
        limits = {"timeout_s": options.timeout_s, "tries": options.tries, "pause_s": options.pause_s}
        with (
            Chat(options.url, self._token(), stop, **limits) as chat,
            ThreadPoolExecutor(options.concurrency) as pool,
        ):
            try:
                yield from pool.map(lambda medium: self._caption(chat, medium), media)
            finally:
                # What still waits to try again would hold up an error.
                stop.set()

    def _caption(self, chat: Chat, medium: Medium) -> str | RefusedError:
        options = self._options
        try:
            sizes = {"num_frames": options.num_frames, "max_side": options.max_side}
            with closing(medium.open()) as file:
                found = pictures(file, medium.kind, medium.frames, **sizes)
            content: list[dict[str, Any]] = [{"type": "text", "text": options.instruction}]
            content += [{"type": "image_url", "image_url": {"url": _data_url(picture)}} for picture in found]
            request = {"model": options.model, "messages": [{"role": "user", "content": content}]}
            request |= {"max_tokens": options.max_tokens, "temperature": options.temperature}
            return chat.answer(request, medium.name)
        except ItemError as error:
            return RefusedError(str(error), final=True)
        except RefusedError as error:
            return error

    def _token(self) -> str:
        name = self._options.token_variable
        if name is None:
            return ""
        token = self._environment.get(name, "").strip()
        if not (token and token.isascii() and token.isprintable()):
            found = "is not a token that a header can hold" if token else "is not set"
            raise ConfigError(f"{name} {found}; caption.token_variable names it for the token of {self._options.url}")
        return token


def _data_url(picture: bytes) -> str:
    return f"data:image/jpeg;base64,{base64.b64encode(picture).decode()}"
