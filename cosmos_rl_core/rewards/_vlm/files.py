"""Scorers by vision-language models (VLMs): their settings, and the identity of their files. Without torch.

Torch is loaded with the model, for the first sample that is scored. Each sample gets a forward pass of its own.
"""

from functools import cached_property
from importlib import import_module
from pathlib import Path
from typing import Any, Literal

from pydantic import Field

from cosmos_rl_core.config.base import NOT_IDENTITY, UserPath
from cosmos_rl_core.config.train import RewardOptions
from cosmos_rl_core.errors import ConfigError
from cosmos_rl_core.rewards._base.packages import version
from cosmos_rl_core.storage.file_digests import files_digest
from cosmos_rl_core.vlms import _folders


class VlmOptions(RewardOptions):
    """Base of the ``Options`` of scorers by a VLM."""

    model: UserPath = Field(min_length=1, json_schema_extra=NOT_IDENTITY)
    """Folder of the model, or its name on the Hugging Face hub, ``owner/name`` or ``owner/name@revision``, which is in
    the local cache. Scores depend on its files, not on their path."""
    prompt_file: UserPath | None = Field(default=None, json_schema_extra=NOT_IDENTITY)
    """File with the text that the model was trained with. Scores depend on its text, not on its path. Default: a file
    in the model's folder, which the page on rewards names."""
    param_dtype: Literal["float32", "bfloat16"] = "bfloat16"
    """Type of the weights and of the computations of the model."""


class VlmFiles:
    """The files of a scorer: the model's folder, and the text that the model was trained with."""

    def __init__(self, options: VlmOptions, prompt_name: str) -> None:
        """Take the options, and the name of the prompt's file in the model's folder."""
        self._options, self._prompt_name = options, prompt_name

    @cached_property
    def folder(self) -> str:
        """Return the absolute path of the model's folder. Raises :class:`ConfigError` if there is none."""
        return _folders.resolve(self._options.model)

    @cached_property
    def prompt(self) -> str:
        """Return the text that the model was trained with. Raises :class:`ConfigError` if there is no such file."""
        path = self._prompt_path
        try:
            return path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            name = self._options.name
            advice = "write the text that the model was trained with there, or name its file: prompt_file"
            raise ConfigError(f"{name} needs {path}, which cannot be read ({error}); {advice}") from error

    @cached_property
    def version(self) -> str:
        """Return the versions of the packages and the digest of all files that decide scores.

        Raises :class:`ConfigError` that names the missing files.
        """
        _folders.check(self.folder, {}, "")
        found = files_digest({"prompt": self._prompt_path})[:16] if self.prompt else ""
        packages = f"transformers {version('transformers')}, torch {version('torch').partition('+')[0]}"
        return f"{packages}, sha256:{_folders.digest(self.folder)[:16]}, prompt sha256:{found}"

    @property
    def _prompt_path(self) -> Path:
        return Path(self._options.prompt_file or Path(self.folder, self._prompt_name))


def device_and_dtype(param_dtype: str) -> tuple[Any, Any]:
    """Return the torch device of this process, and the torch dtype with this name. Imports torch.

    Raises like :func:`cosmos_rl_core.parallel.devices.current`.
    """
    device = import_module("cosmos_rl_core.parallel.devices").current()
    return device, getattr(import_module("torch"), param_dtype)
