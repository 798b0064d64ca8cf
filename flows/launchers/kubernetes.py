"""Kubernetes: an allocation is a Job, or a JobSet for several nodes, with an agent in every pod.

Flow and pods communicate through the run's store, so the flow needs no volume and can be replaced. Kubernetes never
restarts a pod: a retry is a new attempt. Needs ``pip install '.[kubernetes]'``.
"""

import os
from collections.abc import Callable
from http import HTTPStatus
from typing import Any, NamedTuple, cast

import urllib3
from kubernetes import client
from kubernetes import config as kubernetes_config
from kubernetes.client.exceptions import ApiException

from cosmos_rl_core.config.clusters import KubernetesResources
from cosmos_rl_core.config.launch import LaunchConfig
from cosmos_rl_core.errors import ConfigError, UnavailableError
from cosmos_rl_core.storage import store
from flows.launchers import variables
from flows.launchers._allocations import AllocatedJobs, Allocation, agent_command, wait_until_gone
from flows.launchers._base import Job, JobState
from flows.launchers._processes import stage_command
from stages.execution.mailbox import Mailbox

REQUEST_TIMEOUT_S = 30.0


class Kind(NamedTuple):
    """A kind of object in Kubernetes' API."""

    name: str
    group: str
    version: str
    plural: str


JOB = Kind("Job", "batch", "v1", "jobs")
JOBSET = Kind("JobSet", "jobset.x-k8s.io", "v1alpha2", "jobsets")
NODE = "node"
"""Name of a JobSet's only Job, and of every pod's only container."""
NUMBER = "$(JOB_COMPLETION_INDEX)"
"""Kubernetes replaces this by the pod's number."""
CANNOT_START = {"ImagePullBackOff", "InvalidImageName", "CreateContainerConfigError"}
"""Reasons of waiting containers that only a person can remove."""


class JobLauncher(AllocatedJobs):
    """See :class:`flows.launchers._base.JobLauncher`."""

    def __init__(self, run_url: str, config: LaunchConfig) -> None:
        root = store.join(store.absolute(run_url), "allocations")
        if Mailbox(root).is_shared:
            raise ConfigError(f"pods cannot reach the store {run_url}; it needs a URL (s3://...)")
        super().__init__(run_url, config, root, Kubernetes(config, run_url.rpartition("/")[2]))


