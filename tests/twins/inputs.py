"""Weights and data of twins: a tiny pipeline of each class, a tiny VLM, captioned media, prompts, conversations."""

import json
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from PIL import Image

from cosmos_rl_core import seeds
from cosmos_rl_core.conformance.kinds import hf_folder
from cosmos_rl_core.conformance.models import tiny_pipelines
from cosmos_rl_core.storage import media
from cosmos_rl_core.tiny import qwen3_vl, shapes

SIZE = [32, 64]
"""Height and width in pixels."""
VIDEO_FRAMES = 9
NUM_MEDIA, NUM_PROMPTS = 16, 5
HELD_OUT = 1000
"""Number of the first medium that no twin trains on."""
OPTIONS: dict[str, dict[str, int]] = {
    "cosmos_predict2_5": {"latent_channels": 16, "num_attention_heads": 4},
    "sana_video": {"latent_channels": 16},
}
"""Latents as Wan's VAE has them, which reward services decode, and a head for each of four peers."""


@dataclass(frozen=True)
class Inputs:
    """Files below ``folder``, each written when it is first asked for, and found by whoever asks later."""

    folder: Path

    def pipeline(self, name: str) -> Path:
        """Return the tiny pipeline of a model plugin."""
        folder = self.folder / "pipelines" / name
        return folder if folder.exists() else tiny_pipelines.save(name, folder, **OPTIONS.get(name, {}))

    @cached_property
    def vlm(self) -> Path:
        """Return a tiny Qwen3-VL."""
        folder = self.folder / "vlm"
        if not folder.exists():
            qwen3_vl.save(folder, 0)
        return folder

    def media(self, kind: str, first: int = 0) -> Path:
        """Return a folder of captioned ``pictures`` or ``clips``; from :data:`HELD_OUT` on none is trained on."""
        folder = self.folder / f"{kind}-{first}"
        if folder.exists():
            return folder
        folder.mkdir(parents=True)
        for number in range(first, first + NUM_MEDIA):
            (folder / f"{number}.json").write_text(json.dumps({"prompt": f"number {number}"}), encoding="utf-8")
            frames = 1 if kind == "pictures" else VIDEO_FRAMES
            pixels = seeds.generator(0, kind, number).integers(0, 256, (frames, *SIZE, 3), dtype=np.uint8)
            if kind == "pictures":
                Image.fromarray(pixels[0]).save(folder / f"{number}.png")
            else:
                (folder / f"{number}.mkv").write_bytes(media.encode(pixels)[1])
        return folder

    @cached_property
    def prompts(self) -> Path:
        """Return a file of held-out prompts."""
        file = self.folder / "validation.json"
        file.parent.mkdir(parents=True, exist_ok=True)
        rows = [{"prompt": f"held out {number}"} for number in range(NUM_PROMPTS)]
        file.write_text(json.dumps(rows), encoding="utf-8")
        return file

    @cached_property
    def prompt_set(self) -> Path:
        """Return the folder of a set of prompts, with the number of held-out ones that the set ``ocr`` has."""
        folder = self.folder / "set"
        folder.mkdir(parents=True, exist_ok=True)
        for name, count in {"train.txt": 64, "test.txt": 1018}.items():
            lines = "\n".join(f"{Path(name).stem} {number}" for number in range(count))
            (folder / name).write_text(lines, encoding="utf-8")
        return folder

    def conversations(self, kind: str) -> dict[str, Path]:
        """Return where conversations of a format are: the settings of its plugin and their values."""
        folder = self.folder / "conversations"
        if not folder.exists():
            shapes.write(folder, range(NUM_MEDIA), range(NUM_MEDIA // 2))
            rows = json.loads((folder / "pictures.json").read_text(encoding="utf-8"))
            rows += json.loads((folder / "clips.json").read_text(encoding="utf-8"))
            (folder / "all.json").write_text(json.dumps(rows), encoding="utf-8")
            hf_folder.save(folder / "chats", {"conversations": pa.array([_messages(row, folder) for row in rows])}, {})
        if kind == "hf_chat":
            return {"path": folder / "chats"}
        return {"annotation_path": folder / "all.json", "media_path": folder / "media"}


def _messages(row: dict[str, Any], folder: Path) -> str:
    """Return a conversation of LLaVA's format in the format of chats."""
    (kind,) = {"image", "video"} & row.keys()
    human, gpt = (turn["value"] for turn in row["conversations"])
    asked = [{"type": kind, kind: str(folder / "media" / row[kind])}, {"type": "text", "text": human}]
    return json.dumps([{"role": "user", "content": asked}, {"role": "assistant", "content": gpt}])
