"""Whatever is killed of the fine-tuning of a VLM: the same command again ends with the bytes of an undisturbed run."""

import random
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from stages.artifacts.artifact import Artifact
from stages.artifacts.slots import current_of, input_of
from tests.e2e.flow_process import NO_PREFECT, Flows, metrics
from tests.e2e.talks import write_recipe

pytestmark = pytest.mark.slow
KILLS = 8


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A recipe of three iterations on few pictures and clips, judged after each."""
    return write_recipe(tmp_path_factory.mktemp("talks"))


@pytest.fixture
def new_flows(recipe: str, tmp_path: Path) -> Iterator[Callable[[str], Flows]]:
    """Makes stores of their own for the recipe."""
    made: list[Flows] = []

    def new(name: str) -> Flows:
        made.append(Flows(tmp_path / name, {}, recipe))
        made[-1].program = NO_PREFECT
        return made[-1]

    yield new
    for flows in made:
        flows.kill_all()


def contents(flows: Flows) -> dict[str, str]:
    """Digests of the files of every slot of the store, those that runs share too; every byte is read."""
    root = Path(flows.store)
    slots = sorted({path.parent for path in root.rglob("manifest.*.json")})
    found: dict[str, str] = {}
    for slot in slots:
        _, manifest = current_of(str(slot))
        assert manifest is not None
        artifact = Artifact(input_of(str(slot)))
        for name in artifact.names():
            if not artifact.lacks(name.partition("/")[0]):
                artifact.read(name)
        found[str(slot.relative_to(root))] = manifest.content
    return found


def test_a_run_that_is_killed_at_random_moments_ends_with_the_same_bits(new_flows: Callable[[str], Flows]) -> None:
    reference, flows, dice = new_flows("reference"), new_flows("killed"), random.Random(0)
    began_s = time.monotonic()
    reference.run()
    took_s = time.monotonic() - began_s
    kills = 0
    for _ in range(KILLS):
        run = flows.start()
        end_s = time.monotonic() + dice.uniform(0.2, 0.8) * took_s
        while time.monotonic() < end_s and run.process.poll() is None:
            time.sleep(0.02)
        if run.process.poll() is not None:
            break
        # The command, its server of forks, or the process of a stage.
        victims = flows.processes()
        dice.choice(victims).kill()
        kills += 1
        run.process.wait(120)
        assert flows.nothing_is_left()
    flows.run()
    assert kills >= 3
    assert contents(flows) == contents(reference)
    assert metrics(flows) == metrics(reference)
    assert flows.nothing_is_left()
