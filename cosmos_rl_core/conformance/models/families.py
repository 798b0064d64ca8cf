"""Every model plugin on its tiny pipeline, and the stock pipeline as users call it, with which it is compared."""

import inspect
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import diffusers
import numpy as np
import torch
from diffusers import DPMSolverMultistepScheduler, FlowMatchEulerDiscreteScheduler, UniPCMultistepScheduler
from PIL import Image
from torch import Tensor, nn

from cosmos_rl_core import plugins, seeds
from cosmos_rl_core.config.policy import SolverConfig
from cosmos_rl_core.conformance.models import tiny_pipelines
from cosmos_rl_core.conformance.models.adapters import adapter_of, load_model
from cosmos_rl_core.models import _loading
from cosmos_rl_core.models._base import Model, guided_velocity
from cosmos_rl_core.models._conditioning import Conditioning, stack
from cosmos_rl_core.models._loading import COMPONENTS
from cosmos_rl_core.models._packing import pack, unpack
from cosmos_rl_core.parallel.precision import ParamDtype, computes_in
from cosmos_rl_core.pipelines import directories, guidance
from cosmos_rl_core.pipelines.modules import align
from cosmos_rl_core.sampling.kernel import Kernel
from cosmos_rl_core.sampling.solvers import kernel_of
from cosmos_rl_core.weights import export
from cosmos_rl_core.weights.policy_weights import PolicyWeights

CPU = torch.device("cpu")
PROMPTS = ["A red cube, 3 balls. ", "two"]
OF_TEXT = [
    name for name in plugins.known("models")
    if not (references := plugins.load("models", name).SPEC.references) or not references.fewest
]  # fmt: skip
"""Model plugins whose prompts need no references."""
LENGTH = 200
"""Largest number of tokens of a prompt: more than any pipeline's own words around a prompt have."""
SIZE = (32, 64)
PICTURES = [
    np.random.default_rng(seed).integers(0, 256, (1, *size, 3), np.uint8)
    for seed, size in enumerate([(75, 131), (140, 66)])
]
"""References: one wide, one tall, with sides that are no multiples of 8."""
VIDEO_FRAMES = 5
STATE, TIME, TEXTS = "state", "time", "texts"
"""Names in the suite of the arguments for state, time and texts of every transformer."""
EMBEDDED_GUIDANCE = 2.5
"""Guidance that is given to transformers which take it as an input."""

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
    """Conditioning of :data:`PROMPTS`."""
    negative: Conditioning
    noise: Tensor
    """Initial noise of model and stock pipeline, one for each prompt."""

    @property
    def frames(self) -> int:
        """Return the frames of a medium, 1 where the pipeline makes images."""
        return frames_of(self.stock)

    @property
    def half_factor(self) -> int:
        """Factor on bounds in bfloat16: transformers of packed tokens differ up to three times as much."""
        return 3 if directories.spec(self.folder).packing > 1 else 1

    @property
    def length(self) -> int:
        """Number of tokens that prompts are encoded to."""
        return length_of(self.folder)

    @property
    def stock_calls(self) -> int:
        """Number of stock calls for :data:`PROMPTS`: with references, a call makes media of one prompt only."""
        return len(PROMPTS) if fewest(self.folder) else 1

    def encode(self, prompt: str) -> Conditioning:
        """Return the conditioning of a prompt, unbatched, with as few references as the model permits."""
        return encode(self.model, self.folder, self.frames, prompt)

    def at(self, size: tuple[int, int]) -> "Family":
        """Return the family, conditioned for media of another size."""
        encoded = [encode(self.model, self.folder, self.frames, prompt, size) for prompt in PROMPTS]
        return replace(self, conditioning=stack(encoded, self.device))

    def encode_negative(self, text: str) -> Conditioning:
        """Return the conditioning of a negative prompt, unbatched, read with the same references."""
        return encode_negative(self.model, self.folder, text)

    def arranged(self, raw: Tensor) -> Tensor:
        """Return latents of the stock VAE in the order of the model's, neither shifted nor scaled."""
        arrange = of_tiny(self.name, "arranged")
        return arrange(raw) if arrange else raw.view(len(raw), *self.noise.shape[1:])

    def load(self, *components: str) -> Model:
        """Load the model once more, so that a test may change it."""
        model = load_model(self.folder, components, self.device)
        model.embedded_guidance_scale = EMBEDDED_GUIDANCE
        return model

    def velocity(
        self, guidance_scale: float = 1.0, dtype: ParamDtype = "float32"
    ) -> Callable[[Tensor, Tensor], Tensor]:
        """Return the guided velocity, a function of state and noise level, as our samplers call it."""

        def velocity(x: Tensor, t: Tensor) -> Tensor:
            with computes_in(dtype, self.device):
                return guided_velocity(self.model, x, t, self.conditioning, self.negative, guidance_scale)

        return velocity


