"""Datasets of drawn pictures, the Requests that prepare them, and plain loops that do the same with stock libraries."""

import io
import json
import tarfile
import time
from collections.abc import Callable
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
import torch
from diffusers import AutoencoderKL, StableDiffusion3Pipeline
from PIL import Image
from safetensors.torch import save_file

from cosmos_rl_core.pipelines.directories import resolve_path
from cosmos_rl_core.recipes.dataset import DatasetConfig
from cosmos_rl_core.recipes.reading import check
from flows.operations.preprocess import preprocess
from flows.planning.plan import freeze, make_plan
from flows.planning.run import Run
from stages.artifacts.manifest import Manifest
from stages.artifacts.request import Request
from stages.execution.execution import Execution
from stages.execution.outcome import Outcome
from stages.execution.runner import execute

BASE = "package:tiny-sd3"
TINY, USUAL = (32, 64), (512, 512)
"""Height and width of pictures."""
MAX_PROMPT_LENGTH = 12
PER_TAR = 100


class Dataset:
    """Drawn pictures, each with a caption of its own, as files or in tars, and a store in which they are prepared."""

    def __init__(self, folder: Path, num_items: int, source: str = "local", size: tuple[int, int] = TINY) -> None:
        self.folder, self.num_items, self.source, self.size = folder, num_items, source, size
        self.store_url = str(folder / "store")
        self.media = folder / "media"
        self.media.mkdir(parents=True)
        write = _write_files if source == "local" else _write_tars
        write(self.media, num_items, size)

    @property
    def config(self) -> DatasetConfig:
        """What ``preprocess`` reads."""
        place = {"local_dir": str(self.media)} if self.source == "local" else {"urls": [str(self.media)]}
        return DatasetConfig.model_validate({"name": "drawn", "sources": {"here": {"name": self.source} | place}})

    @cached_property
    def index(self) -> Request:
        """The Request of its first part, which is made then."""
        asked: list[Request] = []

        def launch(_: str, request: Request) -> list[Manifest]:
            asked.append(request)
            return [run(request, self.folder)]

        preprocess(self.config, self.store_url, launch)
        (request,) = asked
        return request

    @cached_property
    def prepared(self) -> dict[str, Request]:
        """The Requests of its text embeddings and latents, by the name of the stage; nothing of them is made."""
        assert self.index.stage == "index"
        requests = self.planned().prepared.steps().values()
        return {request.stage: request for request in requests}

    def planned(self, batch_size: int = 4) -> Run:
        """Supervised training on it."""
        diffusers = {"inference_size": [*self.size], "max_prompt_length": MAX_PROMPT_LENGTH}
        sft = {"type": "sft", "mini_batch": 4, "steps_per_iteration": 12}
        dataset = {"name": "snapshot", "dataset": "drawn"}
        values = {
            "policy": {"model_name_or_path": BASE, "diffusers": diffusers, "lora": {"r": 4}},
            "train": {
                "num_iterations": 1,
                "train_batch_per_replica": batch_size,
                "optm_lr": 1e-4,
                "train_policy": sft | {"dataset": dataset},
            },
        }
        plan = make_plan(check(values, "benchmark"), "run", "benchmark.toml", (), self.store_url)
        return Run(freeze(plan, self.store_url), self.store_url)


def run(request: Request, folder: Path) -> Manifest:
    """Run a stage in this process."""
    return execute(request, Execution(), Outcome(folder / "outcome", 0))


def again(request: Request, number: int) -> Request:
    """The same work in a folder of its own, so that nothing of it is finished or in a pool."""
    folder, _, name = request.slot.rpartition("/")
    return request.model_copy(update={"slot": f"{folder}-{number}/{name}"})


class Seconds(NamedTuple):
    """What a piece of work took."""

    clock: float
    core: float
    """Computing, by all threads."""


def seconds_of(work: Callable[[], object]) -> Seconds:
    """Do the work once."""
    started = time.perf_counter(), time.process_time()
    work()
    return Seconds(time.perf_counter() - started[0], time.process_time() - started[1])


