"""What was acknowledged outlives kills of the service: every uuid ends in its scores, none is lost or invented."""

import os
import resource
import signal
import sqlite3
import stat
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import psutil
import pytest

from cosmos_rl_core import plugins
from cosmos_rl_core.errors import ArtifactError
from cosmos_rl_core.reward_service.index import Index
from cosmos_rl_core.reward_service.spool import Spool
from cosmos_rl_core.rewards._base import Sample
from tests import running_service as running
from tests.running_service import Command, image_frame, unfinished_upload

pytestmark = pytest.mark.processes


@pytest.fixture
def command(tmp_path: Path) -> Iterator[Command]:
    values = running.settings(tmp_path, {"reward_type": "probe", "options": {"seconds": 0.15}}, drain_s=20)
    found = Command(running.write(tmp_path, values | {"port": running.free_port()}))
    try:
        yield found
    finally:
        if found.process is not None and found.process.poll() is None:
            found.kill()


def workers(pid: int) -> list[psutil.Process]:
    return psutil.Process(pid).children(recursive=True)


def test_a_killed_service_goes_on_with_every_accepted_request(command: Command, tmp_path: Path):
    client = command.start()
    running.wait_ready(client)
    uuids = [client.enqueue(image_frame("a", first=i)) for i in range(12)]
    upload = unfinished_upload(client)
    first = client.result(uuids[0], "probe")
    assert command.process is not None
    scorers = workers(command.process.pid)
    command.kill()
    upload.close()
    psutil.wait_procs(scorers, timeout=10)
    assert not [scorer for scorer in scorers if scorer.is_running()]
    incoming, frames = (tmp_path / "spool" / name for name in ("incoming", "frames"))
    assert len([*incoming.iterdir()]) == 1
    (frames / "never-accepted").write_bytes(b"renamed, and killed before the index had it")

    client = command.start()
    running.wait_ready(client)
    assert [*incoming.iterdir()] == []
    told = [client.result(uuid, "probe") for uuid in uuids]
    assert [each["scores"]["probe_reward"] for each in told] == [[float(i)] for i in range(12)]
    # What had a result keeps it, to the byte.
    assert told[0] == first
    with sqlite3.connect(tmp_path / "spool" / "index.sqlite") as index:
        assert sorted(row[0] for row in index.execute("SELECT uuid FROM jobs")) == sorted(uuids)
    assert command.terminate() == 0
    assert [*frames.iterdir()] == []


def test_our_client_outlives_a_kill_of_the_service(command: Command, monkeypatch: pytest.MonkeyPatch):
    client = command.start()
    running.wait_ready(client)
    for path, name in (("enqueue", "ENQUEUE"), ("pull", "FETCH")):
        monkeypatch.setenv(f"REMOTE_REWARD_{name}_URL", f"{client.url}/api/reward/{path}")
    monkeypatch.setenv("REMOTE_REWARD_TOKEN", client.token)
    module = plugins.load("rewards", "remote")
    options = module.Options(name="remote", reward_fn="probe", score_key="probe_reward", batch_size=2, timeout_s=60)
    samples = [Sample(f"{i}", f"{i}", "a", np.full((1, 4, 4, 3), i, np.uint8)) for i in range(12)]
    with ThreadPoolExecutor(1) as pool:
        scoring = pool.submit(module.Reward(options).score, samples)
        time.sleep(0.7)
        command.kill()
        assert not scoring.done()
        assert command.start().url == client.url
        assert [scores["probe_reward"] for scores in scoring.result()] == [float(i) for i in range(12)]


def test_sigterm_finishes_what_runs_and_leaves_the_rest_to_the_next_start(command: Command, tmp_path: Path):
    client = command.start()
    running.wait_ready(client)
    uuids = [client.enqueue(image_frame("sleep 0.5", first=i)) for i in range(3)]
    time.sleep(0.3)
    assert command.terminate() == 0
    with sqlite3.connect(tmp_path / "spool" / "index.sqlite") as index:
        done = [row[0] for row in index.execute("SELECT uuid FROM jobs WHERE result IS NOT NULL")]
    assert done == uuids[:1]
    client = command.start()
    assert [client.result(uuid, "probe")["scores"]["probe_reward"] for uuid in uuids] == [[0.0], [1.0], [2.0]]


def test_a_full_disk_is_507_and_harms_nothing(command: Command, tmp_path: Path):
    client = command.start()
    running.wait_ready(client)
    assert command.process is not None
    # The kernel refuses to let files of this process grow further, as a full disk does.
    resource.prlimit(command.process.pid, resource.RLIMIT_FSIZE, (2**20, 2**20))
    status, told = client.post("enqueue", image_frame("a", size=800))
    assert (status, told["detail"]) == (507, "the disk of the service is full; send the request again later")
    assert [*(tmp_path / "spool" / "incoming").iterdir()] == []
    assert client.scores(image_frame("a", first=3), "probe")["scores"]["probe_reward"] == [3.0]


def test_two_services_never_share_a_spool(command: Command, tmp_path: Path):
    command.start()
    assert command.process is not None
    second = [sys.executable, "-m", "flows", "reward-service", str(command.path)]
    ended = subprocess.run(second, env=running.environment(), capture_output=True, text=True, check=False)
    assert ended.returncode == 64
    assert f"another service, process {command.process.pid}, uses {tmp_path / 'spool'}" in ended.stderr


def test_the_spool_is_for_its_owner_alone(tmp_path: Path):
    with Spool(tmp_path / "new" / "spool") as spool:
        assert [stat.S_IMODE(path.stat().st_mode) for path in (spool.root, spool.frames)] == [0o700, 0o700]


def test_a_damaged_index_is_never_taken_for_an_empty_one(tmp_path: Path):
    (tmp_path / "index.sqlite").write_bytes(b"damaged" * 1000)
    with pytest.raises(ArtifactError, match="cannot be used: file is not a database"):
        Index(tmp_path / "index.sqlite")
    with sqlite3.connect(tmp_path / "newer.sqlite") as newer:
        newer.execute("PRAGMA user_version = 2")
    with pytest.raises(ArtifactError, match="has the format 2, expected 1"):
        Index(tmp_path / "newer.sqlite")


def test_a_body_that_the_disk_has_lost_is_an_error_and_not_a_silence(command: Command, tmp_path: Path):
    client = command.start()
    running.wait_ready(client)
    uuids = [client.enqueue(image_frame("a", first=i)) for i in range(6)]
    assert command.process is not None
    os.kill(command.process.pid, signal.SIGKILL)
    command.process.communicate()
    (tmp_path / "spool" / "frames" / uuids[4]).unlink()
    (tmp_path / "spool" / "frames" / uuids[5]).write_bytes(b"damaged")
    client = command.start()
    told = [client.result(uuid, "probe") for uuid in uuids]
    assert [each["scores"] and each["scores"]["probe_reward"] for each in told[:4]] == [[0.0], [1.0], [2.0], [3.0]]
    assert "No such file" in told[4]["error"]
    assert "no newline" in told[5]["error"]
