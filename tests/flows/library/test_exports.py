"""Exported weights where cosmos-rl puts them: whole, checked, named by optimizer steps."""

import json
import os
import shutil
from contextlib import contextmanager

import numpy as np
import pytest
from safetensors.numpy import load, save
from typer.testing import CliRunner

from cosmos_rl_core.errors import ArtifactError, ConfigError, NoSpaceError
from cosmos_rl_core.storage import store
from flows.cli import app as cli
from flows.devices import work_folders
from flows.library.exports import export, optimizer_steps
from flows.operations.rerun import rerun
from flows.planning import requests
from stages.artifacts.slots import current_of
from tests.flows.by_hand import make_all, make_one, whole_run
from tests.hand_made import make, planned
from tests.little_room import little_room

FILES = {"lora/model.safetensors": b"weights", "lora/adapter_config.json": b"{}"}


def test_exports_are_named_by_the_optimizer_steps_of_their_policy(recipe, tmp_path):
    run = whole_run(recipe, tmp_path)
    per_iteration = len(requests.update(run, 0).config.identity()["steps"]["lrs"])
    assert per_iteration > 0
    assert [optimizer_steps(run, k) for k in range(3)] == [0, per_iteration, 2 * per_iteration]


@pytest.mark.parametrize("prefix", ["", "pipeline/"])
def test_exports_lie_in_the_folder_of_their_step_and_a_pipeline_directly_in_it(recipe, tmp_path, prefix):
    run = planned(recipe(), tmp_path, run_id="hand")
    make_all(run)
    rerun(run.store_url, "hand", "export", 2)
    make(requests.export(run, 2), {prefix + name: data for name, data in FILES.items()})
    out = tmp_path / "out"
    (said,) = export(run.store_url, "hand", str(out)).lines()
    step = out / "safetensors" / f"step_{optimizer_steps(run, 2)}"
    assert said == f"policy 2 of hand: 2 files in {step}"
    found = {str(path.relative_to(out)): path.read_bytes() for path in out.rglob("*") if path.is_file()}
    assert found == {str((step / name).relative_to(out)): data for name, data in FILES.items()}
    assert [*export(run.store_url, "hand", str(out)).lines()] == [said]
    (step / "lora" / "adapter_config.json").write_bytes(b"{ }")
    with pytest.raises(ConfigError, match="exists and holds other files"):
        export(run.store_url, "hand", str(out))


def test_a_damaged_file_leaves_nothing_in_the_target(recipe, tmp_path):
    run = whole_run(recipe, tmp_path)
    _, manifest = current_of(run.slots.version(2, "export"))
    assert manifest is not None
    (entry,) = manifest.files.values()
    store.write(store.join(run.slots.version(2, "export"), entry.path), b"x" * entry.size)
    with pytest.raises(ArtifactError, match="is not what was committed"):
        export(run.store_url, "hand", str(tmp_path / "out"))
    assert not [path for path in (tmp_path / "out").rglob("*") if path.is_file()]


def test_a_full_disk_is_told_from_a_wrong_folder_and_the_same_command_goes_on(recipe, tmp_path):
    run = whole_run(recipe, tmp_path)
    out = tmp_path / "out"
    with little_room(0), pytest.raises(NoSpaceError, match=f"no space left to write {out}/safetensors/step_"):
        export(run.store_url, "hand", str(out))
    assert not [path for path in out.rglob("*") if path.is_file()]
    assert export(run.store_url, "hand", str(out)).copied[0].files == 1


@contextmanager
def held(folder):
    """Hold a folder as an export does that copies to it."""
    file = os.open(folder, os.O_RDONLY)
    work_folders.hold(file)
    yield
    os.close(file)


def test_leftovers_of_a_killed_export_go_and_files_of_a_working_one_stay(recipe, tmp_path):
    run = whole_run(recipe, tmp_path)
    folder = tmp_path / "out" / "safetensors"
    name = f".step_{optimizer_steps(run, 2)}"
    killed, at_work, other = (folder / one for one in (f"{name}.1", f"{name}.2", ".step_77.1"))
    for one in (killed, at_work, other):
        (one / "lora").mkdir(parents=True)
    with held(at_work):
        export(run.store_url, "hand", str(tmp_path / "out"))
    assert (killed.exists(), at_work.exists(), other.exists()) == (False, True, True)


