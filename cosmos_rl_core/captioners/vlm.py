"""Captions by a vision-language model (VLM) of transformers that the stage ``describe`` loads itself.

Captions are made one at a time, and every token is the likeliest one, so a caption depends on its medium alone.
"""

from collections.abc import Iterator, Sequence
from contextlib import closing
from functools import cached_property
from importlib import import_module
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import Field, field_validator, model_validator

from cosmos_rl_core.captioners._base import Medium
from cosmos_rl_core.chat.client import RefusedError
from cosmos_rl_core.config.base import NOT_IDENTITY, Section, UserPath
from cosmos_rl_core.config.train import CaptionerOptions
from cosmos_rl_core.datasets._base import ItemError
from cosmos_rl_core.errors import ConfigError
from cosmos_rl_core.vlms import _base, _folders

DEFAULT_FPS = 2.0


class ModelFiles(Section):
    """The files of a VLM, by their digest, and the plugin that makes its inputs."""

    plugin = ("vlms", "processor")
    processor: str
    """The VLM plugin."""
    digest: str
    """Digest of weights, settings, tokenizer and chat template."""


class Options(CaptionerOptions):
    """The model and the instruction that it gets."""

    torch = True
    by: Literal["vlm"] = "vlm"  # pyright: ignore[reportIncompatibleVariableOverride]

    model: UserPath = Field(min_length=1, json_schema_extra=NOT_IDENTITY)
    """Folder of the model, or its name on the Hugging Face hub, ``owner/name`` or ``owner/name@revision``, which is in
    the local cache. Captions depend on its files, not on their path."""
    instruction: str = Field(min_length=1)
    """Text that the model is given after the medium, for example ``Describe this video in one paragraph.``"""
    max_new_tokens: int = Field(default=512, ge=1)
    """Maximum number of tokens of a caption. A caption that reaches it is cut, so it is not used."""
    num_frames: int | None = Field(default=None, ge=1)
    """Number of frames that the model sees of a video, evenly spaced. Shorter videos may be refused."""
    fps: float | None = Field(default=None, gt=0)
    """Frames that it sees of each second of a video, instead of ``num_frames``. Default: 2, without ``num_frames``."""
    max_side: int | None = Field(default=1024, ge=1)
    """Largest height and width of an image or frame in pixels, up to the model's next multiple. Larger ones are scaled
    down. Bounds of the model's folder hold too."""
    param_dtype: Literal["float32", "bfloat16"] = "bfloat16"
    """Type of the weights and of the computations of the model."""
    files: ModelFiles | None = None
    """The files of the model. They are found when captions are planned; other files than these are refused."""

    @field_validator("instruction")
    @classmethod
    def _not_empty(cls, text: str) -> str:
        if not text.strip():
            raise ValueError("the instruction is empty")
        return text

    @model_validator(mode="after")
    def _one_way_to_sample(self) -> Self:
        if self.num_frames is not None and self.fps is not None:
            raise ValueError("num_frames and fps are both set; set one of them")
        return self

    @property
    def asked(self) -> str:
        """Return the instruction."""
        return self.instruction

    @property
    def changes(self) -> _base.Changes:
        """Return the settings that replace the settings in the model's folder."""
        fps = self.fps or DEFAULT_FPS
        return {"video": {"fps": fps} if self.num_frames is None else {"num_frames": self.num_frames}}

    def pinned(self) -> Self:
        """Return the settings with the digest of the model's files, and its folder as an absolute path.

        Raises :class:`ConfigError` with every reason why the model cannot be used, and if its files are not the files
        that the settings name.
        """
        path = _folders.resolve(self.model)
        _folders.check(path, self.changes, self.instruction)
        processor, _ = _base.serving(path)
        files = ModelFiles(processor=processor, digest=_folders.digest(path))
        if self.files not in (None, files):
            raise ConfigError(
                f"caption.model: {path} has other files than were planned (digest {files.digest[:12]}, plugin "
                f"{processor}; planned {self.files.digest[:12]}, {self.files.processor}); restore them, or leave out "
                "caption.files and prepare the dataset again"
            )
        # A name on the hub stays a name: each machine has a cache of its own.
        place = path if Path(self.model).is_dir() else self.model
        return self.model_copy(update={"files": files, "model": place})


class Captioner:
    """Runs the model, on the current GPU if there is one. It is loaded for the first medium."""

    def __init__(self, options: Options) -> None:
        self._options = options

    def check(self) -> None:
        """Do nothing: :meth:`Options.pinned` checks the model."""

    def captions(self, media: Sequence[Medium]) -> Iterator[str | RefusedError]:
        """Yield a caption of each medium, or the error that says why it has none, in order."""
        return map(self._caption, media)

    def _caption(self, medium: Medium) -> str | RefusedError:
        asked = {"type": "text", "text": self._options.instruction}
        try:
            with closing(medium.open()) as file:
                shown = {"type": medium.kind, medium.kind: file}
                batch = self._vlm.prepare([[{"role": "user", "content": [shown, asked]}]])
            (answer,) = self._vlm.answers(batch, self._options.max_new_tokens)
        except ItemError as error:
            # There is only one message: its number says nothing.
            return RefusedError(str(error).removeprefix("message 1: "), final=True)
        if not answer.whole:
            reason = f"the caption is cut at max_new_tokens = {self._options.max_new_tokens}; raise it"
            return RefusedError(reason, final=True)
        return answer.text.strip() or RefusedError("the model answered nothing", final=True)

    @cached_property
    def _vlm(self) -> Any:
        options = self._options.pinned()
        # Imported here, so that planning never loads torch.
        torch, vlms = import_module("torch"), import_module("cosmos_rl_core.vlms._model")
        device = import_module("cosmos_rl_core.parallel.devices").current()
        dtype = getattr(torch, options.param_dtype)
        return vlms.load(_folders.resolve(options.model), device, dtype, options.changes, options.max_side)
