"""A Request of every stage, each made from what the others left: small, and without a run of the loop."""

import fcntl
import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from cosmos_rl_core.captioners import text, vlm
from cosmos_rl_core.config.early_warning import EarlyWarningConfig, Limit
from cosmos_rl_core.config.shared import Decoding
from cosmos_rl_core.config.train import DatasetOptions
from cosmos_rl_core.datasets import _sources, local, rendered_text
from cosmos_rl_core.datasets._references import read_reference
from cosmos_rl_core.rewards import clip_score
from flows.planning import requests
from flows.planning.run import Run
from stages.artifacts.request import Request
from stages.artifacts.slots import input_of
from stages.contracts import (
    INDEX,
    MEDIA,
    TENSORS,
    Caption,
    Decode,
    Describe,
    Encode,
    Index,
    Judge,
    MediaShape,
    References,
    Rollout,
)
from tests import tiny_scorers
from tests.core.vlms import tiny
from tests.core.vlms.cases import QWEN3
from tests.hand_made import rewards
from tests.stages.conftest import make, make_run
from tests.stages.vlm_data import Talks, talk

OCR: dict[str, Any] = {"name": "ocr", "line_width": 96}


def recipe(train_policy: dict[str, Any], reward: dict[str, Any] = OCR, **policy: Any) -> dict[str, Any]:
    diffusers: dict[str, Any] = {
        "inference_size": [32, 64],
        "max_prompt_length": 12,
        "sample": {"num_steps": 2, "eval_num_steps": 2},
    }
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
        "rewards": [{"fn": reward} | ({"role": "monitor"} if supervised else {})],
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


def references_of_one_picture(tmp_path: Path) -> Request:
    """The same picture, to which prompts refer."""
    reference = read_reference(tmp_path / "media" / "0000.png")
    return Request(
        stage="references", slot=f"{tmp_path}/references", seed=0, config=References(references=(reference,))
    )


def made_once(factory: pytest.TempPathFactory) -> dict[str, Request]:
    """Every stage, made for all tests of a session by the first of pytest's workers that needs it; to be read only."""
    base = factory.getbasetemp()
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "every-stage"
    folder.mkdir(exist_ok=True)
    made = folder / "made.json"
    with (folder / "lock").open("wb") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not made.exists():
            (folder / "vlms").mkdir()
            requests_of = stages_of_diffusion(folder) | stages_of_vlms(folder / "vlms")
            told = {name: request.model_dump(mode="json") for name, request in requests_of.items()}
            made.write_text(json.dumps(told), encoding="utf-8")
    told = json.loads(made.read_text(encoding="utf-8"))
    return {name: Request.model_validate_json(json.dumps(one)) for name, one in told.items()}


