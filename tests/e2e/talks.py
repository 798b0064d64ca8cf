"""A recipe that fine-tunes a tiny VLM on few pictures and clips."""

from pathlib import Path
from typing import Any

from cosmos_rl_core.config import toml
from cosmos_rl_core.tiny import qwen3_vl, shapes


def write_recipe(folder: Path) -> str:
    """Write a recipe of three iterations, judged after each, with its data and its model; return its path."""
    shapes.write(folder / "train", range(64), range(32))
    shapes.write(folder / "held-out", range(100, 116), range(100, 108))
    qwen3_vl.save(folder / "model")

    def datasets(side: str) -> dict[str, Any]:
        place = folder / side
        return {
            name: {"name": "llava", "annotation_path": f"{place}/{name}.json", "media_path": f"{place}/media"}
            for name in ("pictures", "clips")
        }

    training = {"type": "vlm_sft", "steps_per_iteration": 12, "model_max_length": 256, "row_length": 512}
    values = {
        "policy": {"model_name_or_path": f"{folder}/model", "trains": ["vision", "projector", "language"]},
        "train": {"num_iterations": 3, "train_batch_per_replica": 8, "optm_lr": 1e-3}
        | {"train_policy": training | {"datasets": datasets("train")}},
        "validation": {"max_new_tokens": 4, "freq": 1, "datasets": datasets("held-out")},
        "launch": {"mode": "warm", "threads": 1, "max_attempts": 1},
    }
    path = folder / "vlm.toml"
    path.write_text(toml.dumps(values), encoding="utf-8")
    return str(path)
