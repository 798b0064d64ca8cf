"""What a cluster profile means. No scheduler is asked."""

from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from cosmos_rl_core.config.launch import LaunchConfig
from cosmos_rl_core.config.reading import read_toml
from cosmos_rl_core.errors import ConfigError, StageError
from cosmos_rl_core.recipes.reading import launch_of
from cosmos_rl_core.rewards._remote import client
from cosmos_rl_core.storage import cache, s3
from flows.checking.misplaced import misplaced
from flows.launchers import variables
from flows.planning.plan import Settings, plan_of
from stages.artifacts.artifact import Artifact
from stages.artifacts.slots import input_of
from tests.flows.allocated import Work

CLUSTERS = Path(__file__).parents[3] / "deployments" / "clusters"


@pytest.mark.parametrize(
    ("launch", "words"),
    [
        ({"launcher": "slurm", "mode": "warm"}, "needs mode = 'cold'"),
        ({"launcher": "slurm", "gpu_limit": "gpus"}, "needs launcher = 'local'"),
        ({"launcher": "slurm", "stage_gpus": {"update": [0]}}, "stage_gpus needs launcher = 'local', found 'slurm'"),
        ({"launcher": "kubernetes"}, "'local', 'ray' or 'slurm'"),
        ({"launcher": "slurm", "processes": 3, "slurm": {"nodes": 2}}, "3 processes of every stage"),
        (
            {"launcher": "slurm", "processes": 2, "slurm": {"stages": {"update": {"nodes": 4}}}},
            "2 processes of update cannot share 4 nodes evenly",
        ),
        ({"slurm": {"options": ["account=mine"]}}, "options"),
        ({"slurm": {"nodse": 2}}, "nodse"),
    ],
)
def test_profiles_that_cannot_work_are_refused(launch: dict[str, Any], words: str) -> None:
    with pytest.raises(ValidationError, match=words):
        LaunchConfig.model_validate(launch)


def test_an_unknown_stage_is_refused_by_the_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(CLUSTERS.parents[1])
    misspelt = ("launch.slurm.stages.rolout.nodes=2", "launch.stage_time_limits_s.updat=3")
    misspelt += ("launch.launcher=slurm", "launch.mode=cold", "launch.processes=2")
    with pytest.raises(ConfigError) as error:
        plan_of(Settings("configs/tiny/nft.toml", overrides=misspelt))
    assert "launch.slurm.stages.rolout: unknown stage" in str(error.value)
    assert "launch.stage_time_limits_s.updat: unknown stage" in str(error.value)


@pytest.mark.parametrize("path", sorted(CLUSTERS.glob("*.toml")), ids=lambda path: path.stem)
def test_every_shipped_profile_resolves(path: Path) -> None:
    launch = launch_of(str(path))
    assert not misplaced(launch)
    assert launch.launcher == read_toml(str(path), "")["launch"].get("launcher", "local")
    assert launch.processes_of("update") % launch.nodes_of("update") == 0


def test_a_local_stage_has_a_time_limit_and_the_environment_that_is_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    work = Work(tmp_path, monkeypatch)
    limited = LaunchConfig(stage_time_limits_s={"report": 0.2}, environment={"ASKED_FOR": "this"})
    with pytest.raises(StageError, match=r"exceeded its time limit of 0\.2 s and was ended") as error:
        work.launcher(limited).make("wave", [work.request("a")])
    assert error.value.kind == "hung"
    work.go()
    work.launcher(limited.model_copy(update={"stage_time_limits_s": {}})).make("wave", [work.request("a")])
    assert Artifact(input_of(work.request("a").slot)).json("done.json") == "this"


def test_every_variable_that_stages_read_is_passed_on() -> None:
    read = {s3.PROFILES, f"{s3.CHECKPOINT}ENDPOINT_URL", "AWS_PROFILE", cache.DIRECTORY, cache.GIGABYTES, "HF_HOME"}
    read |= {client.ENQUEUE_URL, client.FETCH_URL, client.TOKEN, client.NO_REPLICA}
    read |= {*client.TIMEOUTS}
    assert set(variables.passed(dict.fromkeys(read | {"PATH", "PREFECT_API_KEY"}, ""))) == read
