"""Kubernetes: an allocation is a Job, or a JobSet for several nodes, with an agent in every pod.

A flow talks to its pods through the run's store, so that it can be a small pod without a volume, and be replaced.
Kubernetes never starts a pod again: a retry is a new attempt of ours. Needs ``pip install '.[kubernetes]'``.
"""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http import HTTPStatus
from typing import Any, cast

import urllib3
from kubernetes import client
from kubernetes import config as kubernetes_config
from kubernetes.client.exceptions import ApiException

from cosmos_rl_core.config.clusters import KubernetesResources
from cosmos_rl_core.config.launch import LaunchConfig
from cosmos_rl_core.errors import ConfigError, UnavailableError
from cosmos_rl_core.storage import store
from flows.launchers import variables
from flows.launchers._allocated import AllocatedJobs, Allocation, rendezvous_port, wait_until_gone
from flows.launchers._base import Job, JobState
from flows.launchers._processes import module, stage_command
from stages.execution.agent import is_shared

REQUEST_TIMEOUT_S = 30.0
END_TIMEOUT_S = 300.0
GROUP, VERSION, PLURAL = "jobset.x-k8s.io", "v1alpha2", "jobsets"
"""What JobSets are in Kubernetes' API."""
NODE = "node"
"""The JobSet's only kind of Job, and every pod's only container."""
CANNOT_START = {"ImagePullBackOff", "InvalidImageName", "CreateContainerConfigError"}
"""Why a container waits for what only a person can change."""


class JobLauncher(AllocatedJobs):
    """See :class:`flows.launchers._base.JobLauncher`."""

    def __init__(self, run_url: str, config: LaunchConfig) -> None:
        root = store.join(store.absolute(run_url), "allocations")
        if is_shared(root):
            raise ConfigError(f"pods cannot reach the store {run_url}; launcher = 'kubernetes' needs a URL (s3://...)")
        super().__init__(run_url, config, root, Kubernetes(config, run_url.rpartition("/")[2]))


