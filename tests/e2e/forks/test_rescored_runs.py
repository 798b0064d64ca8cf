"""Re-scores by the command line: by a judge on two ranks, killed once, while the run is at work."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from flows.cli.app import app
from stages.artifacts.slots import current_of
from tests import tiny_scorers
from tests.e2e.flow_process import PREFECT, RUN_ID, Flows, eventually

pytestmark = pytest.mark.slow
TWO_JUDGES = '[launch]\nmode = "warm"\ndevice = "cpu"\nthreads = 1\nstage_processes = { judge = 2 }\nmax_attempts = 1\n'


@pytest.fixture
def flows(prefect_environment: dict[str, str], tmp_path: Path) -> Iterator[Flows]:
    flows = Flows(tmp_path / "flows", prefect_environment)
    flows.use_prefect({})
    flows.program = PREFECT
    yield flows
    flows.kill_all()


def files(flows: Flows) -> dict[str, bytes]:
    """Every file of the run but its re-scores."""
    paths = (path for path in flows.root.rglob("*") if path.is_file())
    return {
        name: path.read_bytes()
        for path in paths
        if not (name := str(path.relative_to(flows.root))).startswith(("rescore/", "lease/"))
    }


def audit(flows: Flows) -> str:
    """What an audit says; it finds nothing."""
    ended = CliRunner(env=flows.given).invoke(app, ["audit", RUN_ID, "--store", flows.store])
    assert ended.exit_code == 0, ended.output
    return ended.output


def rewards(folder: Path) -> str:
    """A file with a tiny CLIP model as the reward."""
    options: dict[str, Any] = {"name": "clip_score", **tiny_scorers.settings("clip_score", folder / "clip")}
    told = ", ".join(f"{name} = {json.dumps(value)}" for name, value in options.items())
    path = folder / "clip.toml"
    path.write_text(f"[[rewards]]\nfn = {{ {told} }}\n", encoding="utf-8")
    return str(path)


def test_a_judge_on_two_ranks_is_killed_and_the_same_command_goes_on_while_the_run_works(
    flows: Flows, tmp_path: Path
) -> None:
    flows.start("--iterations", "1").finish(timeout_s=900)
    cluster = tmp_path / "two.toml"
    cluster.write_text(TWO_JUDGES, encoding="utf-8")
    words = ("rescore", RUN_ID, "--store", flows.store, "--reward", rewards(tmp_path), "--cluster", str(cluster))

    killed = flows.start_command(PREFECT, *words)
    begun = "rescore/*/iterations/0000/reward-clip_score/layout.1.json"
    killed.wait_until(lambda: [*flows.root.glob(begun)], timeout_s=600)
    killed.kill()
    assert eventually(lambda: not flows.processes(), 60)
    audit(flows)

    at_work = flows.start("--iterations", "2")
    at_work.wait_until(lambda: (flows.root / "iterations/0001/rollout/manifest.1.json").exists(), timeout_s=900)
    said = flows.start_command(PREFECT, *words).finish(timeout_s=900)
    assert "rank correlation" in said
    at_work.finish(timeout_s=900)

    before = files(flows)
    found = flows.start_command(PREFECT, *words, "--json").finish(timeout_s=900)
    numbers = json.loads(found[found.index("{\n") if "{\n" in found else found.index("{") :])
    assert numbers["rollouts"]["ks"] == [0, 1]
    assert files(flows) == before
    (folder,) = (flows.root / "rescore").iterdir()
    for k in range(2):
        made = current_of(f"{folder}/iterations/{k:04d}/reward-clip_score")[1]
        assert made is not None
        assert made.stage == "judge"
    assert "nothing is wrong" in audit(flows)
    assert flows.nothing_is_left()
