"""Decoder of Wan's latents. Each sample is decoded alone, to the pixels that scorers get in cosmos-rl's service."""

import json
import sys
import time
from collections.abc import Mapping, Sequence
from importlib import import_module
from importlib.metadata import version as version_of
from pathlib import Path
from typing import Any

import numpy as np

from cosmos_rl_core import plugins
from cosmos_rl_core.canonical import from_json
from cosmos_rl_core.errors import ConfigError
from cosmos_rl_core.reward_service import frames
from cosmos_rl_core.reward_service.config import DecodeArgs
from cosmos_rl_core.reward_service.worker import described, serve, settle
from cosmos_rl_core.storage.file_digests import files_digest

CONFIG = "config.json"


class DecoderError(ValueError):
    """A folder without a decoder, or latents that it does not decode."""


def folders_of(settings: DecodeArgs) -> dict[str, Path]:
    """Return the folder of each VAE, by the number of its channels as text.

    Raises :class:`ConfigError`, which names each folder that holds no such VAE.
    """
    found, mistakes = dict[str, Path](), list[str]()
    for name, channels in (("model_path", 16), ("wan2pt2_model_path", 48)):
        if place := getattr(settings, name):
            try:
                found[str(channels)] = _folder(Path(place), channels)
            except DecoderError as error:
                mistakes.append(f"decode_args.{name} = {place!r}: {error}")
    if mistakes:
        raise ConfigError("\n".join(mistakes))
    return found


def _folder(place: Path, channels: int) -> Path:
    folder = next((path for path in (place, place / "vae") if (path / CONFIG).is_file()), None)
    if folder is None:
        raise DecoderError("there is no folder of diffusers with the config.json of a VAE")
    try:
        config = from_json((folder / CONFIG).read_bytes())
        name, vaes = str(config["_class_name"]), plugins.load("models", "wan").SPEC.vaes
        if name not in vaes:
            raise DecoderError(f"the VAE is a {name}; expected {', '.join(vaes)}")
        geometry = vaes[name].geometry(vaes[name].defaults | config)
    except (ValueError, KeyError, TypeError) as error:
        raise DecoderError(f"its config.json cannot be used: {error}") from error
    if geometry is None or geometry.channels != channels:
        raise DecoderError(f"the VAE has {geometry and geometry.channels} channels; expected {channels}")
    return folder


def version(folders: Mapping[str, Path], dtype: str) -> str:
    """Return a text of all that decides the decoded pixels: packages, number format, digests of the VAEs' files."""
    packages = ", ".join(f"{name} {version_of(name)}" for name in ("torch", "diffusers"))
    digests = (f"{c} channels sha256:{files_digest(_files(folder))[:16]}" for c, folder in sorted(folders.items()))
    return ", ".join([packages, dtype, *digests])


def _files(folder: Path) -> dict[str, Path]:
    return {path.name: path for path in folder.iterdir() if path.name == CONFIG or path.suffix == ".safetensors"}


class Decoding:
    """Decodes the latents of requests to files of pixels."""

    batching = ""
    """How samples are put together: "", because each is decoded alone."""

    def __init__(self, setup: Mapping[str, Any]) -> None:
        self._torch, folders = import_module("torch"), {c: Path(path) for c, path in setup["decoders"].items()}
        self.version = version(folders, setup["dtype"])
        self._device = settle(setup)
        dtype = getattr(self._torch, setup["dtype"])
        self._vaes = {int(c): self._loaded(folder).to(self._device, dtype).eval() for c, folder in folders.items()}

    def _loaded(self, folder: Path) -> Any:
        name = json.loads((folder / CONFIG).read_bytes())["_class_name"]
        return getattr(import_module("diffusers"), name).from_pretrained(folder, use_safetensors=True)

    def answers(self, requests: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """Decode the latents of each request; return for each the file of pixels and facts about the latents."""
        return [self._answer(request) for request in requests]

    def _answer(self, request: Mapping[str, Any]) -> dict[str, Any]:
        started_s = time.perf_counter()
        frame, path = frames.read(Path(request["frame"])), Path(request["pixels"])
        sent = np.array(frame.array(Path(request["frame"])), order="C")
        torch = self._torch
        # bfloat16, which numpy does not have, comes as the bytes of its numbers.
        numbers = torch.from_numpy(sent)
        numbers = numbers.view(torch.bfloat16) if sent.dtype == np.uint8 else numbers.to(torch.bfloat16)
        for i, each in enumerate(numbers):
            _require_finite(each, f"the latents of sample {i}")
        _write(path, [self.decoded(each) for each in numbers])
        low, high = float(numbers.min()), float(numbers.max())
        about = described(numbers.shape, "bfloat16", low, high)
        return {"pixels": str(path), "input": about, "seconds": time.perf_counter() - started_s}

    def decoded(self, latents: Any) -> np.ndarray:
        """Return the pixels ``[3, frames, height, width]`` uint8 of one sample's latents, normalised.

        Fractions are cut off, not rounded, as in cosmos-rl.
        """
        torch, vae = self._torch, self._vaes[latents.shape[0]]
        mean, std = (
            torch.tensor(vae.config[name], dtype=torch.float32, device=self._device).view(1, -1, 1, 1, 1)
            for name in ("latents_mean", "latents_std")
        )
        with torch.no_grad():
            # Divided by the inverse, like in diffusers' own pipelines, to get the same bits.
            z = latents[None].to(self._device, torch.float32) / (1.0 / std) + mean
            x = vae.decode(z.to(vae.dtype), return_dict=False)[0]
            _require_finite(x, f"the pixels of the decoder in {vae.dtype}")
            return (((1.0 + x.float()) / 2).clamp(0, 1) * 255).to(torch.uint8)[0].cpu().numpy()


def _require_finite(numbers: Any, what: str) -> None:
    """Raise ``ValueError`` for numbers that would become arbitrary pixels."""
    if not numbers.isfinite().all():
        raise ValueError(f"{what} are not all finite")


def _write(path: Path, decoded: Sequence[np.ndarray]) -> None:
    """Write the pixels of samples of one size as one array, to a temporary file first."""
    part = path.with_suffix(".part")
    with part.open("wb") as file:
        np.save(file, np.stack(decoded))
    part.rename(path)


if __name__ == "__main__":
    sys.exit(serve(Decoding))