class Kubernetes:
    """See :class:`flows.launchers._allocated.Scheduler`; an id is the Job's or JobSet's name, behind its kind."""

    agents_per_node = True

    def __init__(self, config: LaunchConfig, run: str) -> None:
        assert config.kubernetes is not None
        # A label has at most 63 characters, the last of them a letter or a digit.
        self._run = run[:63].rstrip("-_.")
        self._config, self._settings = config, config.kubernetes
        self._api = api = _api_client()
        self._jobs, self._pods, self._sets = client.BatchV1Api(api), client.CoreV1Api(api), client.CustomObjectsApi(api)

    def find(self, allocation: Allocation) -> str | None:
        """By name; one that has ended makes room for the next."""
        allocation_id = _id(allocation)
        found = self._read(allocation_id)
        if found is None:
            return None
        if _ended(found) is not None or found["metadata"].get("deletionTimestamp"):
            self.end(allocation_id)
            return None
        return allocation_id

    def start(self, allocation: Allocation) -> str:
        """Create it; one that another flow created in the meantime is as good."""
        manifest: Any = self.manifest(allocation)
        namespace = self._settings.namespace
        try:
            with _answers():
                if manifest["kind"] == "Job":
                    self._jobs.create_namespaced_job(namespace, manifest, _request_timeout=REQUEST_TIMEOUT_S)
                else:
                    self._sets.create_namespaced_custom_object(
                        GROUP, VERSION, namespace, PLURAL, manifest, _request_timeout=REQUEST_TIMEOUT_S
                    )
        except ApiException as error:
            if error.status != HTTPStatus.CONFLICT:
                raise ConfigError(f"Kubernetes refuses {manifest['kind']} {allocation.name}: {error.body}") from error
        return _id(allocation)

    def manifest(self, allocation: Allocation) -> dict[str, Any]:
        """The Job, or the JobSet whose only Job has a pod a node."""
        labels = {
            "app.kubernetes.io/managed-by": "cosmos-flows",
            "cosmos-flows/allocation": allocation.name,
            "cosmos-flows/run": self._run,
        }
        metadata = {"name": allocation.name, "namespace": self._settings.namespace, "labels": labels}
        limit_min = allocation.resources.time_limit_min
        job: dict[str, Any] = {
            "completionMode": "Indexed",
            "completions": allocation.agents,
            "parallelism": allocation.agents,
            # A pod that fails is the flow's to judge, never Kubernetes' to start again.
            "backoffLimit": 0,
            "template": {"metadata": {"labels": labels}, "spec": self._pod(allocation)},
        }
        job |= {} if limit_min is None else {"activeDeadlineSeconds": 60 * limit_min}
        keep = {"ttlSecondsAfterFinished": self._settings.keep_finished_s}
        if allocation.agents == 1:
            return {"apiVersion": "batch/v1", "kind": "Job", "metadata": metadata, "spec": job | keep}
        spec = {
            "replicatedJobs": [{"name": NODE, "replicas": 1, "template": {"spec": job}}],
            # Pods find the first one by its name before it is ready.
            "network": {"enableDNSHostnames": True, "subdomain": allocation.name, "publishNotReadyAddresses": True},
            "failurePolicy": {"maxRestarts": 0},
        }
        return {"apiVersion": f"{GROUP}/{VERSION}", "kind": "JobSet", "metadata": metadata, "spec": spec | keep}

    def _pod(self, allocation: Allocation) -> dict[str, Any]:
        resources = allocation.resources
        assert isinstance(resources, KubernetesResources)
        asked = {
            resources.gpu_resource: resources.gpus_per_node or None,
            "cpu": resources.cpus_per_node,
            "memory": None if resources.memory_gb_per_node is None else f"{resources.memory_gb_per_node}Gi",
        }
        amounts = {name: str(amount) for name, amount in asked.items() if amount is not None}
        environment = variables.plain(os.environ) | self._config.environment
        container = {
            "name": NODE,
            "image": resources.image,
            "command": self._agent(allocation),
            # Secrets come from the cluster's own, by name: these are readable to all who may see Jobs.
            "env": [{"name": name, "value": value} for name, value in sorted(environment.items())],
            "envFrom": [{"secretRef": {"name": name}} for name in self._settings.secrets],
            "resources": {"limits": amounts, "requests": amounts},
            "volumeMounts": [{"name": "shared-memory", "mountPath": "/dev/shm"}],
        }
        memory = {"medium": "Memory", "sizeLimit": f"{self._settings.shared_memory_gb}Gi"}
        spec: dict[str, Any] = {
            "restartPolicy": "Never",
            "containers": [container],
            "volumes": [{"name": "shared-memory", "emptyDir": memory}],
        }
        spec |= {"nodeSelector": resources.node_selector} if resources.node_selector else {}
        account = self._settings.service_account
        return spec | ({} if account is None else {"serviceAccountName": account})

    def _agent(self, allocation: Allocation) -> list[str]:
        # Kubernetes puts the pod's number in the place of $(...).
        agent = [*module(self._python, "stages.execution.agent"), allocation.mailbox]
        agent += ["--node", "$(JOB_COMPLETION_INDEX)", "--idle-s", str(self._settings.idle_s)]
        return agent if self._settings.hold else [*agent, "--once"]

    def command(self, job: Job, allocation: Allocation, order: str) -> list[str]:
        """Torchrun in every pod, or one process in the first."""
        request = "{directory}/request.json"
        first = f"{allocation.name}-{NODE}-0-0.{allocation.name}"
        rendezvous = (f"{first}:{rendezvous_port(order)}", order)
        return stage_command(job.request.stage, request, self._python, self._config, rendezvous)

    def state(self, allocation_id: str) -> JobState:
        """From its conditions and its pods."""
        found = self._read(allocation_id)
        if found is None:
            return JobState("ended", kind="killed", reason=f"{allocation_id} is gone")
        pods = self._pods_of(allocation_id)
        if (condition := _ended(found)) is not None:
            kind, why = next((end for pod in pods if (end := _end_of(pod)) is not None), ("killed", condition))
            return JobState("ended", kind=kind, reason=f"{allocation_id}: {why}")
        for pod in pods:
            if (why := _waits_for_ever(pod)) is not None:
                return JobState("ended", kind="config", reason=f"{allocation_id}: {why}")
        running = [pod for pod in pods if pod["status"].get("phase") in ("Running", "Succeeded")]
        waiting = f"{allocation_id}: {len(running)} of {max(len(pods), 1)} pods run"
        return JobState("running" if pods and len(running) == len(pods) else "waiting", reason=waiting)

    def end(self, allocation_id: str) -> None:
        """Delete it with its pods."""
        kind, _, name = allocation_id.partition("/")
        namespace = self._settings.namespace

        def delete() -> None:
            if kind == "job":
                self._jobs.delete_namespaced_job(
                    name, namespace, propagation_policy="Foreground", _request_timeout=REQUEST_TIMEOUT_S
                )
            else:
                self._sets.delete_namespaced_custom_object(
                    GROUP,
                    VERSION,
                    namespace,
                    PLURAL,
                    name,
                    propagation_policy="Foreground",
                    _request_timeout=REQUEST_TIMEOUT_S,
                )

        _unless_absent(delete)
        wait_until_gone(
            lambda: self._read(allocation_id) is None and not self._pods_of(allocation_id), allocation_id, END_TIMEOUT_S
        )

    def _read(self, allocation_id: str) -> dict[str, Any] | None:
        kind, _, name = allocation_id.partition("/")
        namespace = self._settings.namespace

        def read() -> Any:
            if kind == "job":
                return self._jobs.read_namespaced_job(name, namespace, _request_timeout=REQUEST_TIMEOUT_S)
            return self._sets.get_namespaced_custom_object(
                GROUP, VERSION, namespace, PLURAL, name, _request_timeout=REQUEST_TIMEOUT_S
            )

        return cast("dict[str, Any] | None", self._api.sanitize_for_serialization(_unless_absent(read)))

    def _pods_of(self, allocation_id: str) -> list[dict[str, Any]]:
        label = f"cosmos-flows/allocation={allocation_id.partition('/')[2]}"
        with _answers():
            found = self._pods.list_namespaced_pod(
                self._settings.namespace, label_selector=label, _request_timeout=REQUEST_TIMEOUT_S
            )
        return cast("dict[str, Any]", self._api.sanitize_for_serialization(found))["items"]

    @property
    def _python(self) -> str:
        return self._config.python or "python"


