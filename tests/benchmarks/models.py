"""The models that are measured: the published shapes in ``shapes/``, with random weights and no files of weights."""

import json
import tempfile
import tomllib
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import diffusers
import torch
from torch import Tensor, nn

from cosmos_rl_core.conformance.models.adapters import load_model
from cosmos_rl_core.models._base import Model
from cosmos_rl_core.models._conditioning import Conditioning
from cosmos_rl_core.models._loading import EMPTY_TRANSFORMER
from cosmos_rl_core.parallel import sharding

SHAPES = Path(__file__).parent / "shapes"
_MASKS = ("prompt_attention_mask",)
_WEIGHT_STD = 0.02


@dataclass(frozen=True)
class Shape:
    """A pipeline's configuration files, and the sizes at which it is measured."""

    name: str
    pipeline: str
    num_parameters: int
    """Parameters of the published transformer."""
    components: dict[str, str]
    """Class of each that has a configuration here."""
    without: tuple[str, ...]
    """Components that are not there: text comes as random embeddings."""
    configs: dict[str, dict[str, Any]]
    size: tuple[int, int]
    frames: int
    batch: int
    """Samples at once."""
    max_prompt_length: int
    """Setting of a recipe whose texts have the shape of the conditioning."""
    solver: str
    num_steps: int
    lora_rank: int
    gradient_checkpointing: bool
    conditioning: dict[str, list[int]]
    """Shape of each tensor of one prompt."""

    @classmethod
    def read(cls, name: str, *, tiny: bool = False) -> "Shape":
        """``shapes/<name>.toml``, or what its section ``tiny`` makes of it."""
        values = tomllib.loads((SHAPES / f"{name}.toml").read_text(encoding="utf-8"))
        small = values.pop("tiny")
        configs = {part: values.pop(part) for part in ("transformer", "vae", "scheduler")}
        workload = values.pop("workload") | (small["workload"] if tiny else {})
        for part in ("transformer", "vae"):
            configs[part] |= small[part] if tiny else {}
        without, size = tuple(values.pop("without")), tuple(workload.pop("size"))
        return cls(name=name, configs=configs, without=without, size=size, **values, **workload)

    def with_steps(self, num_steps: int) -> "Shape":
        """Return the same shape with another number of solver steps."""
        return replace(self, num_steps=num_steps)

    def empty_model(self, device: torch.device) -> Model:
        """The model plugin on this pipeline: no VAE, no text encoders, and a transformer without weights, on meta."""
        path = self._folder.name
        return load_model(path, (EMPTY_TRANSFORMER,), device)

    @cached_property
    def _folder(self) -> "tempfile.TemporaryDirectory[str]":
        """Kept as long as the shape: models look into their files again when they are asked for a size."""
        folder = tempfile.TemporaryDirectory()
        self.write(Path(folder.name))
        return folder

    def model(self, device: torch.device) -> Model:
        """The same with random weights, float32."""
        model = self.empty_model(device)
        sharding.materialise(model.transformer, device)
        generator = torch.Generator(device).manual_seed(0)
        with torch.no_grad():
            for parameter in model.transformer.parameters():
                parameter.normal_(std=_WEIGHT_STD, generator=generator)
        if self.gradient_checkpointing:
            model.transformer.enable_gradient_checkpointing()  # pyright: ignore[reportCallIssue]
        return model

    def condition(self, device: torch.device, batch: int | None = None) -> Conditioning:
        """Of ``batch`` random prompts, of which every token counts."""

        def tensor(name: str, shape: list[int]) -> Tensor:
            whole = (self.batch if batch is None else batch, *shape)
            if name in _MASKS or device.type == "meta":
                return torch.ones(whole, device=device)
            return torch.randn(whole, generator=torch.Generator(device).manual_seed(1), device=device)

        return Conditioning({name: tensor(name, shape) for name, shape in self.conditioning.items()})

    def vae(self, device: torch.device) -> nn.Module:
        """Return the pipeline's VAE with random weights, float32."""
        with torch.device(device):
            vae: nn.Module = getattr(diffusers, self.components["vae"]).from_config(self.configs["vae"])
        return vae.requires_grad_(False).eval()

    def write(self, folder: Path) -> None:
        """Write the configuration files of the pipeline."""
        index: dict[str, Any] = {"_class_name": self.pipeline, "_diffusers_version": "0.42.1"}
        index |= {name: ["diffusers", kind] for name, kind in self.components.items()}
        index |= {name: ["transformers", "none"] for name in self.without}
        (folder / "model_index.json").write_text(json.dumps(index), encoding="utf-8")
        for name, config in self.configs.items():
            (folder / name).mkdir()
            file = "scheduler_config.json" if name == "scheduler" else "config.json"
            whole = {"_class_name": self.components[name], **config}
            (folder / name / file).write_text(json.dumps(whole), encoding="utf-8")


def known() -> list[str]:
    """Names of the shapes there are."""
    return sorted(path.stem for path in SHAPES.glob("*.toml"))