def damage(slot, size=None):
    """Change the size of an artifact's first file, or its manifest."""
    _, manifest = current_of(slot)
    assert manifest is not None
    url = store.join(slot, "manifest.1.json")
    entry = next(iter(manifest.files.values()))
    if size is None:
        store.write(url, store.read(url).replace(b"seconds", b"secunds"))
    else:
        store.write(store.join(slot, entry.path), b"x" * size)


@pytest.mark.parametrize("size", [0, 500, None])
@pytest.mark.parametrize("stage", ["export", "update", "reward", "policy"])
def test_an_older_export_never_replaces_a_damaged_newest_one(recipe, tmp_path, stage, size):
    run = whole_run(recipe, tmp_path)
    slots = {
        "export": run.slots.version(2, "export"),
        "update": run.slots.policy(2),
        "reward": run.slots.iteration(0, "reward-ocr"),
        "policy": run.slots.policy(0),
    }
    damage(slots[stage], size)
    out = tmp_path / "out"
    ended = CliRunner().invoke(cli.app, ["export", "hand", str(out), "--store", run.store_url])
    assert ended.exit_code == 65
    assert ended.stderr.startswith("policy-0002/export, the newest export, cannot be used: ")
    assert slots[stage] in ended.stderr
    assert not out.exists()


def test_an_older_export_never_replaces_an_outdated_newest_one(recipe, tmp_path):
    run = whole_run(recipe, tmp_path)
    rerun(run.store_url, "hand", "export", 2)
    with pytest.raises(ConfigError, match="policy-0002/export, the newest export, is invalidated; run the recipe"):
        export(run.store_url, "hand", str(tmp_path / "out"))
    make_one(requests.export(run, 2))
    assert export(run.store_url, "hand", str(tmp_path / "out")).copied[0].policy == 2


def test_a_run_at_work_gives_the_newest_export_that_was_made(recipe, tmp_path):
    run = whole_run(recipe, tmp_path)
    shutil.rmtree(run.slots.version(2, "export"))
    said, to_come = export(run.store_url, "hand", str(tmp_path / "out")).lines()
    assert said.startswith("policy 0 of hand: 1 file in ")
    assert to_come == "policy-0002/export was not made yet"


def lora_of(module: str) -> dict[str, bytes]:
    """The files of an export of rank 2 and alpha 8."""
    tensors = {f"transformer.{module}.lora_{side}.weight": np.ones((2, 2), np.float32) for side in "AB"}
    settings = {"r": 2, "lora_alpha": 8.0, "target_modules": [module.rpartition(".")[2]]}
    return {"lora/model.safetensors": save(tensors), "lora/adapter_config.json": json.dumps(settings).encode()}


def test_a_lora_for_comfyui_is_one_file_with_the_strength_of_each_module(recipe, tmp_path):
    run = planned(recipe(), tmp_path, run_id="hand")
    make_all(run)
    rerun(run.store_url, "hand", "export", 2)
    make(requests.export(run, 2), lora_of("transformer_blocks.0.attn.to_q"))
    file = tmp_path / "loras" / f"hand-step_{optimizer_steps(run, 2)}.safetensors"
    for _ in range(2):
        command = ["export", "hand", str(file.parent), "--format", "comfyui", "--store", run.store_url]
        ended = CliRunner().invoke(cli.app, command)
        assert ended.exit_code == 0, ended.output
        assert [*file.parent.iterdir()] == [file]
    made = load(file.read_bytes())
    assert {name.rpartition("to_q")[2]: made[name].tolist() for name in made} == {
        ".lora_A.weight": [[1.0, 1.0], [1.0, 1.0]],
        ".lora_B.weight": [[1.0, 1.0], [1.0, 1.0]],
        ".alpha": 8.0,
    }
    file.write_bytes(b"another")
    with pytest.raises(ConfigError, match="exists and is another file"):
        export(run.store_url, "hand", str(file.parent), form="comfyui")


@pytest.mark.parametrize(
    ("files", "said"),
    [
        (lora_of("proj_out"), "ComfyUI reads no adapter of proj_out"),
        ({"pipeline/model_index.json": b"{}"}, "hand trains all weights; leave out --format"),
    ],
)
def test_exports_that_comfyui_cannot_read_are_refused(files, said, recipe, tmp_path):
    run = planned(recipe(), tmp_path, run_id="hand")
    make_all(run)
    rerun(run.store_url, "hand", "export", 2)
    make(requests.export(run, 2), files)
    with pytest.raises(ConfigError, match=said):
        export(run.store_url, "hand", str(tmp_path / "loras"), form="comfyui")
    assert not (tmp_path / "loras").exists()
