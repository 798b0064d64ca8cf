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
from tests import tiny_scorers
from tests.running_service import free_port

SIZE = [32, 64]
"""Height and width in pixels."""
VIDEO_FRAMES = 9
NUM_MEDIA, NUM_PROMPTS, NUM_EDITS = 16, 5, 64
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

    def pipeline(self, name: str, **options: Any) -> Path:
        """Return the tiny pipeline of a model plugin."""
        folder = self.folder / "pipelines" / "-".join([name, *options])
        return folder if folder.exists() else tiny_pipelines.save(name, folder, **OPTIONS.get(name, {}), **options)

    @cached_property
    def vlm(self) -> Path:
        """Return a tiny Qwen3-VL."""
        folder = self.folder / "vlm"
        if not folder.exists():
            qwen3_vl.save(folder, 0)
        return folder

    def media(self, kind: str, first: int = 0) -> Path:
        """Return a folder of captioned ``pictures``, ``edits`` or ``clips``.

        From the number :data:`HELD_OUT` on none is trained on. The results of edits refer to one picture each.
        """
        folder = self.folder / f"{kind}-{first}"
        if folder.exists():
            return folder
        folder.mkdir(parents=True)
        numbers = range(first, first + NUM_MEDIA)
        before = references(folder / "before", numbers) if kind == "edits" else {}
        for number in numbers:
            named = {"references": [f"before/{before[number]}"]} if before else {}
            about = {"prompt": f"number {number}"} | named
            (folder / f"{number}.json").write_text(json.dumps(about), encoding="utf-8")
            frames = VIDEO_FRAMES if kind == "clips" else 1
            pixels = seeds.generator(0, kind, number).integers(0, 256, (frames, *SIZE, 3), dtype=np.uint8)
            extension, data = media.encode(pixels)
            (folder / f"{number}.{extension}").write_bytes(data)
        return folder

    @cached_property
    def prompts(self) -> Path:
        """Return a file of held-out prompts."""
        file = self.folder / "validation.json"
        file.parent.mkdir(parents=True, exist_ok=True)
        rows = [{"prompt": f"held out {number}"} for number in range(NUM_PROMPTS)]
        file.write_text(json.dumps(rows), encoding="utf-8")
        return file

    def edits(self, first: int = 0) -> Path:
        """Return a file of prompts with a reference each; from :data:`HELD_OUT` on none is trained on."""
        file = self.folder / f"edits-{first}.jsonl"
        if not file.exists():
            numbers = range(first, first + (NUM_PROMPTS if first else NUM_EDITS))
            before = references(self.folder / "before", numbers)
            rows = [{"prompt": f"number {n}", "references": [f"before/{before[n]}"]} for n in numbers]
            file.write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
        return file

    def scorer(self, name: str) -> dict[str, Any]:
        """Return the settings of a reward that name its tiny weights."""
        if name not in self._scorers:
            self._scorers[name] = tiny_scorers.settings(name, self.folder / name)
        return self._scorers[name]

    @cached_property
    def _scorers(self) -> dict[str, dict[str, Any]]:
        return {}

    @cached_property
    def judge_port(self) -> int:
        """Return the port of this machine at which a judge of edits answers."""
        file = self.folder / "judge-port"
        if not file.exists():
            self.folder.mkdir(parents=True, exist_ok=True)
            file.write_text(str(free_port()), encoding="utf-8")
        return int(file.read_text(encoding="utf-8"))

    @cached_property
    def prompt_set(self) -> Path:
        """Return the folder of a set of prompts, with as many held-out ones as the set ``ocr`` has."""
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


def references(folder: Path, numbers: range) -> dict[int, str]:
    """Write a picture for each number, of two sizes, and return the names of their files."""
    folder.mkdir(parents=True, exist_ok=True)
    names = {number: f"{number}.png" for number in numbers}
    for number, name in names.items():
        pixels = seeds.generator(0, "reference", number).integers(0, 256, (64, 64 + 32 * (number % 2), 3), np.uint8)
        Image.fromarray(pixels).save(folder / name)
    return names


def _messages(row: dict[str, Any], folder: Path) -> str:
    """Return a conversation of LLaVA's format in the format of chats."""
    (kind,) = {"image", "video"} & row.keys()
    human, gpt = (turn["value"] for turn in row["conversations"])
    asked = [{"type": kind, kind: str(folder / "media" / row[kind])}, {"type": "text", "text": human}]
    return json.dumps([{"role": "user", "content": asked}, {"role": "assistant", "content": gpt}])
