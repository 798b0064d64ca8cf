"""Tensors of other projects' pickles. This is the only module that unpickles.

It does so with ``weights_only``, which makes tensors and plain containers and runs no code.
"""

import pickle
import re
import zipfile
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from cosmos_rl_core.errors import ConfigError

_UNSUPPORTED = re.compile(r"unsupported (?:global|operand)\S* (?:GLOBAL )?\S+", re.IGNORECASE)


def read(file: Path, what: str) -> dict[str, Tensor]:
    """Return the tensors of a file by name, without its other values. ``what`` says in errors which file is expected.

    Raises :class:`ConfigError` if it is missing, or holds objects other than tensors, numbers, texts and containers.
    """
    if not file.is_file():
        raise ConfigError(f"no file at {file}; expected {what}")
    try:
        # Files of PyTorch before 1.6 are no zip files, and cannot be mapped.
        mapped = zipfile.is_zipfile(file)
        values = torch.load(file, map_location="cpu", weights_only=True, mmap=mapped)
    except (RuntimeError, pickle.UnpicklingError, EOFError, ValueError) as error:
        reason = f"{_reason(error)}; expected {what}"
        raise ConfigError(f"{file} is not a file of tensors only, as torch.save writes it: {reason}") from error
    if not isinstance(values, Mapping):
        raise ConfigError(f"{file} holds a {type(values).__name__}, expected tensors by name")
    # Checkpoints of training scripts hold an optimizer, too.
    values = values["state_dict"] if isinstance(values.get("state_dict"), Mapping) else values
    return {str(name): value for name, value in values.items() if isinstance(value, Tensor)}


def _reason(error: Exception) -> str:
    """Return why PyTorch did not read a file, without its advice to read it in a way that may run code."""
    text = str(error).strip() or type(error).__name__
    found = _UNSUPPORTED.search(text)
    return found[0] if found else text.partition("\n")[0]
