"""A stage that fails in a process that stays leaves the error file of a new process, whatever it fails in."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from cosmos_rl_core.outside_plugins import Pin
from stages.artifacts.request import Request
from stages.contracts import Embed, ModelRef
from stages.execution.execution import Execution
from stages.execution.outcome import Failure, read_failures

pytestmark = pytest.mark.processes

PATIENCE_S = 240.0


def request_of(folder: Path) -> Request:
    model = ModelRef(path="none", adapter="none", digest="none")
    config = Embed(model=model, prompts=(), max_prompt_length=1)
    return Request(stage="embed", slot=str(folder / "slot"), seed=0, config=config)


def written(folder: Path, request: Request, execution: Execution | str) -> Path:
    folder.mkdir()
    path = folder / "request.json"
    path.write_text(request.model_dump_json(), encoding="utf-8")
    if isinstance(execution, Execution):
        execution.write(path)
    else:
        Execution.path_for(path).write_text(execution, encoding="utf-8")
    return path


def told(path: Path, code: int) -> tuple[int, Failure]:
    """What a supervisor learns of the end, without the way there."""
    (failure,) = read_failures(path.parent)
    return code, failure.model_copy(update={"traceback": ""})


def in_a_new_process(path: Path) -> tuple[int, Failure]:
    command = [sys.executable, "-m", "stages.execution.runner", str(path)]
    ended = subprocess.run(command, capture_output=True, timeout=PATIENCE_S, check=False)
    return told(path, ended.returncode)


def in_a_process_that_stays(path: Path) -> tuple[int, Failure]:
    """As its first Request."""
    log, meeting = str(path.with_name("log.txt")), str(path.with_name("meeting"))
    order = {"request": str(path), "log": log, "meeting": meeting, "rank": 0, "ranks": 1, "kept_bytes": 0}
    order |= {"here": 1, "host": ""}
    (read, orders), (replies, write) = os.pipe(), os.pipe()
    command = [sys.executable, "-m", "stages.execution.warm.resident", str(read), str(write)]
    with subprocess.Popen(command, pass_fds=(read, write)) as process:
        os.write(orders, json.dumps(order).encode() + b"\n")
        code = process.wait(PATIENCE_S)
    for pipe in (read, orders, replies, write):
        os.close(pipe)
    return told(path, code)


@pytest.mark.parametrize(
    ("execution", "variables", "expected"),
    [
        ("{", {}, ("config", "", False)),
        (Execution(), {"TORCH_LOGS": "no such log"}, ("crash", "ValueError", True)),
        (Execution(threads=2**40), {}, ("crash", "ValueError", True)),
        (Execution(device="cuda"), {"CUDA_VISIBLE_DEVICES": ""}, ("config", "", False)),
    ],
    ids=["settings", "import of torch", "set-up of torch", "device"],
)
def test_a_failure_before_the_stage_is_reported_as_by_a_new_process(
    execution: Execution | str,
    variables: dict[str, str],
    expected: tuple[str, str, bool],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    request = request_of(tmp_path)
    new = in_a_new_process(written(tmp_path / "new", request, execution))
    assert (new[1].kind, new[1].raised, new[1].retryable) == expected
    assert in_a_process_that_stays(written(tmp_path / "stays", request, execution)) == new


def test_a_plugin_that_cannot_be_imported_is_reported_as_by_a_new_process(tmp_path: Path) -> None:
    pin = Pin(kind="rewards", name="gone", path=str(tmp_path / "gone.py"), files={"gone.py": "0" * 64})
    request = request_of(tmp_path).model_copy(update={"plugins": (pin,)})
    new = in_a_new_process(written(tmp_path / "new", request, Execution()))
    assert (new[0], new[1].kind) == (64, "config")
    assert in_a_process_that_stays(written(tmp_path / "stays", request, Execution())) == new
