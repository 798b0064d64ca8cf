"""Tensors of other projects' pickles. The only module that unpickles, with ``weights_only``.

That makes tensors and plain containers and runs no code.
"""

import pickle
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from cosmos_rl_core.errors import ConfigError


def read(file: Path, what: str) -> dict[str, Tensor]:
    """Return the tensors of a file by name, without its other values. ``what`` says in errors which file is expected.

    Raises :class:`ConfigError` if it holds anything else.
    """
    if not file.is_file():
        raise ConfigError(f"no file at {file}; expected {what}")
    try:
        values = torch.load(file, map_location="cpu", weights_only=True, mmap=True)
    except (RuntimeError, pickle.UnpicklingError, EOFError, ValueError) as error:
        reason = str(error).partition("\n")[0]
        raise ConfigError(f"{file} is not a file of tensors only: {reason}") from error
    if not isinstance(values, Mapping):
        raise ConfigError(f"{file} holds a {type(values).__name__}, expected tensors by name")
    # Checkpoints of training scripts hold them beside an optimizer.
    values = values["state_dict"] if isinstance(values.get("state_dict"), Mapping) else values
    return {str(name): value for name, value in values.items() if isinstance(value, Tensor)}
