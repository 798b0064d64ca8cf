"""Every model plugin with a tiny pipeline of its own, and that pipeline as users call it: what conformance means."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import diffusers
import numpy as np
import pytest
import torch
from diffusers import DPMSolverMultistepScheduler, FlowMatchEulerDiscreteScheduler, UniPCMultistepScheduler
from PIL import Image
from torch import Tensor, nn

from cosmos_rl_core import seeds
from cosmos_rl_core.config.policy import SolverConfig
from cosmos_rl_core.models import _loading
from cosmos_rl_core.models._base import COMPONENTS, Conditioning, Model, guided_velocity, stack
from cosmos_rl_core.parallel.precision import ParamDtype, computes_in
from cosmos_rl_core.pipelines import directories
from cosmos_rl_core.sampling.kernel import Kernel
from cosmos_rl_core.sampling.schedule import schedule_of
from cosmos_rl_core.sampling.solvers import kernel_of
from cosmos_rl_core.weights import export
from tests import other_device, tiny_pipelines

CPU = torch.device("cpu")
PROMPTS = ["A red cube, 3 balls. ", "two"]
LENGTH = 200
"""Tokens, more than any pipeline's own words around a prompt."""
SIZE = (32, 64)
VIDEO_FRAMES = 5

FLOW: dict[str, Any] = {"prediction_type": "flow_prediction", "use_flow_sigmas": True}
SCHEDULERS: dict[str, Callable[[], Any]] = {
    "euler": lambda: FlowMatchEulerDiscreteScheduler(shift=3.0),
    "dpm2": lambda: DPMSolverMultistepScheduler(flow_shift=3.0, **FLOW),
    "unipc": lambda: UniPCMultistepScheduler(flow_shift=3.0, **FLOW),
}
"""A scheduler of every kind that pipelines ship with, by our solver that takes the same steps."""


@dataclass(frozen=True)
class Family:
    """A model plugin, loaded from its tiny pipeline, and the stock pipeline of the same directory."""

    name: str
    folder: str
    device: torch.device
    model: Model
    stock: Any
    conditioning: Conditioning
    """Of :data:`PROMPTS`."""
    negative: Conditioning
    noise: Tensor
    """Where both start from, one for each prompt."""

    @property
    def frames(self) -> int:
        """1 where the pipeline makes images."""
        return frames_of(self.stock)

    def load(self, *components: str) -> Model:
        """The model once more, to be changed."""
        return _loading.adapter_of(self.folder).load(self.folder, components, self.device)

    def velocity(
        self, guidance_scale: float = 1.0, dtype: ParamDtype = "float32"
    ) -> Callable[[Tensor, Tensor], Tensor]:
        """What our samplers ask for each state and noise level."""

        def velocity(x: Tensor, t: Tensor) -> Tensor:
            with computes_in(dtype, self.device):
                return guided_velocity(self.model, x, t, self.conditioning, self.negative, guidance_scale)

        return velocity


def family_of(name: str, root: Path, device: torch.device = CPU) -> Family:
    """Write the tiny pipeline of a model plugin below ``root`` and load it twice."""
    save = getattr(tiny_pipelines, f"save_{name}", None)
    if save is None:
        pytest.fail(f"cosmos_rl_core/models/{name}.py has no tiny pipeline: add save_{name} to tests/tiny_pipelines.py")
    return load_family(name, str(save(root / name)), device)


def load_family(name: str, folder: str, device: torch.device = CPU) -> Family:
    """Both from a tiny pipeline that lies in ``folder``."""
    model, stock = _loading.adapter_of(folder).load(folder, COMPONENTS, device), stock_pipeline(folder, device)
    shape = model.latent_shape(SIZE, frames_of(stock))
    noise = torch.stack([torch.from_numpy(seeds.normal(shape, "conformance", prompt)) for prompt in PROMPTS])
    conditioning = stack(model.encode_prompts(PROMPTS, LENGTH), device)
    negative = stack([model.encode_negative(model.negative_prompt, LENGTH)] * len(PROMPTS), device)
    return Family(name, folder, device, model, stock, conditioning, negative, noise.to(device))