def pictures(count: int) -> list[np.ndarray]:
    """Return ``count`` references: :data:`PICTURES`, then their negatives, and so on."""
    return [255 - PICTURES[i % 2] if i // 2 % 2 else PICTURES[i % 2] for i in range(count)]


def family_of(name: str, root: Path, device: torch.device = CPU) -> Family:
    """Write the tiny pipeline of a model plugin below ``root``, and load it as model and as stock pipeline."""
    return load_family(name, str(tiny_pipelines.save(name, root / name)), device)


def load_family(name: str, folder: str, device: torch.device = CPU) -> Family:
    """Load model and stock pipeline from a tiny pipeline in ``folder``."""
    model, stock = load_model(folder, COMPONENTS, device), stock_pipeline(folder, device)
    model.embedded_guidance_scale = EMBEDDED_GUIDANCE
    shape = model.latent_shape(SIZE, frames_of(stock))
    noise = torch.stack([torch.from_numpy(seeds.normal(shape, "conformance", prompt)) for prompt in PROMPTS])
    conditioning = stack([encode(model, folder, frames_of(stock), prompt) for prompt in PROMPTS], device)
    negative = stack([encode_negative(model, folder, model.negative_prompt)] * len(PROMPTS), device)
    negative = conditioning.guided_by(negative)
    return Family(name, folder, device, model, stock, conditioning, negative, noise.to(device))


def encode(model: Model, folder: str, frames: int, prompt: str, size: tuple[int, int] = SIZE) -> Conditioning:
    """Return the conditioning of a prompt, unbatched, with as few references as the model permits."""
    if shown := pictures(fewest(folder)):
        return model.encode_with(prompt, shown, length_of(folder), size, frames)
    return model.encode_prompts([prompt], length_of(folder))[0]


def encode_negative(model: Model, folder: str, text: str) -> Conditioning:
    """Return the conditioning of a negative prompt, unbatched, read with the same references."""
    references = directories.spec(folder).references
    if references and references.read_with_text:
        return model.encode_negative_with(text, pictures(references.fewest), length_of(folder))
    return model.encode_negative(text, length_of(folder))


def length_of(folder: str) -> int:
    """Return the number of tokens that prompts of a family are encoded to."""
    return directories.spec(folder).prompt_length or LENGTH


def fewest(folder: str) -> int:
    """Return the fewest references that a prompt must have."""
    references = directories.spec(folder).references
    return references.fewest if references else 0


def stock_pipeline(folder: str | Path, device: torch.device = CPU) -> Any:
    """Return the pipeline as users load it.

    Its weights are aligned in memory like ours, because the rounding of products depends on it on some CPUs.
    """
    plugin: Any = adapter_of(folder)
    if hasattr(plugin, "load_stock"):
        pipeline = plugin.load_stock(str(folder), guardrail=False, device=CPU)
    else:
        pipeline = diffusers.DiffusionPipeline.from_pretrained(
            str(folder), local_files_only=True, **_loading.absent(str(folder))
        )
    pipeline.set_progress_bar_config(disable=True)
    for part in pipeline.components.values():
        if isinstance(part, nn.Module):
            align(part)
    return pipeline.to(device)


def kernel(family: Family, solver: Any, num_steps: int) -> Kernel:
    """Return a solver's steps over the noise levels that the stock pipeline and its present scheduler have."""
    config = SolverConfig(solver=solver, num_steps=num_steps)
    with mock.patch.object(family.model, "scheduler", family.stock.scheduler):
        return kernel_of(config, lambda: family.model.schedule(num_steps, SIZE, family.frames))


def frames_of(stock: Any) -> int:
    """:data:`VIDEO_FRAMES`, or 1 for a pipeline that takes no number of frames."""
    return VIDEO_FRAMES if {"frames", "num_frames"} & _loading.stock_arguments(stock, SIZE, 1).keys() else 1


def run_stock(stock: Any, noise: Tensor, **options: Any) -> Any:
    """Return the stock pipeline's result for :data:`PROMPTS`: latents without guidance by default."""
    given = {"prompt": PROMPTS, "num_inference_steps": 5, "output_type": "latent"} | options
    given["prompt"] = [*given["prompt"]]  # some stock pipelines change the list
    references = directories.claimant(type(stock).__name__)[1].references
    if references and references.fewest:
        shown = [Image.fromarray(one[0]) for one in pictures(references.fewest)]
        given.setdefault(references.argument, shown if references.takes_list else shown[0])
        if len(given["prompt"]) > 1:
            return _one_by_one(stock, noise, given)
    spec = directories.claimant(type(stock).__name__)[1]
    told = spec.embedded_guidance_scale and stock.transformer.config.guidance_embeds
    embedded = EMBEDDED_GUIDANCE if told else None
    scale, negative = given.pop("guidance_scale", 1.0), given.pop("negative_prompt", [None])[0]
    given |= guidance.stock_arguments(spec, scale, negative, embedded, len(given["prompt"]))
    given = _loading.stock_arguments(stock, SIZE, frames_of(stock)) | given
    packed = spec.packing > 1
    latents = pack(noise) if packed else noise.clone()
    length = spec.prompt_length or LENGTH
    made = stock(latents=latents, max_sequence_length=length, return_dict=False, **given)[0]
    if given["output_type"] != "latent":
        return made
    of_output = of_tiny(directories.claimant(type(stock).__name__)[0], "latents_of")
    return unpack(made, *noise.shape[2:]) if packed else of_output(stock, made) if of_output else made


def _one_by_one(stock: Any, noise: Tensor, given: dict[str, Any]) -> Any:
    """Return the result of :func:`run_stock`, with a call of its own for each prompt."""
    made = [
        run_stock(stock, noise[i : i + 1], **given | {"prompt": [prompt]}) for i, prompt in enumerate(given["prompt"])
    ]
    return torch.cat(made) if isinstance(made[0], Tensor) else [media for some in made for media in some]


def of_tiny(name: str, function: str) -> Callable[..., Tensor] | None:
    """Return a function of ``tiny.py``, or None. A stock pipeline that arranges latents in another way needs it."""
    return getattr(tiny_pipelines.module_of(name), function, None)


@contextmanager
def fed_to(transformer: nn.Module) -> Iterator[list[dict[str, Any]]]:
    """Keep the arguments of every call of a transformer; state, time and texts have the names of the suite."""
    calls: list[dict[str, Any]] = []
    spec = next(spec for spec in directories.specs() if spec.transformer_class == type(transformer).__name__)
    signature = inspect.signature(transformer.forward)
    names = {next(iter(signature.parameters)): STATE, spec.time_argument: TIME, spec.text_argument: TEXTS}
    assert names.keys() <= signature.parameters.keys()

    def note(_: nn.Module, arguments: tuple[Any, ...], named: dict[str, Any]) -> None:
        given = signature.bind(*arguments, **named).arguments
        calls.append({names.get(name, name): value for name, value in given.items()})

    hook = transformer.register_forward_pre_hook(note, with_kwargs=True)
    try:
        yield calls
    finally:
        hook.remove()


def has_autocast(device: torch.device) -> bool:
    """Return whether a device can compute in bfloat16 as stages do."""
    return device.type in ("cpu", "cuda")


def write_files(files: Iterable[export.File], folder: Path) -> None:
    """Write the files of an export."""
    for name, chunks in files:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(b"".join(chunks))


def tensors_of(weights: PolicyWeights, part: str) -> dict[str, Tensor]:
    """Return contiguous copies of a part's tensors on the CPU."""
    return {name: t.detach().to("cpu", copy=True).contiguous() for name, t in weights.here(part).items()}


def moved(tensors: dict[str, Tensor], by: float) -> dict[str, Tensor]:
    """Return tensors moved by normal noise of their own, times ``by``."""
    return {name: t + by * torch.from_numpy(seeds.normal(tuple(t.shape), "moved", name)) for name, t in tensors.items()}


def as_torchvision() -> Any:
    """Return the functions of torchvision that diffusers calls, made of torch and numpy: it need not be installed."""

    def resize(picture: torch.Tensor, size: list[int], interpolation: str) -> torch.Tensor:
        return torch.nn.functional.interpolate(picture, size, mode=interpolation)

    def to_tensor(picture: Image.Image) -> torch.Tensor:
        return torch.from_numpy(np.array(picture)).permute(2, 0, 1).float() / 255

    functional = SimpleNamespace(resize=resize, to_tensor=to_tensor)
    transforms = SimpleNamespace(functional=functional, InterpolationMode=SimpleNamespace(NEAREST="nearest"))
    return SimpleNamespace(transforms=transforms)
