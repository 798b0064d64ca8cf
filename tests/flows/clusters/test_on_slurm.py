"""Rendered scripts as jobs of a real Slurm: a warned command, a run over two nodes, a Ray cluster of two jobs."""

import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from flows.clusters.render import render, write
from tests.flows import slurm
from tests.flows.launchers.ray.cluster import needs_ray
from tests.flows.network import Network

pytestmark = [slurm.needs_slurm, pytest.mark.xdist_group("slurm"), pytest.mark.processes]
ROOT = Path(__file__).parents[3]
PROGRAMS = Path(sys.executable).parent
PATIENCE_S = 1200.0
"""On a busy machine."""
SHORT = ("--iterations", "1", "--set", "validation.n_generation=1", "--set", "rollout.n_generation=2")
ON_NODES = """
[launch]
launcher = "slurm"
device = "cpu"
processes = 2
environment = { GLOO_SOCKET_IFNAME = "lo" }
[launch.slurm]
nodes = 2
"""
ON_RAY = """
[launch]
launcher = "ray"
device = "cpu"
processes = 2
resident_gb = 1
elastic = { min = 1, max = 2, stages = ["rollout"] }
environment = { GLOO_SOCKET_IFNAME = "lo" }
[launch.ray]
gpus_per_node = 2
[launch.ray.stages.rollout]
labels = { "ray.io/market-type" = "spot" }
[launch.slurm]
setup = ["export CUDA_VISIBLE_DEVICES=$$-$SLURMD_NODENAME-0,$$-$SLURMD_NODENAME-1"]
options = ["--nodelist=n1"]
[launch.slurm.stages.rollout]
options = ["--nodelist=n2"]
"""

BOTH_NODES = """
import os, time, ray
ray.init(log_to_driver=False)
while sum(node["Alive"] for node in ray.nodes()) < 2:
    time.sleep(0.5)
begun = os.environ.get("SLURM_RESTART_COUNT", "0")
print("both nodes, time", begun, flush=True)
time.sleep(0 if begun == "1" else 3600)
"""


