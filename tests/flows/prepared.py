"""A prepared dataset of small pictures in a store, runs on it, and what collecting its garbage deletes."""

import json
import os
import secrets
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from cosmos_rl_core.canonical import canonical_json, sha256
from cosmos_rl_core.recipes.dataset import DatasetConfig
from cosmos_rl_core.recipes.reading import check
from cosmos_rl_core.storage import store
from flows.garbage.datasets import DatasetGarbage, gc_datasets
from flows.operations.preprocess import preprocess
from flows.planning.plan import Plan, freeze, make_plan
from flows.planning.run import Run
from stages.artifacts.artifact import Artifact
from stages.artifacts.manifest import Manifest
from stages.artifacts.pool import ENDING, INDEX, POOL, index_of
from stages.artifacts.records import FileEntry
from stages.artifacts.request import Request
from stages.artifacts.slots import current_of
from stages.artifacts.snapshots import Snapshot
from stages.formats.parts import Parts
from tests import hand_made
from tests.stages.conftest import make

Launch = Callable[[str, Request], list[Manifest]]


def add(folder: Path, *numbers: int) -> None:
    for number in numbers:
        pixels = np.random.default_rng(number).integers(0, 256, (8, 8, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(folder / f"{number:04d}.png")
        (folder / f"{number:04d}.json").write_text(json.dumps({"prompt": f"picture {number}"}), encoding="utf-8")


def prepare(clips: Path, url: str, launch: Launch | None = None, *, merge: bool = False, **settings: Any) -> Snapshot:
    """The newest snapshot of the folder, its stages run in this process."""

    def in_this_process(_: str, request: Request) -> list[Manifest]:
        return [make(request, clips.parent / "outcome" / secrets.token_hex(4))]

    values = {"name": "clips", "sources": {"mine": {"name": "local", "local_dir": str(clips)}}} | settings
    return preprocess(DatasetConfig.model_validate(values), url, launch or in_this_process, merge=merge)[0]


def plan_on(url: str, name: str, *, width: int = 64, length: int = 12, **dataset: Any) -> Plan:
    """What a supervised run on the dataset would be."""
    diffusers = {"inference_size": [32, width], "max_prompt_length": length}
    sft = {"type": "sft", "mini_batch": 2, "steps_per_iteration": 2}
    sft |= {"dataset": {"name": "snapshot", "dataset": "clips"} | dataset}
    train = {"num_iterations": 1, "train_batch_per_replica": 4, "optm_lr": 1e-3, "train_policy": sft}
    policy = {"model_name_or_path": "package:tiny-sd3", "diffusers": diffusers, "lora": {"r": 2}}
    return make_plan(check({"policy": policy, "train": train}, "test"), name, "test.toml", (), url)


def run_on(url: str, name: str, **options: Any) -> Run:
    return Run(freeze(plan_on(url, name, **options), url), url)


def make_prepared(run: Run) -> list[str]:
    """Makes by hand the embeddings and latents that are not current; returns the slots of all."""
    requests = list(run.prepared.steps().values())
    for request in requests:
        if current_of(request.slot)[1] is None:
            hand_made.make(request, {"a": b"12345", "b": b"678"})
    return [request.slot for request in requests]


def embed(request: Request, *names: str) -> Manifest:
    """Makes by hand embeddings in files of the pool with these names."""
    entries: dict[str, FileEntry] = {}
    for name in names:
        path, data = f"{POOL}/key/{name}{ENDING}", f"embedding of {name}".encode()
        url = f"{request.slot.rpartition('/')[0]}/{path}"
        store.put_if_absent(url, data)
        entries[name] = FileEntry(path=path, size=len(data), sha256=sha256(data))
    return hand_made.make(request, {INDEX: canonical_json(index_of(entries))})


def age(url: str, hours: float = 100.0) -> None:
    """Makes everything look as if it had been written so long ago."""
    for path in Path(url).rglob("*"):
        then_s = path.stat().st_mtime - 3600 * hours
        os.utime(path, (then_s, then_s))


def collect(url: str, **options: Any) -> dict[str, tuple[int, int]]:
    """Artifacts and files by fate and kind."""
    return counts(gc_datasets(url, **options))


def counts(found: DatasetGarbage) -> dict[str, tuple[int, int]]:
    return {f"{row.fate} {row.what}": (row.artifacts, row.files) for row in found.rows}


def files_of(url: str) -> set[str]:
    return {name for name in store.listed(url) if "lease/" not in name and ".probe" not in name}


def slots_of(snapshot: Snapshot) -> list[str]:
    return [part.url for part in snapshot.parts]


def read_items(url: str, number: int) -> list[str]:
    """The names of a snapshot's items, every byte checked."""
    head = Snapshot.read(url, "clips", number)
    assert head is not None
    return sorted(Parts([Artifact(part) for part in head.parts]).items["name"])


def is_there(slot: str) -> bool:
    return any(not name.startswith("invalidated.") for name in store.listed(slot))


def four_snapshots(clips: Path, url: str) -> list[Snapshot]:
    """Two parts, then all in one, then another: a, a b, m, m c."""
    made = [prepare(clips, url)]
    add(clips, 3)
    made.append(prepare(clips, url))
    made.append(prepare(clips, url, merge=True))
    add(clips, 4)
    made.append(prepare(clips, url))
    assert [len(one.parts) for one in made] == [1, 2, 1, 2]
    return made
