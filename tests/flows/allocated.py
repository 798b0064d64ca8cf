"""A stage that works until it is told to go on, wherever a launcher starts it, and a flow that asks for it."""

import secrets
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from cosmos_rl_core.config.launch import LaunchConfig
from flows.running.display import Display
from flows.running.wave import Waves
from stages.artifacts.request import Request
from stages.reporting.contracts import Report
from tests.run_first import run_first

PATIENCE_S = 120.0
"""On a busy machine."""

STAGE = """
import hashlib, os, sys, time, types
from pathlib import Path
from stages.reporting.contracts import Report

HERE = Path(__file__).parent


def run(request, context):
    with (HERE / "ran.txt").open("a") as file:
        where = [os.environ.get("SLURM_JOB_ID", "-"), os.environ.get("SLURM_JOB_PARTITION", "-")]
        print(request.slot.rpartition("/")[2], *where, os.getpid(), file=file)
    print("at work", flush=True)
    context.outcome.note("at work")
    while not (HERE / "go").exists():
        time.sleep(0.05)
    if (HERE / "bug").exists():
        raise TypeError((HERE / "bug").read_text())
    if (HERE / "fail").exists():
        raise MemoryError("it does not fit")
    context.attempt.put_json("done.json", os.environ.get("ASKED_FOR"))
    context.attempt.put_json(
        "environment.json",
        {name: hashlib.sha256(value.encode()).hexdigest() for name, value in os.environ.items()},
    )


stage = types.ModuleType("stage")
stage.run = run
sys.modules["stages.report"] = stage
"""


def plant(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """Secrets that a flow has in its environment, of every kind that stages need; each one's value is its own."""
    names = ("AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN", "PROD_S3_CHECKPOINT_SECRET_ACCESS_KEY")
    planted = {name: secrets.token_hex(12) for name in (*names, "REMOTE_REWARD_TOKEN", "WANDB_API_KEY", "HF_TOKEN")}
    for name, value in planted.items():
        monkeypatch.setenv(name, value)
    return planted


class Work:
    """A folder with such stages."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch, run_url: str | None = None) -> None:
        self.folder = folder
        self.run_url = run_url or str(folder / "run")
        run_first(STAGE, folder, monkeypatch)

    def request(self, name: str) -> Request:
        """A stage that starts within a second, because it imports nothing."""
        return Request(stage="report", slot=f"{self.run_url}/{name}", seed=0, config=Report(title="", reward=""))

    def launcher(self, config: LaunchConfig) -> Waves:
        """What a flow has."""
        return Waves(self.run_url, config, Display())

    def go(self) -> None:
        """Let the stages come to their end."""
        (self.folder / "go").touch()

    def ran(self) -> list[list[str]]:
        """Return name, Slurm job, partition and process of each stage that began."""
        path = self.folder / "ran.txt"
        return [line.split() for line in path.read_text(encoding="utf-8").splitlines()] if path.exists() else []

    def wait_until_ran(self, count: int) -> list[list[str]]:
        """Wait until so many stages began."""
        wait_until(lambda: len(self.ran()) >= count)
        return self.ran()


def wait_until(happened: Callable[[], object]) -> None:
    """Fail if it takes too long."""
    deadline_s = time.monotonic() + PATIENCE_S
    while not happened():
        assert time.monotonic() < deadline_s
        time.sleep(0.05)


def main(run_url: str, config: str, *requests: str) -> None:
    """A flow with one wave."""
    launcher = Waves(run_url, LaunchConfig.model_validate_json(config), Display())
    try:
        launcher.make("wave", [Request.model_validate_json(request) for request in requests])
    finally:
        launcher.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
