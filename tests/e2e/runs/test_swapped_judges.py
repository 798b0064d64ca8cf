"""Whole runs whose judge is a reward service that is exchanged, or killed, in the middle."""

import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from flows.auditing.audit import audit
from stages import contracts
from stages.artifacts.artifact import Artifact
from stages.artifacts.slots import input_of
from stages.formats.tables import read_table
from tests import running_service as running
from tests.e2e.flow_process import ROOT, RUN_ID, Flows

pytestmark = pytest.mark.slow
FN = "{ name = 'remote', reward_fn = 'probe', score_key = 'probe_reward', media = 'pixels', timeout_s = 120 }"
LABEL = "remote-probe-probe_reward"
STAGE = (
    "import sys; from flows.stage import run\n"
    "where, accept = {'store': sys.argv[3]}, sys.argv[4:] == ['accept']\n"
    "state = run(sys.argv[1], sys.argv[2], 1, **where, accept_scorer=accept, return_state=True)\n"
    "print(state.message); sys.exit(not state.is_completed())"
)


class Judge:
    """A service with the probe, at one address, whatever becomes of it."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir()
        self.folder, self.port = folder, running.free_port()
        self.command = running.Command(folder / "rewards.toml")

    def start(self, **options: Any) -> None:
        """Start it with these options of the probe."""
        values = running.settings(self.folder, {"reward_type": "probe", "options": options}) | {"port": self.port}
        running.wait_ready(self._started(values))

    def _started(self, values: dict[str, Any]) -> Any:
        running.write(self.folder, values)
        return self.command.start()

    @property
    def environment(self) -> dict[str, str]:
        """Where runs find it."""
        url = f"http://127.0.0.1:{self.port}/api/reward"
        names = {"ENQUEUE_URL": f"{url}/enqueue", "FETCH_URL": f"{url}/pull", "TOKEN": running.TOKEN}
        return {f"REMOTE_REWARD_{name}": value for name, value in names.items()}


@pytest.fixture
def judge(tmp_path: Path) -> Iterator[Judge]:
    judge = Judge(tmp_path / "service")
    yield judge
    if judge.command.process is not None and judge.command.process.poll() is None:
        judge.command.terminate()


@pytest.fixture
def flows(judge: Judge, reference: Flows, prefect_environment: dict[str, str], tmp_path: Path) -> Iterator[Flows]:
    """A store with embeddings, whose runs are scored by the service."""
    flows = Flows(tmp_path / "run", prefect_environment | judge.environment)
    shutil.copytree(Path(reference.store) / "dataset", Path(flows.store) / "dataset")
    yield flows
    flows.kill_all()


def options(iterations: int, *more: str) -> list[str]:
    return ["--set", f"rewards=[{{ fn = {FN} }}]", *more, "--iterations", str(iterations)]


def scorers(flows: Flows, k: int) -> set[str]:
    """What scored an iteration, from its stored scores; all of them are valid."""
    artifact = Artifact(input_of(flows.planned.slots.iteration(k, f"reward-{LABEL}")))
    table = read_table(artifact, contracts.Reward.SCORES)
    assert [*table["valid"]] == [True] * 8
    return {*table["scorer"]}


def stage(flows: Flows, *accept: str) -> tuple[int, str]:
    """The flow `stage/run` for the scores of iteration 1: its exit code and message."""
    command = [sys.executable, "-c", STAGE, RUN_ID, f"reward-{LABEL}", flows.store, *accept]
    ended = subprocess.run(command, cwd=ROOT, env=flows.environment, capture_output=True, text=True, check=False)
    return ended.returncode, ended.stdout + ended.stderr


def test_a_run_stops_at_another_judge_until_it_is_accepted(judge: Judge, flows: Flows) -> None:
    judge.start(release="1")
    flows.run(*options(1))
    before = flows.manifests()
    (first,) = scorers(flows, 0)
    judge.command.terminate()
    judge.start(release="2")
    said = " ".join(flows.run(*options(2), expect=64).split())
    assert "scored by probe probe 1 (" in said
    assert "now it is probe probe 2 (" in said
    code, told = stage(flows)
    assert (code, "probe probe 1 (" in told, "probe probe 2 (" in told) == (1, True, True)
    code, told = stage(flows, "accept")
    assert (code, "accepted another scorer" in told) == (0, True)
    # What is accepted needs no option from then on.
    flows.run(*options(2))
    judge.command.terminate()
    judge.start(release="3")
    assert "now it is probe probe 3 (" in " ".join(flows.run(*options(3), expect=64).split())
    assert "accepted another scorer" in " ".join(flows.run(*options(3), "--accept-scorer").split())
    assert scorers(flows, 0) == {first}
    assert len(scorers(flows, 0) | scorers(flows, 1) | scorers(flows, 2)) == 3
    kept = {path: data for path, data in before.items() if path.startswith("iterations/")}
    assert {path: flows.manifests().get(path) for path in kept} == kept
    assert [path.name for path in sorted((flows.root / "scorers").iterdir())] == [
        f"{LABEL}.{number}.json" for number in (1, 2, 3)
    ]
    assert audit(flows.store, RUN_ID).faults == []


def test_another_judge_during_a_stale_rollout_stops_the_run_at_the_same_place(judge: Judge, flows: Flows) -> None:
    stale = ("--set", "train.staleness=1")
    judge.start(release="1")
    flows.run(*options(2, *stale))
    judge.command.terminate()
    judge.start(release="2")
    assert "now it is probe probe 2 (" in " ".join(flows.run(*options(3, *stale), expect=64).split())
    assert not list((flows.root / f"iterations/0002/reward-{LABEL}").glob("manifest.*.json"))
    flows.run(*options(3, *stale), "--accept-scorer")
    assert scorers(flows, 0) == scorers(flows, 1) != scorers(flows, 2)
    assert audit(flows.store, RUN_ID).faults == []


def test_a_service_killed_in_the_middle_of_a_stage_and_started_again_scores_every_sample(
    judge: Judge, flows: Flows
) -> None:
    judge.start(seconds=0.5)
    run = flows.start(*options(1))
    run.wait_until(lambda: flows.markers(f"iterations/0000/reward-{LABEL}", 0))
    judge.command.kill()
    judge.start(seconds=0.5)
    run.finish()
    assert len(scorers(flows, 0)) == 1
    assert audit(flows.store, RUN_ID).faults == []
