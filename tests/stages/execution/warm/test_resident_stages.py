"""Every stage with torch has the same bytes in a process that has served all the others before."""

from contextlib import closing
from pathlib import Path

import psutil
import pytest

from cosmos_rl_core.config.launch import LaunchConfig
from flows.running.display import Display
from flows.running.wave import Waves
from stages.artifacts.artifact import Artifact
from stages.artifacts.request import Request
from stages.artifacts.slots import input_of
from stages.registry import STAGES
from tests.e2e.flow_process import RESIDENT
from tests.stages.every_stage import made_once

pytestmark = [pytest.mark.processes, pytest.mark.xdist_group("residents")]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Request]:
    """Every stage, made by a process of tests. Its bytes are pinned (``test_pins.py``)."""
    return made_once(tmp_path_factory)


def test_every_stage_with_torch_gives_equal_bytes_after_any_other_stage(
    made: dict[str, Request], tmp_path: Path
) -> None:
    assert made.keys() == STAGES.keys(), "add a Request of the new stage to every_stage.py"
    expected = {name: Artifact(input_of(request.slot)).manifest.content for name, request in made.items()}
    with_torch = [name for name in made if STAGES[name].torch]
    pids: set[int] = set()
    launch = LaunchConfig(mode="warm", device="cpu", resident_gb=1)
    with closing(Waves(str(tmp_path / "run"), launch, Display())) as waves:
        for turn, names in enumerate((with_torch, reversed(with_torch))):
            found: dict[str, str] = {}
            for name in names:
                request = made[name].model_copy(update={"slot": str(tmp_path / f"turn-{turn}" / name)})
                waves.make(name, [request])
                found[name] = Artifact(input_of(request.slot)).manifest.content
                children = psutil.Process().children()
                pids.update(child.pid for child in children if RESIDENT in child.cmdline())
            assert found == {name: expected[name] for name in with_torch}
        assert not waves.processes().ended
    assert len(pids) == 1
