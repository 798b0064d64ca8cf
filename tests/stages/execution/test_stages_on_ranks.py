"""Every stage that ranks share, alone on two and on three of them: what one process makes."""

from pathlib import Path

import pytest

from flows.auditing import differing
from stages.artifacts.artifact import Artifact
from stages.artifacts.manifest import Manifest
from stages.artifacts.request import Request
from stages.artifacts.slots import input_of
from stages.contracts import RECORDS
from stages.registry import STAGES
from tests.stages.conftest import make_on_ranks
from tests.stages.every_stage import made_once

pytestmark = [pytest.mark.processes, pytest.mark.xdist_group("stages on ranks")]
SHARED = sorted(name for name, stage in STAGES.items() if stage.distributed)
SUMMED = ("update", "finetune", "vlm_finetune")
"""Stages whose gradients are summed over ranks, so that their last bits may differ."""


@pytest.fixture(scope="module")
def asked(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Request]:
    """The Request of every stage, made by one process."""
    return made_once(tmp_path_factory)


def results(made: Manifest) -> dict[str, bytes]:
    artifact = Artifact(input_of(made.slot))
    return {name: artifact.read(name) for name in made.files if not name.startswith(RECORDS)}


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("stage", SHARED)
def test_ranks_make_what_one_process_makes(asked: dict[str, Request], stage: str, ranks: int, tmp_path: Path):
    alone = Artifact(input_of(asked[stage].slot)).manifest
    shared = make_on_ranks(asked[stage].model_copy(update={"slot": f"{tmp_path}/slot"}), tmp_path, ranks)
    assert shared.numerics["world_size"] == ranks
    if stage not in SUMMED:
        assert shared.content == alone.content
        seconds = {"seconds": shared.summary["seconds"]}
        assert shared.summary == pytest.approx(alone.summary | seconds)
        return
    found, expected = results(shared), results(alone)
    assert found.keys() == expected.keys()
    differences = [one for name in found for one in differing.of_files(name, expected[name], found[name])]
    assert [one for one in differences if not one.tolerated] == []
