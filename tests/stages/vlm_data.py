"""A dataset in LLaVA's format with real pictures and clips, and its stages made by hand. Imports no torch."""

import json
from pathlib import Path
from typing import Any

import av
from PIL import Image

from cosmos_rl_core.chat_datasets import llava
from cosmos_rl_core.config.policy import LoraConfig
from cosmos_rl_core.config.shared import OptimizerSteps
from cosmos_rl_core.storage.file_digests import files_digest
from cosmos_rl_core.vlms import _folders
from cosmos_rl_core.weights.parts import CURRENT
from stages.artifacts.manifest import Manifest
from stages.artifacts.request import Request
from stages.artifacts.slots import input_of
from stages.vlm.contracts import VlmEvaluate, VlmExport, VlmFinetune, VlmIndex, VlmPolicy, VlmRef, VlmTokenize
from tests.core.vlms.cases import pixels
from tests.stages.conftest import make


def picture(path: Path, height: int, width: int) -> str:
    Image.fromarray(pixels(1, height, width)[0]).save(path)
    return path.name


def clip(path: Path, frames: int, height: int, width: int, fps: int = 4) -> str:
    with av.open(str(path), "w") as container:
        # One thread, no tree of macroblocks: the tree reads memory that x264 has not written, and clips differ.
        stream = container.add_stream("libx264", rate=fps, options={"threads": "1", "mbtree": "0"})
        stream.height, stream.width, stream.pix_fmt = height, width, "yuv420p"
        for frame in pixels(frames, height, width):
            container.mux(stream.encode(av.VideoFrame.from_ndarray(frame, format="rgb24")))
        container.mux(stream.encode(None))
    return path.name


def talk(*values: str, **media: Any) -> dict[str, Any]:
    turns = [{"from": ("human", "gpt")[number % 2], "value": value} for number, value in enumerate(values)]
    return {**media, "conversations": turns}


LANGUAGE = ("language",)


