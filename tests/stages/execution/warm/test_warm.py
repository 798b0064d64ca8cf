"""The fork server, started as a launcher starts it."""

import os
import time
from functools import partial
from pathlib import Path

import psutil
import pytest

from cosmos_rl_core.config.launch import LaunchConfig
from cosmos_rl_core.conformance.models import tiny_pipelines
from cosmos_rl_core.errors import ConfigError
from cosmos_rl_core.pipelines.directories import WEIGHTS
from flows.launchers._processes import WarmServer
from flows.planning import requests
from stages.artifacts.request import Request
from stages.artifacts.slots import current_of
from stages.reporting.contracts import Report
from tests.e2e.flow_process import eventually
from tests.run_first import run_first
from tests.stages.conftest import FEW_PROMPTS, make, make_run
from tests.stages.test_reward import RIGHT, scoring, write_samples

PATIENCE_S = 120.0
STAGE = """
import sys, types


def run(request, context):
    import talkative


stage = types.ModuleType("stage")
stage.run = run
sys.modules["stages.report"] = stage
"""


def run_in(server: WarmServer, request: Request, folder: Path) -> int:
    """Make a Request in a fork, and return its process."""
    folder.mkdir()
    path = folder / "request.json"
    path.write_text(request.model_dump_json(), encoding="utf-8")
    process = server.start(request.stage, path, folder / "log.txt")
    deadline_s = time.monotonic() + PATIENCE_S
    while (code := process.poll()) is None:
        assert time.monotonic() < deadline_s
        time.sleep(0.02)
    assert code == 0, (folder / "log.txt").read_text()
    return process.pid


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
            run_in(server, scoring(slot, source), tmp_path / name)
            manifest = current_of(slot)[1]
            assert manifest is not None
            assert manifest.summary["ocr"] == 1.0
        assert any("cv2" in name for name in libraries_of(process))
        assert process.num_threads() == num_threads
    finally:
        server.close()


@pytest.mark.processes
def test_libraries_that_print_when_they_are_imported_disturb_no_later_stage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "talkative.py").write_text("print('Hello from a library')", encoding="utf-8")
    run_first(STAGE, tmp_path, monkeypatch)
    server = WarmServer(LaunchConfig(mode="warm"))
    try:
        for name, said in (("first", "Hello from a library\n"), ("second", "")):
            request = Request(stage="report", slot=str(tmp_path / name), seed=0, config=Report(title="", reward=""))
            run_in(server, request, tmp_path / f"{name}-work")
            assert (tmp_path / f"{name}-work/log.txt").read_text() == said, "the server imports it for later forks"
    finally:
        server.close()


@pytest.mark.processes
def test_a_fork_has_the_model_that_the_server_loaded_until_a_file_of_it_is_replaced(tmp_path: Path) -> None:
    base = Path(tiny_pipelines.save("sd3", tmp_path / "sd3"))
    recipe = {
        "policy": {
            "model_name_or_path": str(base),
            "diffusers": {"inference_size": [32, 64], "max_prompt_length": 12, "sample": {"num_steps": 2}},
            "lora": {"r": 2, "target_modules": ["to_q"]},
        },
        "train": {
            "num_iterations": 1,
            "train_batch_per_replica": 2,
            "train_policy": {"type": "nft", "dataset": FEW_PROMPTS},
        },
        "rollout": {"n_generation": 2},
        "rewards": [{"fn": {"name": "jpeg"}}],
    }
    run = make_run(tmp_path, recipe)
    for needed in (partial(requests.policy, run), lambda: run.prepared.embed):
        make(needed(), tmp_path)
    rollout, weights = requests.rollout(run, 0), base / "transformer" / WEIGHTS
    others = psutil.Process().children()
    server = WarmServer(LaunchConfig(mode="warm"))
    (process,) = [child for child in psutil.Process().children() if child not in others]
    num_threads = process.num_threads()

    def made(name: str) -> dict[str, str]:
        request = rollout.model_copy(update={"slot": str(tmp_path / name)})
        run_in(server, request, tmp_path / f"folder of {name}")
        _, manifest = current_of(request.slot)
        assert manifest is not None
        return {path: entry.sha256 for path, entry in manifest.files.items()}

    try:
        first = made("first")
        # The answer comes when the server has loaded what the first fork did.
        server.start("index", tmp_path / "none.json", tmp_path / "log.txt")
        assert process.num_threads() == num_threads
        # Other weights under the same size and time: whoever reads them makes other samples.
        before, stat = weights.read_bytes(), weights.stat()
        weights.write_bytes(before[: len(before) // 2] + bytes(len(before) - len(before) // 2))
        os.utime(weights, ns=(stat.st_atime_ns, stat.st_mtime_ns))
        assert made("second") == first
        os.utime(weights)
        assert made("third") != first
        weights.write_bytes(before)
        assert made("fourth") == first
    finally:
        server.close()


def test_the_exit_code_of_a_fork_tells_the_kind_if_its_log_cannot_be_written(tmp_path: Path) -> None:
    """`/dev/full` is a device without room."""
    (tmp_path / "request.json").write_text("{}", encoding="utf-8")
    server = WarmServer(LaunchConfig(mode="warm"))
    try:
        process = server.start("index", tmp_path / "request.json", Path("/dev/full"))
        assert eventually(lambda: process.poll() is not None, PATIENCE_S)
        assert process.poll() == ConfigError().exit_code
    finally:
        server.close()