class Kubernetes:
    """See :class:`flows.launchers._allocations.Scheduler`. An allocation's id is the name of its object."""

    agents_per_node = True

    def __init__(self, config: LaunchConfig, run: str) -> None:
        assert config.kubernetes is not None
        # A label has at most 63 characters and ends with a letter or a digit.
        self._run = run[:63].rstrip("-_.")
        self._config, self._settings = config, config.kubernetes
        self._python = config.python or "python"
        self._api = _api_client()
        self._objects, self._pods = client.CustomObjectsApi(self._api), client.CoreV1Api(self._api)

    def find(self, allocation: Allocation) -> str | None:
        """Return the name if the object waits or runs. Delete one that has ended, because the name is needed again.

        A Job whose pod failed ends only when its other pods have ended, which takes as long as their grace period.
        """
        found = self._read(allocation)
        if found is None:
            return None
        if found["metadata"].get("deletionTimestamp") or self.state(allocation).phase == "ended":
            self.end(allocation)
            return None
        return allocation.name

    def start(self, allocation: Allocation) -> str:
        """Create the object, unless another flow has just created it."""
        create, manifest = self._objects.create_namespaced_custom_object, self.manifest(allocation)
        self._ask_object(create, allocation, manifest, unless=HTTPStatus.CONFLICT)
        return allocation.name

    def manifest(self, allocation: Allocation) -> dict[str, Any]:
        """Return the Job, or the JobSet whose only Job has one pod a node."""
        labels = {
            "app.kubernetes.io/managed-by": "cosmos-flows",
            "cosmos-flows/allocation": allocation.name,
            "cosmos-flows/run": self._run,
        }
        limit_min, settings, kind = allocation.resources.time_limit_min, self._settings, _kind(allocation)
        spec: dict[str, Any] = {
            "completionMode": "Indexed",
            "completions": allocation.agents,
            "parallelism": allocation.agents,
            # The flow decides about retries, never Kubernetes.
            "backoffLimit": 0,
            "template": {"metadata": {"labels": labels}, "spec": self._pod(allocation)},
        }
        spec |= {} if limit_min is None else {"activeDeadlineSeconds": 60 * limit_min}
        if kind is JOBSET:
            # Pods look up the first one by name before it is ready.
            network = {"enableDNSHostnames": True, "publishNotReadyAddresses": True}
            spec = {
                "replicatedJobs": [{"name": NODE, "replicas": 1, "template": {"spec": spec}}],
                "network": network | {"subdomain": allocation.name},
                "failurePolicy": {"maxRestarts": 0},
            }
        return {
            "apiVersion": f"{kind.group}/{kind.version}",
            "kind": kind.name,
            "metadata": {"name": allocation.name, "namespace": settings.namespace, "labels": labels},
            "spec": spec | {"ttlSecondsAfterFinished": settings.keep_finished_s},
        }

    def _pod(self, allocation: Allocation) -> dict[str, Any]:
        resources = allocation.resources
        assert isinstance(resources, KubernetesResources)
        memory_gb = resources.memory_gb_per_node
        asked = {
            resources.gpu_resource: resources.gpus_per_node,
            "cpu": resources.cpus_per_node,
            "memory": memory_gb and f"{memory_gb}Gi",
        }
        amounts = {name: str(amount) for name, amount in asked.items() if amount}
        environment = variables.plain(os.environ) | self._config.environment
        container = {
            "name": NODE,
            "image": resources.image,
            "command": agent_command(self._python, allocation, "--node", NUMBER),
            # Everybody who may read Jobs can read these. Secrets are referenced by name below.
            "env": [{"name": name, "value": value} for name, value in sorted(environment.items())],
            "envFrom": [{"secretRef": {"name": name}} for name in self._settings.secrets],
            "resources": {"limits": amounts, "requests": amounts},
            "volumeMounts": [{"name": "shared-memory", "mountPath": "/dev/shm"}],
        }
        memory = {"medium": "Memory", "sizeLimit": f"{self._settings.shared_memory_gb}Gi"}
        return {
            "restartPolicy": "Never",
            "containers": [container],
            "volumes": [{"name": "shared-memory", "emptyDir": memory}],
            "nodeSelector": resources.node_selector,
            # Every namespace has an account of this name, which pods without another one get.
            "serviceAccountName": self._settings.service_account or "default",
        }

    def command(self, job: Job, allocation: Allocation, order: str) -> list[str]:
        """Return torchrun for every pod, or one process for the first."""
        first = f"{allocation.name}-{NODE}-0-0.{allocation.name}"
        request = "{directory}/request.json"
        return stage_command(job.request.stage, request, self._python, self._config, first, order)

    def state(self, allocation: Allocation) -> JobState:
        """Return the state from the conditions of the object and from its pods."""
        found, what = self._read(allocation), f"{_kind(allocation).name} {allocation.name}"
        if found is None:
            return JobState("ended", kind="killed", reason=f"{what} does not exist any more")
        pods = self._pods_of(allocation)
        failures = (failure for pod in pods if (failure := _failure(pod)) is not None)
        kind, why = next(failures, ("killed", _ended(found)))
        if why is not None:
            return JobState("ended", kind=kind, reason=f"{what}: {why}")
        running = [pod for pod in pods if pod["status"].get("phase") in ("Running", "Succeeded")]
        all_run = bool(pods) and len(running) == len(pods)
        reason = f"{what}: {len(running)} of {max(len(pods), 1)} pods run"
        return JobState("running" if all_run else "waiting", reason=reason)

    def end(self, allocation: Allocation) -> None:
        """Delete the object and wait until its pods are gone."""
        delete = self._objects.delete_namespaced_custom_object
        self._ask_object(delete, allocation, allocation.name, propagation_policy="Foreground")

        def is_gone() -> bool:
            return self._read(allocation) is None and not self._pods_of(allocation)

        wait_until_gone(is_gone, allocation.name)

    def _read(self, allocation: Allocation) -> dict[str, Any] | None:
        read = self._objects.get_namespaced_custom_object
        return self._ask_object(read, allocation, allocation.name)

    def _pods_of(self, allocation: Allocation) -> list[dict[str, Any]]:
        label, place = f"cosmos-flows/allocation={allocation.name}", self._settings.namespace
        found = self._ask(self._pods.list_namespaced_pod, place, label_selector=label)
        return cast("dict[str, Any]", self._api.sanitize_for_serialization(found))["items"]

    def _ask_object(self, call: Callable[..., Any], allocation: Allocation, what: Any, **options: Any) -> Any:
        kind = _kind(allocation)
        place = (kind.group, kind.version, self._settings.namespace, kind.plural)
        return self._ask(call, *place, what, **options)

    def _ask(self, call: Callable[..., Any], *what: Any, unless: int = 404, **options: Any) -> Any:
        """Call a method of the API. Return None if the status is ``unless``, by default: not found.

        Raises :class:`UnavailableError` if the server does not answer or is overloaded.
        """
        try:
            return call(*what, _request_timeout=REQUEST_TIMEOUT_S, **options)
        except urllib3.exceptions.HTTPError as error:
            raise UnavailableError(f"Kubernetes does not answer: {error}") from error
        except ApiException as error:
            status, reason = error.status or 0, f"{error.status} {error.reason}"
            if status == unless:
                return None
            if status == HTTPStatus.TOO_MANY_REQUESTS or status // 100 == 5:
                raise UnavailableError(f"Kubernetes answers {reason}") from error
            raise ConfigError(f"Kubernetes refuses: {reason} {error.body}") from error


