"""What a cluster profile means: names, batch scripts, commands. No scheduler is asked."""

import itertools
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
from flows import launchers
from flows.checking.misplaced import misplaced
from flows.launchers import variables
from flows.launchers._base import Job, JobState
from flows.launchers.slurm import JobLauncher, Slurm
from flows.planning.plan import Settings, plan_of
from stages.artifacts.artifact import Artifact
from stages.artifacts.request import Request
from stages.artifacts.slots import input_of
from stages.contracts import Embed, ModelRef
from stages.execution.execution import Execution
from stages.reporting.contracts import Report
from tests.flows.allocated import Work

CLUSTERS = Path(__file__).parents[2] / "deployments" / "clusters"
TWO_NODES = {"nodes": 2, "gpus_per_node": 8, "partition": "h100", "options": ["--account=mine"]}


def config(slurm: dict[str, Any], **launch: Any) -> LaunchConfig:
    return LaunchConfig.model_validate({"launcher": "slurm", "processes": 16, "slurm": TWO_NODES | slurm} | launch)


def job(stage: str, slot: str = "x", gpus: tuple[int, ...] = ()) -> Job:
    """A distributed stage, or a light one."""
    model = ModelRef(path="none", adapter="none", digest="none")
    embed = Embed(model=model, prompts=(), max_prompt_length=1)
    stage_config = embed if stage == "embed" else Report(title="", reward="")
    return Job(
        Request(stage=stage, slot=f"/runs/r/{slot}", seed=0, config=stage_config), Execution(gpus=gpus, threads=8)
    )


def script_of(config: LaunchConfig, job: Job) -> list[str]:
    allocation = JobLauncher("/runs/r", config).allocation_of(job)
    return Slurm(config).script(allocation).splitlines()


def test_a_batch_script_asks_for_the_resources_and_becomes_the_agent() -> None:
    lines = script_of(config({"time_limit_min": 90, "setup": ["module load cuda"]}), job("embed"))
    asked = {line.removeprefix("#SBATCH ") for line in lines if line.startswith("#SBATCH ")}
    assert {
        "--nodes=2", "--ntasks-per-node=1", "--gres=gpu:8", "--partition=h100", "--time=90", "--account=mine",
        "--no-requeue",
    } <= asked  # fmt: skip
    assert lines[0] == "#!/bin/bash"
    assert lines[-2] == "module load cuda"
    assert " -m stages.execution.agent /runs/r/allocations/cosmos-" in lines[-1]
    assert "--once" not in lines[-1]


def test_a_step_is_torchrun_on_every_node_with_a_rendezvous_at_the_first() -> None:
    two_nodes = config({"srun_options": ["--container-image=/x.sqsh"]}, python="/venv/bin/python")
    allocation = JobLauncher("/runs/r", two_nodes).allocation_of(job("embed"))
    command = Slurm(two_nodes).command(job("embed"), allocation, "embed-1-2")
    options = dict(itertools.pairwise(command))
    assert command[:2] == ["srun", "--overlap"]
    assert (options["--nodes"], options["--ntasks-per-node"], options["--nnodes"]) == ("2", "1", "2")
    assert (options["--nproc-per-node"], options["--rdzv-backend"], options["--max-restarts"]) == ("8", "c10d", "0")
    assert options["--rdzv-endpoint"].startswith("{host}:2")
    assert options["--rdzv-id"] == "embed-1-2"
    assert command.index("--container-image=/x.sqsh") < command.index("/venv/bin/python")
    light = Slurm(two_nodes).command(job("report"), allocation, "report-1-2")
    assert dict(itertools.pairwise(light))["--nodes"] == "1"
    assert "torch.distributed.run" not in light


