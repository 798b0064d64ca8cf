"""A sample that the guardrail refuses: without media, marked with the reason, counted, never scored or trained on."""

import importlib.util
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from diffusers.pipelines.cosmos import pipeline_cosmos2_5_predict
from safetensors.torch import load

from cosmos_rl_core.conformance.models import tiny_pipelines
from cosmos_rl_core.errors import ConfigError
from cosmos_rl_core.models.cosmos_predict2_5.tiny import LetsPass
from flows.auditing import contents
from flows.auditing.checks import samples
from flows.auditing.checks.faults import Findings
from flows.planning import requests
from flows.planning.run import Run
from stages import contracts
from stages.artifacts.artifact import Artifact
from stages.artifacts.manifest import Manifest
from stages.artifacts.request import Request
from stages.artifacts.slots import input_of
from stages.formats.samples import REFUSED, read_index, read_samples
from stages.formats.tables import read_table
from stages.reporting.contracts import Fragment
from tests.hand_made import rewards
from tests.stages.conftest import make, make_run
from tests.stages.small_video import LORA, recipe

REASON = "refused by the guardrail"


class Guardrail(LetsPass):
    """Refuses the videos with these numbers, in the order in which it sees them."""

    refuses: tuple[int, ...] = ()
    seen = 0

    def check_video_safety(self, frames: np.ndarray) -> np.ndarray | None:
        Guardrail.seen += 1
        return None if Guardrail.seen - 1 in Guardrail.refuses else frames


def refuse(monkeypatch: pytest.MonkeyPatch, *numbers: int) -> None:
    monkeypatch.setattr(Guardrail, "seen", 0)
    monkeypatch.setattr(Guardrail, "refuses", numbers)


@pytest.fixture
def run(tmp_path: Path, prompt_dir: str, monkeypatch: pytest.MonkeyPatch) -> Run:
    """A policy and embeddings for groups of three videos, as if cosmos_guardrail were installed."""
    monkeypatch.setattr(pipeline_cosmos2_5_predict, "CosmosSafetyChecker", Guardrail)
    find_spec = importlib.util.find_spec

    def found(name: str, *package: str) -> Any:
        return SimpleNamespace(name=name) if name == "cosmos_guardrail" else find_spec(name, *package)

    monkeypatch.setattr("importlib.util.find_spec", found)
    base = str(tiny_pipelines.save("cosmos_predict2_5", tmp_path / "cosmos"))
    (tmp_path / "held-out").mkdir()
    (tmp_path / "held-out/test.txt").write_text('x "y" z\n', encoding="utf-8")
    values = recipe(base, prompt_dir, LORA)
    values["policy"]["diffusers"] |= {"max_prompt_length": 200, "sample": {"num_steps": 2, "eval_num_steps": 2}}
    values["rewards"] = [{"fn": {"name": "jpeg"}}]
    dataset = {"name": "ocr", "local_dir": str(tmp_path / "held-out"), "split": "test"}
    run = make_run(tmp_path, values | {"validation": {"n_generation": 2, "dataset": dataset}})
    assert run.plan.model.guardrail == ("guardrail",)
    for request in (requests.policy(run), run.prepared.embed):
        make(request, tmp_path)
    return run


def made(request: Request, folder: Path) -> tuple[Manifest, Artifact]:
    return make(request, folder), Artifact(input_of(request.slot))


def check_samples(request: Request, artifact: Artifact, refused: list[int]) -> list[str]:
    """The refused ones, and no others, are marked and have no media. Returns their ids."""
    index, stored = read_index(artifact), list(read_samples(artifact))
    assert [place for place, one in enumerate(stored) if not one.finite] == refused
    assert [one.media == b"" for one in stored] == [not one.finite for one in stored]
    assert all(one.row.get(REFUSED, "") == ("" if one.finite else REASON) for one in stored)
    assert {one.why_lost for one in stored} == {"", "was refused by the guardrail"}
    assert artifact.manifest.summary["refused"] == artifact.manifest.summary["nonfinite"] == len(refused)
    # What plan and settings say of the samples is still there.
    findings = Findings("run")
    samples.check(artifact, request, {}, findings)
    assert not findings.faults
    return [*index["sample_id"][refused]]