def _api_client() -> client.ApiClient:
    """As a pod finds its cluster, or as kubectl does."""
    configuration = client.Configuration()
    try:
        kubernetes_config.load_incluster_config(client_configuration=configuration)
    except kubernetes_config.ConfigException:
        try:
            kubernetes_config.load_kube_config(os.environ.get("KUBECONFIG"), client_configuration=configuration)
        except (kubernetes_config.ConfigException, OSError) as error:
            raise ConfigError(f"launcher = 'kubernetes' finds no cluster: {error}; set KUBECONFIG") from error
    return client.ApiClient(configuration)


def _id(allocation: Allocation) -> str:
    return f"{'job' if allocation.agents == 1 else 'jobset'}/{allocation.name}"


def _ended(found: dict[str, Any]) -> str | None:
    """The condition that ended a Job or a JobSet, in words."""
    for condition in found.get("status", {}).get("conditions") or ():
        if condition["type"] in ("Complete", "Completed", "Failed") and condition["status"] == "True":
            return ": ".join(str(condition[key]) for key in ("type", "reason", "message") if condition.get(key))
    return None


def _end_of(pod: dict[str, Any]) -> tuple[str, str] | None:
    """Kind and words of a pod that failed."""
    name = pod["metadata"]["name"]
    for container in _containers(pod, "terminated"):
        if container.get("reason") == "OOMKilled":
            return "out_of_memory", f"{name} was killed for its memory"
        if container["exitCode"] != 0:
            return "crash", f"{name} ended with {container['exitCode']} {container.get('reason', '')}".rstrip()
    # Evicted, preempted, its node gone.
    return ("killed", f"{name}: {pod['status']['reason']}") if pod["status"].get("reason") else None


def _waits_for_ever(pod: dict[str, Any]) -> str | None:
    for container in _containers(pod, "waiting"):
        if container["reason"] in CANNOT_START:
            name, message = pod["metadata"]["name"], container.get("message", "")
            return f"{name} cannot start ({container['reason']}): {message}".rstrip(": ")
    return None


def _containers(pod: dict[str, Any], state: str) -> list[dict[str, Any]]:
    """What its containers that are in a state say of it."""
    states = [status.get("state", {}) for status in pod["status"].get("containerStatuses") or ()]
    return [found[state] for found in states if state in found]


def _unless_absent(ask: Callable[[], Any]) -> Any:
    try:
        with _answers():
            return ask()
    except ApiException as error:
        if error.status == HTTPStatus.NOT_FOUND:
            return None
        raise ConfigError(f"Kubernetes refuses: {error.status} {error.reason} {error.body}") from error


@contextmanager
def _answers() -> Iterator[None]:
    """Raise :class:`UnavailableError` where the server is away, or too busy."""
    try:
        yield
    except ApiException as error:
        if error.status == HTTPStatus.TOO_MANY_REQUESTS or (error.status or 0) >= HTTPStatus.INTERNAL_SERVER_ERROR:
            raise UnavailableError(f"Kubernetes answers {error.status} {error.reason}") from error
        raise
    except urllib3.exceptions.HTTPError as error:
        raise UnavailableError(f"Kubernetes does not answer: {error}") from error
