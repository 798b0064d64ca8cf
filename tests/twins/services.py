"""Services that twins share: a Prefect server with a limit for GPUs, tiny scorers, and a judge of edits."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from PIL import ImageStat

from tests import running_service, tiny_scorers
from tests.caption_server import Asked, Reply, completion, serving
from tests.e2e.prefect_server import LASTING_LEASES, PrefectServer
from tests.twins.inputs import Inputs

SERVED = {"pickscore": "pickscore", "dance_grpo": "video_align"}
"""Scorer plugins by the name under which recipes ask for them."""
READY_S = 300.0


@contextmanager
def prefect_server(folder: Path, gpus: int) -> Iterator[dict[str, str]]:
    """Run a server on which ``infra init`` made everything; yield the variables that lead a command to it."""
    folder.mkdir(parents=True, exist_ok=True)
    server = PrefectServer(folder, LASTING_LEASES)
    try:
        server.start()
        command = [sys.executable, "-m", "flows", "infra", "init", "--gpus", str(gpus)]
        subprocess.run(command, env=os.environ | server.environment, check=True, capture_output=True)
        yield server.environment
    finally:
        server.stop()


def _judged(asked: Asked) -> Reply:
    """Answer as a judge of edits, by the brightness of the pictures: equal pictures get equal numbers."""
    first, last = (
        int(ImageStat.Stat(picture.convert("L")).mean[0]) for picture in (asked.pictures[0], asked.pictures[-1])
    )
    return completion(json.dumps({"followed": last * 10 // 255, "unchanged": 10 - abs(first - last) * 10 // 255}))


@contextmanager
def judge(port: int) -> Iterator[None]:
    """Run a service that judges edits."""
    with serving(port, caption=_judged):
        yield


@contextmanager
def reward_service(folder: Path, inputs: Inputs) -> Iterator[dict[str, str]]:
    """Run the service; yield the variables that name it."""
    folder.mkdir(parents=True, exist_ok=True)
    scorers = [
        {"reward_type": name, "options": tiny_scorers.settings(plugin, folder / plugin)}
        for name, plugin in SERVED.items()
    ]
    values = running_service.settings(folder, *scorers, plugins=[])
    values["decode_args"] = {"model_path": str(inputs.pipeline("cosmos_predict2_5")), "device": "cpu"}
    command = running_service.Command(running_service.write(folder, values))
    client = command.start()
    try:
        running_service.wait_ready(client, READY_S)
        yield {
            "REMOTE_REWARD_ENQUEUE_URL": f"{client.url}/api/reward/enqueue",
            "REMOTE_REWARD_FETCH_URL": f"{client.url}/api/reward/pull",
            "REMOTE_REWARD_TOKEN": running_service.TOKEN,
        }
    finally:
        command.terminate()
