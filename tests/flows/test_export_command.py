"""Exported weights where cosmos-rl puts them: whole, checked, named by optimizer steps."""

import pytest

from cosmos_rl_core import store
from cosmos_rl_core.errors import ArtifactError, ConfigError
from flows.export import export, optimizer_steps
from flows.rerun import rerun
from stages.artifacts import standing
from tests.flows.by_hand import make_all, make_one, whole_run
from tests.hand_made import make, planned

FILES = {"lora/model.safetensors": b"weights", "lora/adapter_config.json": b"{}"}


def test_they_are_named_by_the_optimizer_steps_of_their_policy(recipe, tmp_path):
    run = whole_run(recipe, tmp_path)
    per_iteration = len(run.update(0).config.identity()["steps"]["lrs"])
    assert per_iteration > 0
    assert [optimizer_steps(run, k) for k in range(3)] == [0, per_iteration, 2 * per_iteration]


@pytest.mark.parametrize("prefix", ["", "pipeline/"])
def test_they_lie_below_their_step_and_a_pipeline_without_a_folder_of_its_own(recipe, tmp_path, prefix):
    run = planned(recipe(), tmp_path, run_id="hand")
    make_all(run)
    rerun(run.store_url, "hand", "export", 2)
    make(run.export(2), {prefix + name: data for name, data in FILES.items()})
    out = tmp_path / "out"
    (said,) = export(run.store_url, "hand", str(out))
    step = out / "safetensors" / f"step_{optimizer_steps(run, 2)}"
    assert said == f"policy 2 of hand: 2 files in {step}"
    found = {str(path.relative_to(out)): path.read_bytes() for path in out.rglob("*") if path.is_file()}
    assert found == {str((step / name).relative_to(out)): data for name, data in FILES.items()}
    assert export(run.store_url, "hand", str(out)) == [said]
    (step / "lora" / "adapter_config.json").write_bytes(b"{ }")
    with pytest.raises(ConfigError, match="exists and holds something else"):
        export(run.store_url, "hand", str(out))


def test_a_damaged_file_leaves_nothing_there(recipe, tmp_path):
    run = whole_run(recipe, tmp_path)
    _, manifest = standing(run.export_slot(2))
    assert manifest is not None
    (entry,) = manifest.files.values()
    store.write(store.join(run.export_slot(2), entry.path), b"x" * entry.size)
    with pytest.raises(ArtifactError, match="is not what was committed"):
        export(run.store_url, "hand", str(tmp_path / "out"))
    assert not [path for path in (tmp_path / "out").rglob("*") if path.is_file()]


def test_a_newer_one_that_does_not_stand_is_passed_over_and_said(recipe, tmp_path):
    run = whole_run(recipe, tmp_path)
    rerun(run.store_url, "hand", "export", 2)
    said, passed_over = export(run.store_url, "hand", str(tmp_path / "out"))
    assert said.startswith("policy 0 of hand: 1 files in ")
    assert passed_over == "policy-0002/export is invalidated"
    make_one(run.export(2))
    assert export(run.store_url, "hand", str(tmp_path / "out"))[0].startswith("policy 2 of hand")