def stages_of_diffusion(tmp_path: Path, reward: dict[str, Any] = OCR) -> dict[str, Request]:
    """Make every stage of diffusion models once, and return their Requests by name."""
    index = index_of_one_picture(tmp_path)
    made: dict[str, Request] = {}

    def step(request: Request) -> None:
        make(request, tmp_path)
        made[request.stage] = request

    step(index)
    step(references_of_one_picture(tmp_path))

    sources, captioner = index.settings(Index).sources, text.Options(text="a black pixel")
    settings = Caption(captioner=captioner, part=0, sources=sources)
    parts = {"parts": (input_of(index.slot),)}
    step(Request(stage="caption", slot=f"{tmp_path}/caption", seed=0, config=settings, inputs=parts))
    model = tiny.save_talker(tmp_path / "vlm", QWEN3)
    talker = vlm.Options(model=model, instruction="?", max_new_tokens=12, param_dtype="float32").pinned()
    described = Describe(captioner=talker, part=0, sources=sources, max_left_out=1.0)
    step(Request(stage="describe", slot=f"{tmp_path}/describe", seed=0, config=described, inputs=parts))
    nft = {"type": "nft", "batch_size_per_optimize": 4, "timesteps_fraction": 0.5, "dataset": {"name": "ocr"}}
    run = make_run(tmp_path, recipe(nft, reward, lora={"r": 2, "target_modules": ["to_q", "to_v"]}), "nft")
    step(requests.policy(run))
    step(run.prepared.embed)
    step(requests.rollout(run, 0))
    step(decoding(run, tmp_path))
    step(rewards(run, run.slots.iteration(0, "rollout"), 0)[0])
    step(judging(run, tmp_path))
    warning = EarlyWarningConfig(statistics=False, limits=(Limit(reward=reward["name"], above=0.0, below=1.0),))
    step(requests.warn(replace(run, plan=run.plan.model_copy(update={"early_warning": warning})), 0))
    step(requests.update(run, 0))
    step(requests.fragment(run, 0))
    step(requests.export(run, 1))
    step(requests.evaluate(run, 1))
    step(requests.report(run, 1, []))
    sft = {"type": "sft", "steps_per_iteration": 2, "dataset": {"name": "rendered_text", "num_items": 64}}
    supervised: Run = make_run(tmp_path, recipe(sft, reward, from_scratch=True), "sft")
    make(requests.policy(supervised), tmp_path)
    make(supervised.prepared.embed, tmp_path)
    make(supervised.prepared.encode, tmp_path)
    media = MediaShape(size=(32, 64), frames=1)
    dataset = rendered_text.Options(num_items=12)
    encode = Encode(model=run.plan.model, dataset=dataset, dataset_digest="", media=media, items_per_shard=8)
    step(Request(stage="encode", slot=f"{supervised.url}/encode", seed=0, config=encode))
    step(requests.finetune(supervised, 0))
    judged: dict[str, Any] = {"data": {"name": "rendered_text", "split": "test", "num_items": 6}}
    with_media = recipe(sft, reward, from_scratch=True)
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


def decoding(run: Run, tmp_path: Path) -> Request:
    """The other pictures of a rollout that decodes half of its samples."""
    rollout = requests.rollout(run, 0)
    half = rollout.settings(Rollout).model_copy(update={"decoding": Decoding(share=0.5)})
    rollout = rollout.model_copy(update={"slot": f"{tmp_path}/half", "config": half})
    make(rollout, tmp_path)
    settings = Decode(model=run.plan.base, media=run.plan.media, decoding=half.decoding, batch_size=4)
    samples = {"samples": (input_of(rollout.slot, INDEX, TENSORS),)}
    return Request(stage="decode", slot=f"{tmp_path}/decode", seed=0, config=settings, inputs=samples)


def judging(run: Run, tmp_path: Path) -> Request:
    """Scores of the rollout by a tiny CLIP model."""
    scorer = clip_score.Options.model_validate(tiny_scorers.settings("clip_score", tmp_path / "clip"))
    version = clip_score.Reward(scorer).version
    settings = Judge(reward=scorer, scorer=version, max_attempts=1, max_failed_fraction=0.0)
    samples = {"samples": (input_of(run.slots.iteration(0, "rollout"), INDEX, MEDIA),)}
    return Request(stage="judge", slot=f"{tmp_path}/judge", seed=0, config=settings, inputs=samples)


def stages_of_vlms(tmp_path: Path) -> dict[str, Request]:
    """Make every stage that trains a VLM once, and return their Requests by name."""
    (tmp_path / "model").mkdir()
    talks = Talks(tmp_path / "data", tiny.save_model(tmp_path / "model", QWEN3))
    gif = bytes.fromhex("47494638376101000100800000000000ffffff2c00000000010001000002024401003b")
    (talks.folder / "media" / "b.gif").write_bytes(gif)
    talks.rows += [talk("<image>\nWhat?", "Black.", image="b.gif"), talk("Hello", "Hi.")]
    made: dict[str, Request] = {}
    for request in (
        lambda: talks.index_request("index"),
        lambda: talks.tokenize_request("tokens", "index"),
        lambda: talks.policy_request("policy"),
        lambda: talks.finetune_request("trained", "policy", range(1), batch_size=2),
        lambda: talks.evaluate_request("evaluated", "trained"),
        lambda: talks.export_request("exported", "trained"),
    ):
        step = request()
        make(step, tmp_path)
        made[step.stage] = step
    return made
