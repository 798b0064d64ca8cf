"""Manifests against the published schemas; real agents and stages over a real S3 store, behind a fake API server."""

import itertools
import json
import secrets
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import kubernetes_validate
import pytest

from cosmos_rl_core.config.launch import LaunchConfig
from cosmos_rl_core.errors import ConfigError, StageError, UnavailableError
from cosmos_rl_core.storage import store
from flows import launchers
from flows.launchers._allocations import AllocatedJobs, Allocation
from flows.launchers._base import Job
from flows.launchers.kubernetes import Kubernetes
from stages.artifacts.request import Request
from stages.artifacts.slots import standing_manifest
from stages.contracts import Embed, ModelRef
from tests.flows import fake_kubernetes
from tests.flows.allocated import Work, plant
from tests.flows.fake_kubernetes import Cluster, validate

pytestmark = pytest.mark.processes

POD = {"image": "registry/cosmos:1", "gpus_per_node": 8, "cpus_per_node": 4, "memory_gb_per_node": 32}


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Cluster]:
    """Found by the environment, as any cluster."""
    with fake_kubernetes.running(tmp_path) as (cluster, kubeconfig):
        monkeypatch.setenv("KUBECONFIG", str(kubeconfig))
        yield cluster


@pytest.fixture
def work(cluster: Cluster, s3_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Work:
    """With the run in a bucket."""
    return Work(tmp_path, monkeypatch, run_url=f"{s3_url}/{secrets.token_hex(4)}")


def config(**options: Any) -> LaunchConfig:
    """Of a cluster that answers at once; its pods have this interpreter instead of an image."""
    kubernetes = {"query_s": 0.2} | POD | options
    return LaunchConfig.model_validate(
        {"launcher": "kubernetes", "processes": 8, "python": sys.executable, "kubernetes": kubernetes}
    )


def embed_job() -> Job:
    """Of a distributed stage."""
    model = ModelRef(path="none", adapter="none", digest="none")
    embed = Embed(model=model, prompts=(), max_prompt_length=1)
    return Job(Request(stage="embed", slot="s3://b/x", seed=0, config=embed))


def allocation_of(config: LaunchConfig) -> Allocation:
    jobs = launchers.load("s3://bucket/runs/nft-1", config)
    assert isinstance(jobs, AllocatedJobs)
    return jobs.allocation_of(embed_job())


def manifest_of(config: LaunchConfig) -> dict[str, Any]:
    return Kubernetes(config, "nft-1").manifest(allocation_of(config))


def test_a_job_is_never_started_again_by_kubernetes(cluster: Cluster) -> None:
    job = manifest_of(config(time_limit_min=2, secrets=["store"], service_account="flow"))
    validate(job)
    spec, pod = job["spec"], job["spec"]["template"]["spec"]
    assert (job["kind"], spec["backoffLimit"], pod["restartPolicy"]) == ("Job", 0, "Never")
    assert (spec["activeDeadlineSeconds"], spec["ttlSecondsAfterFinished"]) == (120, 3600)
    (container,) = pod["containers"]
    assert container["resources"]["limits"] == {"nvidia.com/gpu": "8", "cpu": "4", "memory": "32Gi"}
    assert container["envFrom"] == [{"secretRef": {"name": "store"}}]
    assert container["image"] == "registry/cosmos:1"
    assert pod["serviceAccountName"] == "flow"
    assert job["metadata"]["labels"]["cosmos-flows/run"] == "nft-1"
    broken = {**job, "spec": spec | {"backoffLimits": 0}}
    with pytest.raises(kubernetes_validate.ValidationError, match="backoffLimits"):
        validate(broken)


def test_a_manifest_says_where_things_are_and_names_the_secrets(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    planted = plant(monkeypatch)
    plain = {"AWS_ENDPOINT_URL": "https://s3.example.com", "COSMOS_RL_CACHE_DIR": "/cache", "HF_HUB_OFFLINE": "1"}
    plain |= {"PROD_S3_CHECKPOINT_REGION_NAME": "eu", "COSMOS_RL_S3_PROFILES": "s3://bucket=theirs"}
    kept = {"AWS_ROLE_ARN": "the flow's", "REMOTE_REWARD_FETCH_URL": "https://me:pass-1@example.com", "OTHER": "x"}
    kept |= {"REMOTE_REWARD_ENQUEUE_URL": "https://example.com/?key=pass-2"}
    for name, value in (plain | kept).items():
        monkeypatch.setenv(name, value)
    job = manifest_of(config(secrets=["store", "services"]).model_copy(update={"environment": {"MINE": "1"}}))
    validate(job)
    (container,) = job["spec"]["template"]["spec"]["containers"]
    given = {variable["name"]: variable["value"] for variable in container["env"]}
    assert (plain | {"MINE": "1"}).items() <= given.items()
    assert not given.keys() & (planted.keys() | kept.keys())
    assert container["envFrom"] == [{"secretRef": {"name": "store"}}, {"secretRef": {"name": "services"}}]
    assert not [word for word in (*planted.values(), "pass-1", "pass-2") if word in json.dumps(job)]


def test_several_nodes_are_a_jobset_whose_pods_meet_at_the_first(cluster: Cluster) -> None:
    two = config(nodes=2)
    jobset = manifest_of(two)
    validate(jobset)
    (replicated,) = jobset["spec"]["replicatedJobs"]
    job = replicated["template"]["spec"]
    assert (jobset["apiVersion"], jobset["kind"]) == ("jobset.x-k8s.io/v1alpha2", "JobSet")
    assert (job["completions"], job["parallelism"], job["completionMode"]) == (2, 2, "Indexed")
    assert (jobset["spec"]["failurePolicy"], job["backoffLimit"]) == ({"maxRestarts": 0}, 0)
    allocation = allocation_of(two)
    command = Kubernetes(two, "nft-1").command(embed_job(), allocation, "embed-1")
    options = dict(itertools.pairwise(command))
    # <jobset>-<job>-<number>-<pod>.<subdomain>
    assert options["--rdzv-endpoint"].partition(":")[0] == f"{allocation.name}-node-0-0.{allocation.name}"
    assert (options["--nnodes"], options["--nproc-per-node"], options["--max-restarts"]) == ("2", "4", "0")


def test_stages_share_one_job_which_another_flow_finds(work: Work, cluster: Cluster) -> None:
    work.go()
    launcher = work.launcher(config())
    launcher.make("first", [work.request("a")])
    (work.folder / "go").unlink()
    execution = launcher.execution_of(work.request("b"))
    # Nobody hears of this one again: the flow is gone.
    launchers.load(work.run_url, config()).submit(Job(work.request("b"), execution))
    began = work.wait_until_ran(2)
    work.go()
    work.launcher(config()).make("again", [work.request("b")])
    assert work.ran() == began
    assert (cluster.created, len(cluster.objects)) == (1, 1)
    assert all(standing_manifest(work.request(name)) for name in "ab")
    (log,) = fsspec.filesystem("s3").ls(f"{work.run_url}/b/logs", detail=False)
    assert b"at work" in store.read(f"s3://{log}")
    launcher.close()
    assert not cluster.objects


def test_a_stage_in_a_pod_is_cancelled_and_says_why_it_failed(work: Work, cluster: Cluster) -> None:
    jobs = launchers.load(work.run_url, config())
    first = jobs.submit(Job(work.request("a")))
    ((*_, pid),) = work.wait_until_ran(1)
    first.cancel()
    assert not Path("/proc", pid).exists()
    (work.folder / "fail").touch()
    work.go()
    launcher = work.launcher(config())
    with pytest.raises(StageError, match="it does not fit") as error:
        launcher.make("wave", [work.request("b")])
    assert error.value.kind == "out_of_memory"
    launcher.close()
    assert not cluster.objects


def container(**state: Any) -> list[dict[str, Any]]:
    """The status of a pod's only container."""
    return [{"name": "node", "image": "x", "imageID": "x", "ready": False, "restartCount": 0, "state": state}]


@pytest.mark.parametrize(
    ("pod", "kind"),
    [
        (
            {"phase": "Failed", "containerStatuses": container(terminated={"reason": "OOMKilled", "exitCode": 137})},
            "out_of_memory",
        ),
        ({"phase": "Failed", "containerStatuses": container(terminated={"exitCode": 1})}, "crash"),
        ({"phase": "Failed", "reason": "Evicted"}, "killed"),
        ({"phase": "Pending", "containerStatuses": container(waiting={"reason": "ImagePullBackOff"})}, "config"),
    ],
)
def test_how_a_pod_ends_says_whether_another_try_can_help(pod: dict[str, Any], kind: str, cluster: Cluster) -> None:
    settings = config().model_copy(update={"python": "true"})
    kubernetes, allocation = Kubernetes(settings, "nft-1"), allocation_of(settings)
    assert kubernetes.find(allocation) is None
    assert kubernetes.start(allocation) == kubernetes.start(allocation) == allocation.name
    cluster.pod_status = pod
    cluster.conditions = [{"type": "Failed", "status": "True"}] if pod["phase"] == "Failed" else []
    state = kubernetes.state(allocation)
    assert (state.phase, state.kind) == ("ended", kind)
    cluster.away = True
    with pytest.raises(UnavailableError, match="503"):
        kubernetes.state(allocation)
    cluster.away = False
    kubernetes.end(allocation)
    assert kubernetes.state(allocation).kind == "killed"
    assert cluster.created == 1


def test_another_try_gets_new_pods_although_the_object_of_a_failed_one_has_not_ended(cluster: Cluster) -> None:
    settings = config(nodes=2).model_copy(update={"python": "true"})
    kubernetes, allocation = Kubernetes(settings, "nft-1"), allocation_of(settings)
    kubernetes.start(allocation)
    cluster.conditions = []
    assert kubernetes.find(allocation) == allocation.name
    cluster.pod_status = {"phase": "Failed", "containerStatuses": container(terminated={"exitCode": 1})}
    assert kubernetes.find(allocation) is None
    assert not cluster.objects


def test_a_store_that_pods_cannot_reach_is_refused(cluster: Cluster, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="needs a URL"):
        launchers.load(str(tmp_path), config())