def _api_client() -> client.ApiClient:
    """Return a client configured inside a pod by its service account, elsewhere by the kubeconfig."""
    configuration, where = client.Configuration(), os.environ.get("KUBECONFIG")
    try:
        kubernetes_config.load_incluster_config(client_configuration=configuration)
    except kubernetes_config.ConfigException:
        try:
            kubernetes_config.load_kube_config(where, client_configuration=configuration)
        except (kubernetes_config.ConfigException, OSError) as error:
            why = f"launcher = 'kubernetes' found no cluster: {error}; set KUBECONFIG"
            raise ConfigError(why) from error
    return client.ApiClient(configuration)


def _kind(allocation: Allocation) -> Kind:
    return JOB if allocation.agents == 1 else JOBSET


def _ended(found: dict[str, Any]) -> str | None:
    """Return the condition that ended a Job or a JobSet, None if it has not ended."""
    for condition in found.get("status", {}).get("conditions") or ():
        ended = condition["type"] in ("Complete", "Completed", "Failed")
        if ended and condition["status"] == "True":
            words = (condition.get(key) for key in ("type", "reason", "message"))
            return ": ".join(str(word) for word in words if word)
    return None


def _failure(pod: dict[str, Any]) -> tuple[str, str] | None:
    """Return kind and description of a pod's failure, None if it has not failed."""
    name, status = pod["metadata"]["name"], pod["status"]
    for container in status.get("containerStatuses") or ():
        state = container.get("state", {})
        waits, ended = state.get("waiting", {}), state.get("terminated", {})
        if (why := waits.get("reason")) in CANNOT_START:
            return "config", f"{name} cannot start ({why}): {waits.get('message', '')}".rstrip(": ")
        if (why := ended.get("reason", "")) == "OOMKilled":
            return "out_of_memory", f"{name} was killed because it used too much memory"
        if ended.get("exitCode"):
            return "crash", f"{name} ended with {ended['exitCode']} {why}".rstrip()
    # The pod was evicted or preempted, or its node is gone.
    evicted = status.get("phase") == "Failed" and status.get("reason")
    return ("killed", f"{name}: {evicted}") if evicted else None
