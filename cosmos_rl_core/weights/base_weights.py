"""The base transformer's tensors, read from its safetensors one at a time: the model is never in memory as a whole."""

from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor

from cosmos_rl_core.errors import ArtifactError
from cosmos_rl_core.pipelines import directories


class BaseWeights:
    """Tensors of the transformer of the pipeline directory ``pipeline``, by name, as float32 on the CPU.

    Raises :class:`ArtifactError` if it has none of a wanted name and shape.
    """

    def __init__(self, pipeline: str, wanted: Mapping[str, tuple[int, ...]]) -> None:
        self._files: dict[str, Path] = {}
        for name in directories.transformer_files(pipeline):
            file = Path(pipeline, directories.TRANSFORMER, name)
            with safe_open(file, framework="pt") as stored:
                for key in wanted.keys() & set(stored.keys()):
                    if (found := tuple(stored.get_slice(key).get_shape())) != wanted[key]:
                        raise ArtifactError(f"{key} of {file} is {list(found)}, expected {list(wanted[key])}")
                    self._files[key] = file
        if missing := sorted(wanted.keys() - self._files.keys()):
            raise ArtifactError(f"the transformer of {pipeline!r} lacks {len(missing)} weights, e.g. {missing[0]}")

    def __getitem__(self, name: str) -> Tensor:
        """One tensor."""
        with safe_open(self._files[name], framework="pt") as stored:
            return stored.get_tensor(name).to(torch.float32)

    def rows(self, name: str, first: int, count: int) -> Tensor:
        """Some rows of one tensor; nothing else of it is read."""
        with safe_open(self._files[name], framework="pt") as stored:
            return stored.get_slice(name)[first : first + count].to(torch.float32)
