"""Stages of a real run, made again and compared."""

import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load, save
from typer.testing import CliRunner

from cosmos_rl_core.canonical import canonical_json, sha256
from cosmos_rl_core.storage import shards
from cosmos_rl_core.storage.sealed import seal, unseal
from flows.cli.app import app
from stages.artifacts.manifest import content_of
from stages.artifacts.records import FileEntry
from tests.e2e.flow_process import RUN_ID, Flows


def replay(flows: Flows, stage: str, iteration: int, *options: str) -> tuple[int, str]:
    words = ["replay", RUN_ID, "--store", flows.store, "--stage", stage, "--iteration", str(iteration), *options]
    ended = CliRunner().invoke(app, words)
    return ended.exit_code, ended.output


def test_a_stage_made_again_is_equal_bit_for_bit_and_leaves_the_run_alone(reference: Flows):
    before = {path: path.stat().st_mtime_ns for path in reference.root.rglob("*")}
    code, said = replay(reference, "update", 1)
    assert (code, "iteration-0001/update: equal bit for bit, " in said) == (0, True), said
    assert {path: path.stat().st_mtime_ns for path in reference.root.rglob("*")} == before


@pytest.mark.processes
def test_the_first_sample_and_tensor_that_differ_are_named(flows: Flows):
    sample = _change_latents(flows.root / "iterations" / "0001" / "rollout")
    code, said = replay(flows, "rollout", 1, "--json")
    found = json.loads(said)
    assert (code, found["equal"]) == (65, False)
    (difference,) = found["differences"]
    assert difference["sample"] == sample
    assert difference["what"].startswith("safetensors latents: 1 of ")
    assert difference["what"].endswith("differ, by up to 0.5")
    other = next(one for one in _samples(flows.root / "iterations" / "0001" / "rollout") if one != sample)
    assert replay(flows, "rollout", 1, "--samples", other)[0] == 0


def test_what_cannot_be_replayed_is_said(reference: Flows):
    for stage, iteration, options, reason in (
        ("rollut", 1, (), "did you mean 'rollout'?"),
        ("rollout", 7, (), "has no rollout of iteration 7"),
        ("rollout", 1, ("--samples", "nobody"), "rollout has no sample nobody; it has 8, such as i0001-"),
    ):
        code, said = replay(reference, stage, iteration, *options)
        assert (code, reason in said) == (64, True), said


def _samples(slot: Path) -> list[str]:
    return [row["sample_id"] for file in sorted(slot.rglob("index/*.json")) for row in json.loads(file.read_bytes())]


def _change_latents(slot: Path) -> str:
    """Change a number of a sample, and every digest of the artifact with it."""
    (shard,) = slot.glob("attempts/*/tensors/00000.tar")
    members = shards.unpack(shard.read_bytes())
    name = min(members)
    tensors = load(members[name])
    tensors["latents"] = tensors["latents"].copy()
    tensors["latents"].flat[0] += np.float32(0.5)
    shard.write_bytes(shards.pack(members | {name: save(tensors)}))
    path = slot / "manifest.1.json"
    body = unseal(path.read_bytes(), "manifest", str(path))
    entry = body["files"]["tensors/00000.tar"]
    entry |= {"size": shard.stat().st_size, "sha256": sha256(shard.read_bytes())}
    body["content"] = content_of({name: FileEntry.model_validate(one) for name, one in body["files"].items()})
    path.write_bytes(seal("manifest", json.loads(canonical_json(body))))
    return name.partition(".")[0]