class Jobs:
    """A folder from which the scripts of a profile are submitted."""

    def __init__(self, folder: Path, conf: Path, profile: str) -> None:
        self.folder = folder / "jobs"
        self.profile = folder / "profile.toml"
        self.profile.write_text(profile, encoding="utf-8")
        write(render("slurm", str(self.profile), []), self.folder)
        changed = {"SLURM_CONF": str(conf), "PATH": f"{PROGRAMS}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT)}
        self._environment = os.environ | changed

    def call(self, *words: object) -> str:
        """What a command prints."""
        command = [*map(str, words)]
        return subprocess.run(
            command, cwd=self.folder, env=self._environment, check=True, capture_output=True, text=True
        ).stdout

    def submit(self, *words: object) -> str:
        """The number of a new job."""
        return self.call("sbatch", "--parsable", *words).strip()

    def run(self, *words: object) -> str:
        """The number of a new job of a run."""
        profile = ("--cluster", self.profile, "--store", self.folder.parent / "store")
        return self.submit("cosmos-flows.sbatch", "cosmos-flows", "run", "package:tiny/nft", *SHORT, *profile, *words)

    def state(self, job: str) -> str:
        """The state of a job, also when it has ended."""
        shown = self.call("scontrol", "show", "job", "--oneliner", job)
        return shown.partition(" JobState=")[2].split()[0]

    def log(self, job: str, name: str = "cosmos-flows") -> str:
        """What a job has printed so far."""
        path = self.folder / f"{name}-{job}.log"
        return path.read_text(encoding="utf-8", errors="replace") if path.exists() else ""

    def wait(self, happened: Callable[[], bool], job: str) -> None:
        """Wait, and show the log of a job if it takes too long or the job has failed."""
        deadline_s = time.monotonic() + PATIENCE_S
        while not happened():
            assert time.monotonic() < deadline_s, self.log(job)
            assert self.state(job) != "FAILED", self.log(job)
            time.sleep(0.5)


@pytest.fixture(scope="module")
def conf(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    with slurm.running(tmp_path_factory.mktemp("slurm")) as found:
        yield found


def test_a_job_that_slurm_warns_ends_its_command_and_starts_it_again(conf: Path, tmp_path: Path):
    jobs = Jobs(tmp_path, conf, ON_NODES)
    command = """
        trap 'echo ends; kill $!; exit 143' TERM
        echo "begins $1 on $SLURM_JOB_NUM_NODES"
        [ "$SLURM_RESTART_COUNT" ] && exit 0
        sleep infinity & wait
    """
    job = jobs.submit("cosmos-flows.sbatch", "bash", "-c", command, "bash", "x y")
    jobs.wait(lambda: "begins x y on 2\n" in jobs.log(job), job)
    jobs.call("scancel", "--signal=USR1", "--batch", job)
    jobs.wait(lambda: jobs.state(job) == "COMPLETED", job)
    said = [line for line in jobs.log(job).splitlines() if not line.startswith("slurmstepd")]
    assert said == ["begins x y on 2", "ends", "begins x y on 2"]


def test_a_job_has_the_exit_code_of_its_command(conf: Path, tmp_path: Path):
    jobs = Jobs(tmp_path, conf, ON_NODES)
    job = jobs.submit("cosmos-flows.sbatch", "bash", "-c", "exit 65")
    deadline_s = time.monotonic() + PATIENCE_S
    while jobs.state(job) != "FAILED":
        assert time.monotonic() < deadline_s
    assert " ExitCode=65:0 " in jobs.call("scontrol", "show", "job", "--oneliner", job)
    nothing = jobs.submit("cosmos-flows.sbatch")
    while jobs.state(nothing) != "FAILED":
        assert time.monotonic() < deadline_s
    assert "give the command after the name of the script" in jobs.log(nothing)


@pytest.mark.slow
def test_a_run_on_two_nodes_goes_on_after_a_warning(conf: Path, tmp_path: Path):
    jobs = Jobs(tmp_path, conf, ON_NODES)
    job = jobs.run("--run-id", "short")
    jobs.wait(lambda: "\npolicy " in jobs.log(job), job)
    jobs.call("scancel", "--signal=USR1", "--batch", job)
    jobs.wait(lambda: jobs.state(job) == "COMPLETED", job)
    log = jobs.log(job)
    assert log.count("run short: ") == 2
    assert len(re.findall("^policy  .* trainable", log, re.MULTILINE)) == 1
    assert len(re.findall("^policy  .* kept", log, re.MULTILINE)) == 1
    assert (tmp_path / "store" / "runs" / "short" / "report" / "index.html").is_file()


@contextmanager
def ray_jobs(folder: Path) -> Iterator[Jobs]:
    """Jobs in a network of their own."""
    network = Network()
    (folder / "slurm").mkdir()
    try:
        with network.entered(), slurm.running(folder / "slurm", own_network=True) as conf:
            yield Jobs(folder, conf, ON_RAY)
    finally:
        network.close()


@needs_ray
@pytest.mark.slow
def test_a_flow_has_a_ray_cluster_that_jobs_of_other_nodes_join(tmp_path: Path):
    with ray_jobs(tmp_path) as jobs:
        job = jobs.run("--run-id", "short")
        others = jobs.submit("cosmos-flows-rollout.sbatch", job)
        cluster = jobs.folder / f"cosmos-flows-ray-{job}"
        jobs.wait((cluster / "address").exists, job)
        assert (cluster.stat().st_mode & 0o777, len((cluster / "token").read_text())) == (0o700, 45)
        jobs.wait(lambda: jobs.state(job) == "COMPLETED", job)
        jobs.wait(lambda: jobs.state(others) == "COMPLETED", others)
        assert not cluster.exists()
        assert "Ray runtime started" in jobs.log(others, "cosmos-flows-rollout")
    assert (tmp_path / "store" / "runs" / "short" / "report" / "index.html").is_file()


@needs_ray
@pytest.mark.slow
def test_a_warned_cluster_begins_again_and_its_nodes_join_again(tmp_path: Path):
    with ray_jobs(tmp_path) as jobs:
        job = jobs.submit("cosmos-flows.sbatch", "python", "-c", BOTH_NODES)
        others = jobs.submit("cosmos-flows-rollout.sbatch", job)
        jobs.wait(lambda: "both nodes, time 0\n" in jobs.log(job), job)
        jobs.call("scancel", "--signal=USR1", "--batch", job)
        jobs.wait(lambda: jobs.state(job) == "COMPLETED", job)
        assert "both nodes, time 1\n" in jobs.log(job)
        jobs.wait(lambda: jobs.state(others) == "COMPLETED", others)
        assert jobs.log(others, "cosmos-flows-rollout").count("Ray runtime started") == 2