def test_a_job_is_named_by_its_request_and_an_allocation_by_what_it_asks_for() -> None:
    assert job("embed").name == job("embed").name != job("embed", slot="y").name
    held = JobLauncher("/runs/r", config({"stages": {"report": {"partition": "cpu"}}}))
    name = {
        "embed": held.allocation_of(job("embed")).name,
        "another embed": held.allocation_of(job("embed", slot="y")).name,
        "report": held.allocation_of(job("report")).name,
        "embed on GPUs of its own": held.allocation_of(job("embed", gpus=(0, 1))).name,
    }
    assert name["embed"] == name["another embed"]
    assert len({*name.values()}) == 3
    assert JobLauncher("/runs/s", config({})).allocation_of(job("embed")).name != name["embed"]
    alone = JobLauncher("/runs/r", config({"hold": False}))
    assert alone.allocation_of(job("embed")).name == job("embed").name


def test_a_job_of_its_own_asks_for_no_gpu_where_the_stage_needs_none() -> None:
    alone = config({"hold": False})
    light, ranks = (script_of(alone, job(stage)) for stage in ("report", "embed"))
    assert "#SBATCH --gres=gpu:8" in ranks
    assert "#SBATCH --nodes=1" in light
    assert not any("gpu" in line for line in light if line.startswith("#SBATCH --gres"))
    assert light[-1].endswith("--once")
    assert "#SBATCH --gres=gpu:1" in script_of(
        config({"hold": False, "stages": {"report": {"gpus_per_node": 1}}}), job("report")
    )


@pytest.mark.parametrize(
    ("launch", "words"),
    [
        ({"launcher": "slurm", "mode": "warm"}, "needs mode = 'cold'"),
        ({"launcher": "slurm", "gpu_limit": "gpus"}, "needs launcher = 'local'"),
        ({"launcher": "kubernetes"}, r"needs a table \[launch.kubernetes\]"),
        ({"launcher": "kubernetes", "kubernetes": {}}, "image"),
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


def test_a_stage_that_there_is_not_is_refused_by_the_plan(monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_slurm_needs_a_directory_that_nodes_share() -> None:
    with pytest.raises(ConfigError, match=r"launch\.slurm\.work_dir"):
        launchers.load("s3://bucket/runs/r", config({}))
    assert launchers.load("s3://bucket/runs/r", config({"work_dir": "/shared"}))


def test_on_this_machine_a_stage_has_a_time_limit_and_the_environment_that_is_asked_for(
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


@pytest.mark.parametrize(
    ("said", "phase", "kind"),
    [
        ("PENDING|Resources", "waiting", None),
        ("RUNNING|None", "running", None),
        ("COMPLETING|None", "ending", None),
        ("TIMEOUT|TimeLimit", "ended", "killed"),
        ("NODE_FAIL|None", "ended", "killed"),
        ("PREEMPTED|None", "ended", "killed"),
        ("CANCELLED|None", "ended", "killed"),
        ("OUT_OF_MEMORY|OutOfMemory", "ended", "out_of_memory"),
        ("FAILED|NonZeroExitCode", "ended", "crash"),
        ("COMPLETED|None", "ended", "crash"),
    ],
)
def test_states_of_slurm_in_our_words(
    said: str, phase: str, kind: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    squeue = tmp_path / "squeue"
    squeue.write_text(f"#!/bin/sh\necho '{said}'\n", encoding="utf-8")
    squeue.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    state = Slurm(config({})).state(JobLauncher("/runs/r", config({})).allocation_of(job("embed")))
    assert (state.phase, state.kind) == (phase, kind)
    assert isinstance(state, JobState)
    assert said.partition("|")[0] in state.reason


def test_every_variable_that_stages_read_is_passed_on() -> None:
    read = {s3.PROFILES, f"{s3.CHECKPOINT}ENDPOINT_URL", "AWS_PROFILE", cache.DIRECTORY, cache.GIGABYTES, "HF_HOME"}
    read |= {client.ENQUEUE_URL, client.FETCH_URL, client.TOKEN, client.NO_REPLICA}
    read |= {*client.TIMEOUTS}
    assert set(variables.passed(dict.fromkeys(read | {"PATH", "PREFECT_API_KEY"}, ""))) == read
