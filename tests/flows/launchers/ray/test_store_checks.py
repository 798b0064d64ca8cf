"""Nodes of a Ray cluster that cannot use the store are named, with the reason, before any of their GPUs is reserved."""

import socket
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from cosmos_rl_core.errors import StageError
from cosmos_rl_core.storage import s3
from tests.flows.launchers.ray.at_work import ROOT, Work, all_gpus_taken, at_work
from tests.flows.launchers.ray.cluster import Cluster, needs_ray
from tests.seaweed import BUCKET, started_seaweed

# Slow, and to be run alone: the thread in which fsspec talks to S3 begins in the cluster's network and stays there, so
# that later tests of the same process reach no other server.
pytestmark = [needs_ray, pytest.mark.xdist_group("ray"), pytest.mark.processes, pytest.mark.slow]
KINDS = ("closed", "secret", "clock")
HOUR = """
import datetime

from botocore import compat

now = compat.get_current_datetime
compat.get_current_datetime = lambda *args: now(*args) + datetime.timedelta(hours=1)
"""
"""A clock that is an hour ahead, for whoever signs requests."""


@pytest.fixture(scope="module")
def ray_cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """A sound node, and others without the server, with a wrong secret, and with a wrong clock. Their GPUs are taken.

    Flow and nodes have keys and endpoint in a home of their own, by the profile that the flow names.
    """
    folder = tmp_path_factory.mktemp("ray")
    with at_work(folder, ()) as cluster, started_seaweed(folder / "server") as server, closing(socket.socket()) as none:
        none.bind(("127.0.0.1", 0))
        closed = f"http://127.0.0.1:{none.getsockname()[1]}"
        sound = home(folder / "sound", server.endpoint, server.secret)
        homes = {
            "closed": home(folder / "closed", closed, server.secret),
            "secret": home(folder / "secret", server.endpoint, "wrong"),
            "clock": sound,
        }
        (folder / "clock").mkdir()
        (folder / "clock" / "sitecustomize.py").write_text(HOUR, encoding="utf-8")
        clock = {"PYTHONPATH": f"{folder / 'clock'}:{folder}:{ROOT}"}
        for number, kind in enumerate(KINDS):
            cluster.start_node(number, f"--labels={kind}=any", **homes[kind], **(clock if kind == "clock" else {}))
        cluster.start_node(len(KINDS), f"--labels={','.join(f'{kind}=any' for kind in KINDS)}", **sound)
        with pytest.MonkeyPatch.context() as patch, all_gpus_taken(cluster):
            for name, value in (sound | {s3.PROFILES: f"s3://{BUCKET}=store"}).items():
                patch.setenv(name, value)
            yield cluster


def home(folder: Path, endpoint: str, secret: str) -> dict[str, str]:
    """The variable of a home whose AWS files have keys and endpoint."""
    files = folder / ".aws"
    files.mkdir(parents=True)
    (files / "config").write_text(f"[profile store]\nendpoint_url = {endpoint}\nregion = us-east-1\n", encoding="utf-8")
    keys = f"aws_access_key_id = tests\naws_secret_access_key = {secret}\n"
    (files / "credentials").write_text(f"[store]\n{keys}", encoding="utf-8")
    return {"HOME": str(folder)}


@pytest.mark.parametrize(
    ("kind", "end", "why"),
    [
        ("closed", "unavailable", "Could not connect to the endpoint URL"),
        ("secret", "config", "the secret key does not match the access key"),
        ("clock", "config", "this machine's clock is wrong; set it. Mend"),
    ],
)
def test_a_node_that_cannot_use_the_store_is_named_though_no_gpu_is_free(
    ray_cluster: Cluster, kind: str, end: str, why: str
) -> None:
    work = Work(ray_cluster, f"s3://{BUCKET}/{kind}")
    work.asks(gang=True)
    settings = {"processes": 4, "ray": {"nodes": 2, "labels": {kind: "any"}}}
    with closing(work.waves(**settings)) as waves, pytest.raises(StageError) as raised:
        waves.make("wave", [work.request()])
    message = str(raised.value)
    assert raised.value.kind == end
    assert f"nodes of the Ray cluster cannot run embed: 127.0.0.{10 + KINDS.index(kind)}: " in message
    assert f"s3://{BUCKET}/{kind}/run" in message
    assert why in message
    assert message.endswith("Mend them, or choose others by launch.ray.labels)")
