"""A tiny Cosmos-Predict2.5 and a folder of videos, as a user of `tests/e2e/cosmos.toml` has them."""

from pathlib import Path

import av
import numpy as np

from cosmos_rl_core.conformance.models import tiny_pipelines

RECIPE = "tests/e2e/cosmos.toml"
CAPTIONS = ("a robot arm lifts a cup", "a truck turns left")
NUM_FRAMES = 10


def overrides_for(folder: Path) -> list[str]:
    """Write the pipeline and the videos; returns the settings that say where they are."""
    base = tiny_pipelines.save("cosmos_predict2_5", folder / "pipeline", latent_channels=16)
    for name in ("videos", "metas"):
        (folder / "clips" / name).mkdir(parents=True)
    for number, caption in enumerate(CAPTIONS):
        pixels = np.random.default_rng(number).integers(0, 256, (NUM_FRAMES, 16, 32, 3), dtype=np.uint8)
        _write_mp4(folder / f"clips/videos/{number}.mp4", pixels)
        (folder / f"clips/metas/{number}.txt").write_text(f"{caption}\n", encoding="utf-8")
    tables = ("dataset", "data")
    folders = [f"train.train_policy.{table}.local_dir={folder / 'clips'}" for table in tables]
    return [f"policy.model_name_or_path={base}", *folders]


def _write_mp4(file: Path, pixels: np.ndarray) -> None:
    with av.open(str(file), "w") as container:
        stream = container.add_stream("libx264rgb", rate=24, options={"crf": "0"})
        stream.height, stream.width, stream.pix_fmt = *pixels.shape[1:3], "rgb24"
        for frame in pixels:
            container.mux(stream.encode(av.VideoFrame.from_ndarray(frame, format="rgb24")))
        container.mux(stream.encode())


def files_with(folder: Path, secret: str) -> list[str]:
    """Files anywhere in a folder, packed ones as they lie, whose bytes or name hold a text."""
    files = [file for file in folder.rglob("*") if file.is_file()]
    return [str(file) for file in files if secret in file.name or secret.encode() in file.read_bytes()]
