"""The bits of each stage, pinned per (stage, version, numerics): a change of results without a new version fails here.

Contents are comparable only under equal numerics. On a machine whose numerics are not in ``pins.json`` the pins cannot
be checked; ``COSMOS_PIN=1 pytest tests/stages/test_pins.py`` adds that machine's.
"""

import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from cosmos_rl_core.canonical import digest
from cosmos_rl_core.captioners import text, vlm
from cosmos_rl_core.config.early_warning import EarlyWarningConfig, Limit
from cosmos_rl_core.config.train import DatasetOptions
from cosmos_rl_core.datasets import _sources, local, rendered_text
from cosmos_rl_core.rewards import clip_score
from flows.planning import requests
from flows.planning.run import Run
from stages.artifacts.manifest import Manifest
from stages.artifacts.request import Request
from stages.artifacts.slots import input_of
from stages.contracts import INDEX, MEDIA, STAGES, Caption, Describe, Encode, Index, Judge, MediaShape
from stages.vlm.settings import VLM_STAGES
from tests import tiny_scorers
from tests.core.vlms import tiny
from tests.core.vlms.cases import QWEN3
from tests.hand_made import rewards
from tests.stages.conftest import make, make_run

pytestmark = pytest.mark.xdist_group("pins")  # one worker makes what both tests need
PINS = Path(__file__).with_name("pins.json")


def recipe(train_policy: dict[str, Any], **policy: Any) -> dict[str, Any]:
    diffusers: dict[str, Any] = {
        "inference_size": [32, 64],
        "max_prompt_length": 12,
        "sample": {"num_steps": 2, "eval_num_steps": 2},
    }
    ocr = {"fn": {"name": "ocr", "line_width": 96}}
    group = {"n_generation": 4, "n_generation_mini_batch": 4}
    if supervised := train_policy["type"] == "sft":
        group, _ = {}, diffusers["sample"].pop("num_steps")
    return {
        "policy": {"model_name_or_path": "package:tiny-sd3", "diffusers": diffusers} | policy,
        "train": {
            "num_iterations": 1,
            "train_batch_per_replica": 8,
            "optm_lr": 1e-3,
            "ema_enable": True,
            "train_policy": {"mini_batch": 4} | train_policy,
        },
        "rollout": {**group, "samples_per_shard": 4},
        "rewards": [ocr | ({"role": "monitor"} if supervised else {})],
        # Each reward of a recipe would have to be made.
        "early_warning": {"statistics": False},
        "validation": {"n_generation": 1, "dataset": {"name": "ocr", "split": "test"}, "batch_size": 8},
    }


def index_of_one_picture(tmp_path: Path) -> Request:
    """An index of a picture whose bytes no library made, once with a caption and once without."""
    folder = tmp_path / "media"
    folder.mkdir()
    # A GIF of one black pixel, read by its bytes whatever its name.
    pixel = "47494638376101000100800000000000ffffff2c00000000010001000002024401003b"
    (folder / "0000.png").write_bytes(bytes.fromhex(pixel))
    (folder / "0000.json").write_text('{"prompt": "a black pixel"}', encoding="utf-8")
    (folder / "0001.png").write_bytes(bytes.fromhex(pixel))
    sources: dict[str, DatasetOptions] = {"mine": local.Options(local_dir=str(folder))}
    stamps = _sources.digest(_sources.stamps({"mine": _sources.source_of(sources["mine"])}))
    settings = Index(sources=sources, stamps=stamps, captioned=False)
    return Request(stage="index", slot=f"{tmp_path}/index", seed=0, config=settings)


