"""The tensors that a policy begins with, from another run's policy or from a folder."""

from collections.abc import Callable, Collection, Mapping
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor

from cosmos_rl_core.config.policy import LoraConfig
from cosmos_rl_core.errors import ArtifactError
from cosmos_rl_core.pipelines import directories
from cosmos_rl_core.pipelines.base_weights import BaseWeights
from cosmos_rl_core.weights import adapter_files
from cosmos_rl_core.weights.joined import Joined
from cosmos_rl_core.weights.parts import INIT
from stages.artifacts.artifact import Artifact
from stages.artifacts.request import Input, Request
from stages.contracts import Init
from stages.formats.sample_tensors import part_tensors

Read = Callable[[str], Tensor]
"""Function that returns the tensor with a name, on the CPU."""


def reader_of(request: Request, init: Init, wanted: Mapping[str, tuple[int, ...]]) -> Read:
    """Return a function that reads each of the ``wanted`` tensors of the init, as float32.

    Raises :class:`ArtifactError` if the folder's files are not the planned ones, or if the names of its tensors differ
    from the wanted names. The returned function raises it for a tensor that has another shape, or is not finite.
    """
    names, read = _of_folder(init, wanted) if init.path else _of_run(request.inputs[INIT])
    if differing := sorted(wanted.keys() ^ set(names)):
        raise ArtifactError(
            f"{init.source} does not fit this policy: {len(differing)} tensors are in one of them only, e.g. "
            f"{differing[0]}; begin with weights of the same model and the same modules"
        )

    def checked(name: str) -> Tensor:
        tensor = read(name).to(torch.float32)
        if (shape := tuple(tensor.shape)) != wanted[name]:
            raise ArtifactError(f"{name} of {init.source} is {list(shape)}, expected {list(wanted[name])}")
        if not bool(tensor.isfinite().all()):
            raise ArtifactError(f"{name} of {init.source} is not finite; begin with other weights")
        return tensor

    return checked


def _of_run(inputs: tuple[Input, ...]) -> tuple[Collection[str], Read]:
    """Return names and reader of another run's policy, joined with the adapter that it was stacked on, if any."""
    policy, *below = inputs
    tensors = part_tensors(policy, policy.part)
    if below:
        began = Artifact(below[0]).manifest.config
        frozen, own = (LoraConfig.model_validate(settings) for settings in (began["init"]["lora"], began["lora"]))
        tensors = Joined((frozen, part_tensors(below[0], INIT)), (own, tensors))
    return tensors.keys(), tensors.__getitem__


def _of_folder(init: Init, wanted: Mapping[str, tuple[int, ...]]) -> tuple[Collection[str], Read]:
    folder = Path(init.path)
    digest = directories.pipeline_digest if init.lora is None else adapter_files.folder_digest
    if (found := digest(folder)) != init.digest:
        raise ArtifactError(
            f"the files of {init.source} differ from the planned ones: digest {found}, planned {init.digest}; restore "
            "them, or plan another run"
        )
    if init.lora is None:
        return wanted, BaseWeights(init.path, dict(wanted)).__getitem__
    file = adapter_files.read(folder)

    def read(name: str) -> Tensor:
        with safe_open(file.path, framework="pt") as stored:
            # A copy in memory that PyTorch allocated: with other memory some CPUs round products differently.
            return stored.get_tensor(file.entries[name].name).clone()

    return file.entries, read