def _picture(number: int, size: tuple[int, int]) -> bytes:
    """Draw a picture of soft spots."""
    height, width = size
    pixels = np.random.default_rng(number).integers(0, 256, (height // 8, width // 8, 3), dtype=np.uint8)
    buffer = io.BytesIO()
    Image.fromarray(pixels).resize((width, height), Image.Resampling.BICUBIC).save(buffer, "JPEG", quality=90)
    return buffer.getvalue()


def _caption(number: int) -> str:
    return f"cup {number}"


def _write_files(folder: Path, num_items: int, size: tuple[int, int]) -> None:
    for number in range(num_items):
        (folder / f"{number:06d}.jpg").write_bytes(_picture(number, size))
        (folder / f"{number:06d}.json").write_text(json.dumps({"prompt": _caption(number)}), encoding="utf-8")


def _write_tars(folder: Path, num_items: int, size: tuple[int, int]) -> None:
    for first in range(0, num_items, PER_TAR):
        with tarfile.open(folder / f"{first // PER_TAR:05d}.tar", "w") as tar:
            for number in range(first, min(first + PER_TAR, num_items)):
                for extension, data in (("jpg", _picture(number, size)), ("txt", _caption(number).encode())):
                    member = tarfile.TarInfo(f"{number:06d}.{extension}")
                    member.size = len(data)
                    tar.addfile(member, io.BytesIO(data))


class Loops:
    """Plain loops over a dataset in one process, one item at a time, each result one file."""

    def __init__(self, dataset: Dataset) -> None:
        self.dataset, self.path = dataset, resolve_path(BASE)
        self._out = dataset.folder / "plain"
        self._out.mkdir(exist_ok=True)

    @torch.no_grad()
    def embed(self) -> None:
        """The stock pipeline's embeddings of all captions."""
        pipeline: Any = StableDiffusion3Pipeline.from_pretrained(self.path, transformer=None, vae=None)
        for number in range(self.dataset.num_items):
            text = _caption(number)
            embeds, _, pooled, _ = pipeline.encode_prompt(
                text, text, text, do_classifier_free_guidance=False, max_sequence_length=MAX_PROMPT_LENGTH
            )
            tensors = {"prompt_embeds": embeds[0], "pooled_prompt_embeds": pooled[0]}
            save_file(tensors, self._out / f"{number:06d}.embeds.safetensors")

    @torch.no_grad()
    def encode(self) -> None:
        """The stock VAE's latents of all pictures."""
        height, width = self.dataset.size
        vae: Any = AutoencoderKL.from_pretrained(self.path, subfolder="vae")
        for number in range(self.dataset.num_items):
            with Image.open(self.dataset.media / f"{number:06d}.jpg") as picture:
                pixels = np.asarray(picture.convert("RGB").resize((width, height), Image.Resampling.BICUBIC))
            unit = torch.tensor(pixels, device="cpu").permute(2, 0, 1)[None].float() / 127.5 - 1
            latents = vae.encode(unit).latent_dist.mode()
            latents = (latents - (vae.config.shift_factor or 0.0)) * vae.config.scaling_factor
            save_file({"latents": latents[0]}, self._out / f"{number:06d}.latents.safetensors")

    def index(self) -> None:
        """Sizes and captions of all samples of the tars, in one table; every picture is decoded."""
        rows: dict[str, dict[str, Any]] = {}
        for path in sorted(self.dataset.media.glob("*.tar")):
            with tarfile.open(path) as tar:
                for member in tar:
                    key, _, extension = member.name.partition(".")
                    file = tar.extractfile(member)
                    assert file is not None
                    row = rows.setdefault(f"{path.stem}/{key}", {})
                    data = file.read()
                    if extension == "txt":
                        row["caption"] = data.decode()
                        continue
                    with Image.open(io.BytesIO(data)) as picture:
                        picture.load()
                        row["size_bytes"], (row["width"], row["height"]) = len(data), picture.size
        assert len(rows) == self.dataset.num_items
        pd.DataFrame.from_dict(rows, orient="index").to_parquet(self._out / "index.parquet")