def test_an_iteration_goes_on_without_a_refused_sample(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    refuse(monkeypatch, 1)
    rollout = requests.rollout(run, 0)
    _, artifact = made(rollout, tmp_path)
    (lost,) = check_samples(rollout, artifact, [1])
    tensors = {one.sample_id: load(one.tensors or b"") for one in read_samples(artifact, contracts.TENSORS)}
    # Its video could be decoded from them.
    empty = [one for one, each in tensors.items() if not each["latents"].count_nonzero()]
    assert empty == [lost]
    assert all(not t.count_nonzero() for name, t in tensors[lost].items() if t.is_floating_point()), "states too"
    assert all(torch.equal(each["steps"], tensors[lost]["steps"]) for each in tensors.values() if "steps" in each)

    (reward,) = rewards(run, rollout.slot, 0)
    scores, scored = made(reward, tmp_path)
    table = read_table(scored, contracts.Reward.SCORES)
    assert [*table[~table["valid"]]["sample_id"]] == [lost]
    assert scores.summary["failed"] == 1
    findings = Findings("run")
    contents.check(scores, reward, lambda one: one, {}, findings)
    assert not findings.faults, "one of six is more than max_failed_fraction, and was refused"
    answers = read_table(scored, contracts.Reward.ANSWERS).set_index("sample_id")["error"]
    assert str(answers[lost]).endswith(": the sample was refused by the guardrail, so there is no picture to score")
    updated, update = made(requests.update(run, 0), tmp_path)
    advantages = read_table(update, contracts.Update.ADVANTAGES)
    assert [*advantages[~advantages["used"]]["sample_id"]] == [lost]
    assert updated.summary["excluded"] == 1
    assert updated.summary["loss"] is not None

    _, fragment = made(requests.fragment(run, 0), tmp_path)
    failures = json.loads(fragment.read(Fragment.FRAGMENT))["failures"]
    assert {(one["what"], one["reason"], one["count"]) for one in failures} == {
        ("refused", REASON, 1),
        ("no score", REASON, 1),
    }


def test_an_evaluation_goes_on_without_a_refused_sample(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    make(requests.export(run, 0), tmp_path)
    refuse(monkeypatch, 0)
    evaluate = requests.evaluate(run, 0)
    _, artifact = made(evaluate, tmp_path)
    check_samples(evaluate, artifact, [0])
    kept = [one for one in read_samples(artifact) if one.finite]
    assert all(one.pixels.std() > 1 for one in kept)


def test_a_rollout_whose_samples_are_all_refused_is_an_error(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    refuse(monkeypatch, *range(100))
    with pytest.raises(ConfigError, match=r"the guardrail refuses all \d+ samples.*take other prompts"):
        make(requests.rollout(run, 0), tmp_path)


def test_pictures_that_are_decoded_later_pass_the_guardrail_too(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """A re-score decodes a rollout whose media were deleted; its rewards must see what the rollout's rewards saw."""
    refuse(monkeypatch)
    rollout = requests.rollout(run, 0)
    make(rollout, tmp_path)
    config = requests.decode(run, 0).settings(contracts.Decode).model_copy(update={"undecoded_only": False})
    refuse(monkeypatch, 2)
    summary, artifact = made(requests.decode(run, 0).model_copy(update={"config": config}), tmp_path)
    rows = read_index(artifact)
    assert Guardrail.seen == len(rows) == summary.summary["samples"]
    (lost,) = [one for one in read_samples(artifact) if not one.finite]
    assert lost.sample_id == rows["sample_id"][2]
    assert lost.media == b""
    assert lost.why_lost == "was refused by the guardrail"
    assert summary.summary["refused"] == summary.summary["nonfinite"] == 1