def all_stages(tmp_path: Path) -> dict[str, Manifest]:
    """Every stage once, by its name."""
    index = index_of_one_picture(tmp_path)
    made: dict[str, Manifest] = {"index": make(index, tmp_path)}

    def step(request: Request) -> None:
        made[request.stage] = make(request, tmp_path)

    sources, captioner = index.settings(Index).sources, text.Options(text="a black pixel")
    settings = Caption(captioner=captioner, part=0, sources=sources)
    parts = {"parts": (input_of(index.slot),)}
    step(Request(stage="caption", slot=f"{tmp_path}/caption", seed=0, config=settings, inputs=parts))
    model = tiny.save_talker(tmp_path / "vlm", QWEN3)
    talker = vlm.Options(model=model, instruction="?", max_new_tokens=12, param_dtype="float32").pinned()
    described = Describe(captioner=talker, part=0, sources=sources, max_left_out=1.0)
    step(Request(stage="describe", slot=f"{tmp_path}/describe", seed=0, config=described, inputs=parts))
    nft = {"type": "nft", "batch_size_per_optimize": 4, "timesteps_fraction": 0.5, "dataset": {"name": "ocr"}}
    run = make_run(tmp_path, recipe(nft, lora={"r": 2, "target_modules": ["to_q", "to_v"]}), "nft")
    step(requests.policy(run))
    step(run.prepared.embed)
    step(requests.rollout(run, 0))
    step(rewards(run, run.slots.iteration(0, "rollout"), 0)[0])
    step(judging(run, tmp_path))
    warning = EarlyWarningConfig(statistics=False, limits=(Limit(reward="ocr", above=0.0, below=1.0),))
    step(requests.warn(replace(run, plan=run.plan.model_copy(update={"early_warning": warning})), 0))
    step(requests.update(run, 0))
    step(requests.fragment(run, 0))
    step(requests.export(run, 1))
    step(requests.evaluate(run, 1))
    step(requests.report(run, 1, []))
    sft = {"type": "sft", "steps_per_iteration": 2, "dataset": {"name": "rendered_text", "num_items": 64}}
    supervised: Run = make_run(tmp_path, recipe(sft, from_scratch=True), "sft")
    make(requests.policy(supervised), tmp_path)
    make(supervised.prepared.embed, tmp_path)
    make(supervised.prepared.encode, tmp_path)
    media = MediaShape(size=(32, 64), frames=1)
    dataset = rendered_text.Options(num_items=12)
    encode = Encode(model=run.plan.model, dataset=dataset, dataset_digest="", media=media, items_per_shard=8)
    step(Request(stage="encode", slot=f"{supervised.url}/encode", seed=0, config=encode))
    step(requests.finetune(supervised, 0))
    judged: dict[str, Any] = {"data": {"name": "rendered_text", "split": "test", "num_items": 6}}
    with_media = recipe(sft, from_scratch=True)
    with_media["validation"] |= judged
    validated = make_run(tmp_path, with_media, "validated")
    for request in (
        requests.policy(validated),
        validated.prepared.held_out.embeds[0],
        validated.prepared.held_out.encodes[0],
    ):
        make(request, tmp_path)
    step(requests.validate(validated, 0))
    return made


def judging(run: Run, tmp_path: Path) -> Request:
    """Scores of the rollout by a tiny CLIP model."""
    scorer = clip_score.Options.model_validate(tiny_scorers.settings("clip_score", tmp_path / "clip"))
    version = clip_score.Reward(scorer).version
    settings = Judge(reward=scorer, scorer=version, max_attempts=1, max_failed_fraction=0.0)
    samples = {"samples": (input_of(run.slots.iteration(0, "rollout"), INDEX, MEDIA),)}
    return Request(stage="judge", slot=f"{tmp_path}/judge", seed=0, config=settings, inputs=samples)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Manifest]:
    """Every stage, made once for both tests."""
    return all_stages(tmp_path_factory.mktemp("pins"))


def test_every_stage_makes_the_bytes_that_are_pinned_for_its_version(made: dict[str, Manifest]):
    of_vlms = {stage.name for stage in VLM_STAGES}
    assert made.keys() == STAGES.keys() - of_vlms, "those of VLMs are in test_vlm_pins.py"
    check_pins(made, PINS)


def check_pins(made: dict[str, Manifest], file: Path) -> None:
    """The contents are those that are pinned, or are pinned now."""
    # Of all stages: one without torch records no CPU, but reads what the others made on it.
    machine = digest({name: manifest.numerics for name, manifest in made.items()})[:16]
    found = {f"{name} {m.version} {machine}": m.content for name, m in sorted(made.items())}
    pins: dict[str, str] = json.loads(file.read_text(encoding="utf-8"))
    if os.environ.get("COSMOS_PIN"):
        file.write_text(json.dumps(pins | found, indent=1, sort_keys=True) + "\n", encoding="utf-8")
        return
    changed = [key for key, content in found.items() if pins.get(key, content) != content]
    assert not changed, f"other bytes than pinned: {changed}; raise the version of these stages, then pin again"
    absent, numerics = found.keys() - pins.keys(), {key.rpartition(" ")[2] for key in pins}
    forgotten = sorted(key for key in absent if key.rpartition(" ")[2] in numerics)
    assert not forgotten, f"versions that were raised and not pinned: {forgotten}"
    if absent:
        pytest.skip(f"no pins for this machine's numerics: {sorted(absent)}; add them with COSMOS_PIN=1")


@pytest.mark.slow
def test_the_same_requests_make_the_same_bytes_again(made: dict[str, Manifest], tmp_path: Path):
    again = all_stages(tmp_path)
    assert {name: m.content for name, m in again.items()} == {name: m.content for name, m in made.items()}