class Talks:
    """A folder with conversations; its stages are made in turn."""

    def __init__(self, folder: Path, model: str) -> None:
        self.folder, self.model = folder, model
        (folder / "media").mkdir(parents=True)
        self.rows: list[Any] = []
        self.video: dict[str, Any] = {"fps": 2.0}
        """Settings of clips."""

    def standard(self) -> "Talks":
        media = self.folder / "media"
        picture(media / "a.jpg", 20, 30)
        picture(media / "b.png", 24, 16)
        clip(media / "c.mp4", 6, 20, 30)
        self.rows += [
            talk("<image>\nWhat?", "A wave.", image="a.jpg"),
            talk("Say <video> and <image>.", "It moves.", "Why?", "It is alive.", video="c.mp4", image="b.png"),
            talk("Hello", "Hi."),
            talk("<image>\nAnd this?", "Another wave, much longer.", image="b.png"),
        ]
        return self

    @property
    def options(self) -> llava.Options:
        return llava.Options(annotation_path=str(self.folder / "rows.json"), media_path=str(self.folder / "media"))

    @property
    def vlm(self) -> VlmRef:
        return VlmRef(path=self.model, digest=_folders.digest(self.model), changes={"video": self.video})

    def index_request(self, slot: str, **settings: Any) -> Request:
        file = self.folder / "rows.json"
        file.write_text(json.dumps(self.rows), encoding="utf-8")
        digest = files_digest({"rows.json": file})
        config = VlmIndex(sources={"mine": self.options}, files_digest=digest, **settings)
        return Request(stage="vlm_index", slot=f"{self.folder}/{slot}", seed=0, config=config)

    def index(self, slot: str, **settings: Any) -> Manifest:
        return make(self.index_request(slot, **settings), self.folder)

    def tokenize_request(self, slot: str, index: str, earlier: tuple[str, ...] = (), **settings: Any) -> Request:
        values: dict[str, Any] = {"max_length": 1000, "conversations_per_shard": 2} | settings
        config = VlmTokenize(vlm=self.vlm, sources={"mine": self.options}, **values)
        inputs = {
            "index": (input_of(f"{self.folder}/{index}"),),
            "earlier": tuple(input_of(f"{self.folder}/{one}") for one in earlier),
        }
        return Request(stage="vlm_tokenize", slot=f"{self.folder}/{slot}", seed=0, config=config, inputs=inputs)

    def tokenize(self, slot: str, index: str, earlier: tuple[str, ...] = (), **settings: Any) -> Manifest:
        return make(self.tokenize_request(slot, index, earlier, **settings), self.folder)

    def policy_request(self, slot: str, lora: LoraConfig | None = None, trains: Any = LANGUAGE) -> Request:
        config = VlmPolicy(vlm=self.vlm, lora=lora, trains=trains)
        return Request(stage="vlm_policy", slot=f"{self.folder}/{slot}", seed=0, config=config)

    def policy(self, slot: str, lora: LoraConfig | None = None, trains: Any = LANGUAGE) -> Manifest:
        return make(self.policy_request(slot, lora, trains), self.folder)

    def finetune_request(
        self, slot: str, policy: str, steps: range, k: int = 0, lora: LoraConfig | None = None, **settings: Any
    ) -> Request:
        values: dict[str, Any] = {"trains": LANGUAGE, "gradient_checkpointing": False, "keeps_ema": False}
        values |= {"batch_size": 4, "row_length": 100, "vlm": self.vlm, "sources": {"mine": self.options}} | settings
        optimizer = OptimizerSteps(
            lrs=tuple(1e-3 for _ in steps),
            ema_decays=tuple(0.5 if values["keeps_ema"] else None for _ in steps),
            betas=(0.9, 0.99),
            epsilon=1e-8,
            weight_decay=0.01,
            grad_norm_clip=1.0,
            first_step=steps.start,
        )
        config = VlmFinetune(lora=lora, steps=optimizer, **values)
        inputs = {
            name: (input_of(f"{self.folder}/{place}"),) for name, place in (("policy", policy), ("tokens", "tokens"))
        }
        slot = f"{self.folder}/{slot}"
        return Request(stage="vlm_finetune", slot=slot, iteration=k, seed=0, config=config, inputs=inputs)

    def finetune(self, slot: str, policy: str, steps: range, k: int = 0, **settings: Any) -> Manifest:
        return make(self.finetune_request(slot, policy, steps, k, **settings), self.folder)

    def evaluate_request(self, slot: str, policy: str, lora: LoraConfig | None = None, **settings: Any) -> Request:
        values: dict[str, Any] = {"trains": LANGUAGE, "max_new_tokens": 3, "conversations_per_shard": 3} | settings
        config = VlmEvaluate(vlm=self.vlm, lora=lora, sources={"mine": self.options}, **values)
        inputs = {"policy": (input_of(f"{self.folder}/{policy}", CURRENT),)}
        inputs["tokens"] = (input_of(f"{self.folder}/tokens"),)
        slot = f"{self.folder}/{slot}"
        return Request(stage="vlm_evaluate", slot=slot, seed=0, config=config, inputs=inputs)

    def evaluate(self, slot: str, policy: str, lora: LoraConfig | None = None, **settings: Any) -> Manifest:
        return make(self.evaluate_request(slot, policy, lora, **settings), self.folder)

    def export_request(self, slot: str, policy: str, lora: LoraConfig | None = None, trains: Any = LANGUAGE) -> Request:
        config = VlmExport(vlm=self.vlm, lora=lora, trains=trains)
        inputs = {"policy": (input_of(f"{self.folder}/{policy}", CURRENT),)}
        slot = f"{self.folder}/{slot}"
        return Request(stage="vlm_export", slot=slot, seed=0, config=config, inputs=inputs)

    def export(self, slot: str, policy: str, lora: LoraConfig | None = None, trains: Any = LANGUAGE) -> Manifest:
        return make(self.export_request(slot, policy, lora, trains), self.folder)
