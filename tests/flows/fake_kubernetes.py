"""The part of Kubernetes' API that the launcher uses, over HTTP, with a kubelet that runs each pod's command here.

What is created must pass the published schemas. Images, nodes and limits are unknown here; tests set those states.
"""

import contextlib
import json
import os
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any
from urllib.parse import parse_qs, urlsplit

import kubernetes_validate
import yaml

Manifest = dict[str, Any]


def validate(manifest: Manifest) -> None:
    """Raise if a Job, or the Job within a JobSet, does not have Kubernetes' schema; unknown fields are refused."""
    jobs = [manifest] if manifest["kind"] == "Job" else [_job_of(manifest)]
    for job in jobs:
        kubernetes_validate.validate(job, "1.34", strict=True)


def _job_of(jobset: Manifest) -> Manifest:
    (replicated,) = jobset["spec"]["replicatedJobs"]
    metadata = {"name": f"{jobset['metadata']['name']}-{replicated['name']}-0"}
    return {"apiVersion": "batch/v1", "kind": "Job", "metadata": metadata, "spec": replicated["template"]["spec"]}


@dataclass
class Cluster:
    """What the server knows."""

    objects: dict[str, Manifest] = field(default_factory=dict)
    pods: "dict[str, list[subprocess.Popen[bytes]]]" = field(default_factory=dict)
    pod_status: Manifest | None = None
    """Of every pod, instead of what its process does."""
    conditions: list[Manifest] | None = None
    """Of every Job, instead of what its pods lead to."""
    away: bool = False
    created: int = 0
    node: "Callable[[Manifest], dict[str, str]]" = lambda _: {}
    """Environment of the node that a container is put on."""

    def create(self, name: str, manifest: Manifest) -> tuple[int, Manifest]:
        """POST."""
        if name in self.objects:
            return 409, {"kind": "Status", "reason": "AlreadyExists", "code": 409}
        validate(manifest)
        self.objects[name] = manifest
        self.created += 1
        job = manifest if manifest["kind"] == "Job" else _job_of(manifest)
        self.pods[name] = [self._run(job, index) for index in range(job["spec"]["completions"])]
        return 201, self.read(name)[1]

    def _run(self, job: Manifest, index: int) -> "subprocess.Popen[bytes]":
        (container,) = job["spec"]["template"]["spec"]["containers"]
        command = [word.replace("$(JOB_COMPLETION_INDEX)", str(index)) for word in container["command"]]
        given = {variable["name"]: variable["value"] for variable in container["env"]}
        return subprocess.Popen(command, env=os.environ | self.node(container) | given)

    def read(self, name: str) -> tuple[int, Manifest]:
        """GET."""
        if name not in self.objects:
            return 404, {"kind": "Status", "reason": "NotFound", "code": 404}
        codes = [pod.poll() for pod in self.pods[name]]
        ended = [] if None in codes else [{"type": "Failed" if any(codes) else "Complete", "status": "True"}]
        conditions = ended if self.conditions is None else self.conditions
        return 200, self.objects[name] | {"status": {"conditions": conditions}}

    def delete(self, name: str) -> tuple[int, Manifest]:
        """DELETE, with SIGTERM to the pods as in Kubernetes."""
        if name not in self.objects:
            return self.read(name)
        self._end(self.pods.pop(name))
        del self.objects[name]
        return 200, {"kind": "Status", "status": "Success"}

    def list_pods(self, name: str) -> tuple[int, Manifest]:
        """GET with a label."""
        phases = {None: "Running", 0: "Succeeded"}
        items = [
            {
                "metadata": {"name": f"{name}-{index}"},
                "status": self.pod_status or {"phase": phases.get(pod.poll(), "Failed")},
            }
            for index, pod in enumerate(self.pods.get(name, ()))
        ]
        return 200, {"apiVersion": "v1", "kind": "PodList", "items": items}

    def close(self) -> None:
        """Leave no process."""
        for pods in self.pods.values():
            self._end(pods)

    def _end(self, pods: "list[subprocess.Popen[bytes]]") -> None:
        for pod in pods:
            pod.terminate()
        for pod in pods:
            try:
                pod.wait(30)
            except subprocess.TimeoutExpired:
                pod.kill()
                pod.wait()


@contextlib.contextmanager
def running(folder: Path) -> Iterator[tuple[Cluster, Path]]:
    """Yields the cluster and a kubeconfig that leads to it."""
    cluster = Cluster()

    class Handler(BaseHTTPRequestHandler):
        def _answer(self, method: str) -> None:
            length = int(self.headers.get("Content-Length") or 0)
            body = json.loads(self.rfile.read(length)) if length else {}
            code, answer = (503, {"kind": "Status"}) if cluster.away else _route(cluster, method, self.path, body)
            data = json.dumps(answer).encode()
            self.send_response(code)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def do_GET(self) -> None:
            self._answer("GET")

        def do_POST(self) -> None:
            self._answer("POST")

        def do_DELETE(self) -> None:
            self._answer("DELETE")

        def log_message(self, format: str, *args: object) -> None:
            """Quietly."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    Thread(target=server.serve_forever, daemon=True).start()
    kubeconfig = folder / "kubeconfig"
    there = {"name": "here", "cluster": {"server": f"http://127.0.0.1:{server.server_port}"}}
    context = {"name": "here", "context": {"cluster": "here", "user": "me"}}
    users = [{"name": "me", "user": {}}]
    parts = {"clusters": [there], "contexts": [context], "users": users, "current-context": "here"}
    kubeconfig.write_text(yaml.safe_dump({"apiVersion": "v1", "kind": "Config"} | parts), encoding="utf-8")
    try:
        yield cluster, kubeconfig
    finally:
        server.shutdown()
        server.server_close()
        cluster.close()


def _route(cluster: Cluster, method: str, path: str, body: Manifest) -> tuple[int, Manifest]:
    url = urlsplit(path)
    parts = url.path.strip("/").split("/")
    if parts[-1] == "pods":
        return cluster.list_pods(parse_qs(url.query)["labelSelector"][0].partition("=")[2])
    assert "jobs" in parts or parts[:3] == ["apis", "jobset.x-k8s.io", "v1alpha2"], path
    if method == "POST":
        return cluster.create(body["metadata"]["name"], body)
    return (cluster.delete if method == "DELETE" else cluster.read)(parts[-1])
