"""Runs of a model plugin on its tiny pipeline, from prompts to evaluations by the stock pipeline.

They use the loop and the processes of every run, without Prefect, and a store that is deleted afterwards. Each wave
that ends well is a check that passed.
"""

import json
import re
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from traceback import extract_tb
from typing import Any

import numpy as np

from cosmos_rl_core.config.launch import LaunchConfig
from cosmos_rl_core.config.reading import validated
from cosmos_rl_core.errors import CosmosRLError, Mistakes, StageError
from cosmos_rl_core.storage import media
from flows.planning.plan import Settings, freeze, plan_from
from flows.planning.run import run_of
from flows.running.display import Display
from flows.running.wave import Waves
from flows.session.loop import make
from stages.artifacts.manifest import Manifest
from stages.artifacts.request import Request
from stages.artifacts.slots import current_manifest

SENTENCES = {kind: f"a tiny run goes through every stage ({kind})" for kind in ("LoRA", "all weights")}
"""Sentence of the check for each kind of trained weights."""
LORA = {"r": 4, "lora_alpha": 8.0}
LAUNCH = {"mode": "warm", "device": "cpu"}
SAMPLE = {"num_steps": 3, "eval_num_steps": 2, "guidance_scale": 3.0}
TEXTS, HELD_OUT = ("a red cube", "two"), ("a blue ball",)
PICTURE = (75, 131)
"""Height and width of the references."""
Note = Callable[[str], None]
_FRAME = re.compile(r'File "(.+?)", line (\d+)')
"""File and line of a frame in a traceback."""


def check(plugin: dict[str, Any], base: dict[str, Any], folder: Path, only: str, note: Note) -> None:
    """Make the runs whose sentence contains ``only`` in a folder, and add their results to ``plugin``.

    ``base`` describes the tiny pipelines that the suite wrote for the plugin.
    """
    launch = validated(LaunchConfig, LAUNCH, "launch")
    with Display(note) as display, closing(Waves(str(folder / "waves"), launch, display)) as waves:
        for kind, sentence in SENTENCES.items():
            if only not in sentence:
                continue
            begun, ended = list[str](), list[str]()
            try:
                _make(_values(kind, plugin["path"], base, folder), kind, str(folder), waves, begun, ended)
            except Exception as error:  # A plugin's own functions may raise anything while the run is planned.
                where = begun[-1] if begun else "plan"
                plugin["failed"] += 1
                told = _told(error, folder, plugin["path"], note)
                plugin["failures"].append({"check": f"{sentence}: {where}"} | told)
            plugin["passed"] += len(ended)


def _make(values: dict[str, Any], kind: str, store: str, waves: Waves, begun: list[str], ended: list[str]) -> None:
    """Plan a recipe and take its run through every wave. Add the names of begun and ended waves to the lists."""
    plan = freeze(plan_from(values, Settings("the tiny run", store, kind.replace(" ", "-")), Mistakes()), store)

    def launch(name: str, *requests: Request) -> list[Manifest]:
        begun.append(name)
        waves.make(name, requests)
        manifests = [manifest for request in requests if (manifest := current_manifest(request)) is not None]
        waves.display.done(name, manifests, skipped=False)
        ended.append(name)
        return manifests

    make(run_of(plan, store), launch)


def _told(error: Exception, folder: Path, path: str, note: Note) -> dict[str, str]:
    """Return the message of a failure, and the last place in the plugin in its traceback. Pass the log to ``note``."""
    if not isinstance(error, CosmosRLError):
        own = [f"{at.filename}:{at.lineno}" for at in extract_tb(error.__traceback__) if _is_in(at.filename, path)]
        return {"message": f"{type(error).__name__}: {error}", "place": own[-1] if own else ""}
    logs = sorted(folder.rglob("logs/*.log"), key=lambda log: log.stat().st_mtime_ns)
    text = logs[-1].read_text(encoding="utf-8", errors="replace") if isinstance(error, StageError) and logs else ""
    if text:
        note(text)
    own = [f"{file}:{line}" for file, line in _FRAME.findall(text) if _is_in(file, path)]
    # The log is deleted with the store.
    message = (error.in_full() if isinstance(error, StageError) else error).args[0].partition("; log: ")[0]
    return {"message": message, "place": own[-1] if own else ""}


def _is_in(file: str, path: str) -> bool:
    return Path(file).is_relative_to(path)


def _values(kind: str, plugin: str, base: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Write prompts and references to the folder, and return the recipe of a run on them.

    Prompts have references if the pipeline needs them, and in the run with adapters if it takes any.
    """
    which = "referring" if kind == "LoRA" else "plain"
    policy = {"model_name_or_path": base[which], "diffusers": base["diffusers"] | {"sample": SAMPLE}}
    (inputs := folder / f"{kind} inputs").mkdir()
    values = {"plugins": [plugin], "policy": policy | ({"lora": LORA} if kind == "LoRA" else {}), "launch": LAUNCH}
    return values | _recipe(inputs, base["references"][which])


def _recipe(inputs: Path, references: int) -> dict[str, Any]:
    """Return a recipe of NFT on two prompts, with two optimizer steps, and an evaluation before and after them."""
    names = [_picture(inputs / f"{number}", number) for number in range(references)]
    for name, texts in (("train", TEXTS), ("held-out", HELD_OUT)):
        rows = [json.dumps({"prompt": text} | ({"references": names} if names else {})) for text in texts]
        (inputs / f"{name}.jsonl").write_text("\n".join(rows), encoding="utf-8")
    rewards = ["jpeg", *(["pixel_similarity"] if references else [])]
    return {
        "train": {
            "num_iterations": 1,
            "train_batch_per_replica": 4,
            "optm_lr": 1e-3,
            "train_policy": {
                "type": "nft",
                "mini_batch": 2,
                "batch_size_per_optimize": 2,
                "timesteps_fraction": 0.67,
                "dataset": {"name": "prompts", "path": str(inputs / "train.jsonl")},
            },
        },
        "rollout": {"n_generation": 2, "n_generation_mini_batch": 2, "samples_per_shard": 4},
        "rewards": [{"fn": {"name": name}} for name in rewards],
        "early_warning": {"statistics": False},
        "validation": {"n_generation": 1, "dataset": {"name": "prompts", "path": str(inputs / "held-out.jsonl")}},
    }


def _picture(stem: Path, number: int) -> str:
    """Write a picture of noise, and return the name of its file."""
    pixels = np.random.default_rng(number).integers(0, 256, (1, *PICTURE, 3), dtype=np.uint8)
    extension, data = media.encode(pixels)
    file = stem.with_suffix(f".{extension}")
    file.write_bytes(data)
    return file.name
