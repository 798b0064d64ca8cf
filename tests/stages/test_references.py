"""The pictures that prompts refer to, in the pool of a store: what is refused where one has gone or changed."""

from pathlib import Path

import pytest

from cosmos_rl_core.errors import ArtifactError, DatasetError
from stages.artifacts.slots import current_of
from tests.stages.conftest import make, make_run
from tests.stages.training.test_reference_runs import values


def test_a_picture_that_is_gone_or_another_one_ends_the_stage(tmp_path: Path):
    (inputs := tmp_path / "inputs").mkdir()
    other = make_run(tmp_path, values(inputs), "other")
    assert other.prepared.references is not None
    (inputs / "2.png").write_bytes((inputs / "1.png").read_bytes())
    with pytest.raises(DatasetError, match=r"2\.png has changed since the run was planned"):
        make(other.prepared.references, tmp_path)
    (inputs / "2.png").unlink()
    with pytest.raises(DatasetError, match=r"2\.png cannot be read"):
        make(other.prepared.references, tmp_path)
    assert current_of(other.prepared.references.slot)[1] is None
    with pytest.raises(ArtifactError, match="is missing; restore it"):
        make(other.prepared.embed, tmp_path)


def test_a_damaged_picture_in_the_pool_is_an_error(tmp_path: Path):
    (inputs := tmp_path / "inputs").mkdir()
    run = make_run(tmp_path, values(inputs))
    assert run.prepared.references is not None
    make(run.prepared.references, tmp_path)
    damaged = tmp_path / "dataset" / "references" / run.plan.prompts[0].references[0].digest
    data = bytearray(damaged.read_bytes())
    data[40] ^= 1
    damaged.write_bytes(data)
    with pytest.raises(ArtifactError, match="is damaged; restore it"):
        make(run.prepared.embed, tmp_path)
