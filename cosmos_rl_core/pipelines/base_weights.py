"""The base transformer's tensors, read from its safetensors files one at a time."""

from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor

from cosmos_rl_core.errors import ArtifactError
from cosmos_rl_core.pipelines import directories
from cosmos_rl_core.storage.tensor_files import Spec
from cosmos_rl_core.storage.tensor_headers import read_header


class BaseWeights:
    """Tensors of the transformer in the pipeline directory ``pipeline``, by name, on the CPU.

    Raises :class:`ArtifactError` if one of the ``wanted`` names is missing or has another shape.
    """

    def __init__(self, pipeline: str, wanted: Mapping[str, tuple[int, ...]]) -> None:
        self.files: dict[str, list[str]] = {}
        """Names of the tensors in each file."""
        self.specs: dict[str, Spec] = {}
        """Type and shape of each tensor."""
        self._paths: dict[str, Path] = {}
        for name in directories.transformer_files(pipeline):
            path = Path(pipeline, directories.TRANSFORMER, name)
            with path.open("rb") as stream:
                entries = read_header(stream)
            self.files[name] = [entry.name for entry in entries]
            self.specs |= {entry.name: (entry.dtype, entry.shape) for entry in entries}
            self._paths |= {entry.name: path for entry in entries}
        if missing := sorted(wanted.keys() - self.specs.keys()):
            raise ArtifactError(f"the transformer of {pipeline!r} lacks {len(missing)} weights, e.g. {missing[0]}")
        for name, shape in wanted.items():
            if (found := self.specs[name][1]) != shape:
                raise ArtifactError(f"{name} of {self._paths[name]} is {list(found)}, expected {list(shape)}")

    def stored(self, name: str) -> Tensor:
        """Return a tensor in the type that its file has."""
        with safe_open(self._paths[name], framework="pt") as stored:
            return stored.get_tensor(name)

    def __getitem__(self, name: str) -> Tensor:
        """Return a tensor as float32."""
        return self.stored(name).to(torch.float32)

    def rows(self, name: str, first: int, count: int) -> Tensor:
        """Return some rows of a tensor as float32, without reading the others."""
        with safe_open(self._paths[name], framework="pt") as stored:
            return stored.get_slice(name)[first : first + count].to(torch.float32)