def stock_pipeline(folder: str | Path, device: torch.device = CPU) -> Any:
    """The pipeline as users load it, its weights where ours are: some CPUs' products round by the place of operands."""
    plugin: Any = _loading.adapter_of(str(folder))
    if hasattr(plugin, "load_stock"):
        pipeline = plugin.load_stock(str(folder), guardrail=False, device=CPU)
    else:
        pipeline = diffusers.DiffusionPipeline.from_pretrained(
            str(folder), local_files_only=True, **_loading.absent(str(folder))
        )
    pipeline.set_progress_bar_config(disable=True)
    for part in pipeline.components.values():
        if isinstance(part, nn.Module):
            _loading.align(part)
    return pipeline.to(device)


def kernel(solver: Any, scheduler: Any, num_steps: int) -> Kernel:
    """Of the noise levels that a pipeline's scheduler has."""
    config = SolverConfig(solver=solver, num_steps=num_steps)
    return kernel_of(config, lambda: schedule_of(scheduler, num_steps))


def frames_of(stock: Any) -> int:
    """:data:`VIDEO_FRAMES`, or 1 for a pipeline that takes no number of frames."""
    return VIDEO_FRAMES if {"frames", "num_frames"} & _loading.stock_arguments(stock, SIZE, 1).keys() else 1


def run_stock(stock: Any, noise: Tensor, **options: Any) -> Any:
    """What the stock pipeline makes of :data:`PROMPTS`, without guidance and as latents unless told otherwise."""
    given = {"prompt": PROMPTS, "num_inference_steps": 5, "guidance_scale": 1.0, "output_type": "latent"} | options
    if given["guidance_scale"] != 1:
        given["guidance_scale"] -= directories.claimant(type(stock).__name__)[1].guidance_offset
    sizes = _loading.stock_arguments(stock, SIZE, frames_of(stock))
    return stock(latents=noise.clone(), max_sequence_length=LENGTH, return_dict=False, **(sizes | given))[0]


@contextmanager
def fed_to(transformer: nn.Module) -> Iterator[list[dict[str, Any]]]:
    """The arguments of every call of a transformer, as they come."""
    calls: list[dict[str, Any]] = []

    def note(_: nn.Module, arguments: tuple[Any, ...], named: dict[str, Any]) -> None:
        calls.append(dict(zip(["hidden_states"], arguments, strict=False)) | named)

    hook = transformer.register_forward_pre_hook(note, with_kwargs=True)
    try:
        yield calls
    finally:
        hook.remove()


def has_autocast(device: torch.device) -> bool:
    """Whether it can compute in bfloat16 as stages do."""
    return device != other_device.DEVICE


def write_files(files: Iterable[export.File], folder: Path) -> None:
    """What an export consists of."""
    for name, chunks in files:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(b"".join(chunks))


def moved(tensors: dict[str, Tensor], by: float) -> dict[str, Tensor]:
    """Weights some way off, each by normal noise of its own."""
    return {name: t + by * torch.from_numpy(seeds.normal(tuple(t.shape), "moved", name)) for name, t in tensors.items()}


def as_torchvision() -> Any:
    """What diffusers takes of torchvision, which no machine without a GPU has a build of: by torch and numpy."""

    def resize(picture: torch.Tensor, size: list[int], interpolation: str) -> torch.Tensor:
        return torch.nn.functional.interpolate(picture, size, mode=interpolation)

    def to_tensor(picture: Image.Image) -> torch.Tensor:
        return torch.from_numpy(np.array(picture)).permute(2, 0, 1).float() / 255

    functional = SimpleNamespace(resize=resize, to_tensor=to_tensor)
    transforms = SimpleNamespace(functional=functional, InterpolationMode=SimpleNamespace(NEAREST="nearest"))
    return SimpleNamespace(transforms=transforms)
