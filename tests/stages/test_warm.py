"""The fork server, started as a launcher starts it."""

import time
from pathlib import Path

import psutil
import pytest

from cosmos_rl_core.config.launch import LaunchConfig
from cosmos_rl_core.errors import ConfigError
from flows.launchers._processes import WarmServer
from stages.artifacts.request import Request
from stages.artifacts.slots import standing
from tests.e2e.flow_process import eventually
from tests.stages.test_reward import RIGHT, scoring, write_samples

PATIENCE_S = 120.0


def score(server: WarmServer, request: Request, folder: Path) -> None:
    folder.mkdir()
    path = folder / "request.json"
    path.write_text(request.model_dump_json(), encoding="utf-8")
    process = server.start(request.stage, path, folder / "log.txt")
    deadline_s = time.monotonic() + PATIENCE_S
    while (code := process.poll()) is None:
        assert time.monotonic() < deadline_s
        time.sleep(0.02)
    assert code == 0, (folder / "log.txt").read_text()


def libraries_of(process: psutil.Process) -> set[str]:
    return {Path(found.path).name for found in process.memory_maps() if ".so" in found.path}


@pytest.mark.slow
def test_the_server_imports_what_its_first_fork_imported_on_first_use(tmp_path: Path) -> None:
    source = write_samples(str(tmp_path / "rollout"), [RIGHT])
    before = {child.pid for child in psutil.Process().children()}
    server = WarmServer(LaunchConfig(mode="warm"))
    try:
        (process,) = [child for child in psutil.Process().children() if child.pid not in before]
        num_threads = process.num_threads()
        # rapidocr loads OpenCV when it reads its first picture.
        assert not any("cv2" in name for name in libraries_of(process))
        for name in ("first", "second"):
            slot = str(tmp_path / f"reward-{name}")
            score(server, scoring(slot, source), tmp_path / name)
            manifest = standing(slot)[1]
            assert manifest is not None
            assert manifest.summary["ocr"] == 1.0
        assert any("cv2" in name for name in libraries_of(process))
        assert process.num_threads() == num_threads
    finally:
        server.close()


def test_the_exit_code_of_a_fork_tells_the_kind_where_its_log_takes_no_text(tmp_path: Path) -> None:
    """`/dev/full` is a device without room."""
    (tmp_path / "request.json").write_text("{}", encoding="utf-8")
    server = WarmServer(LaunchConfig(mode="warm"))
    try:
        process = server.start("index", tmp_path / "request.json", Path("/dev/full"))
        assert eventually(lambda: process.poll() is not None, PATIENCE_S)
        assert process.poll() == ConfigError().exit_code
    finally:
        server.close()
