"""Stages that follow one another load weights and models once, where a process or a server stays between them."""

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import psutil
import pytest

from cosmos_rl_core.config.launch import LaunchConfig
from flows.devices import devices, locks
from flows.launchers._processes import WarmServer
from flows.planning import requests
from flows.running.display import Display
from flows.running.wave import Waves
from stages.artifacts.artifact import Artifact
from stages.artifacts.request import Request
from stages.artifacts.slots import input_of
from stages.contracts import Judge
from tests import tiny_scorers
from tests.hand_made import rewards
from tests.run_first import run_first
from tests.stages.conftest import FEW_PROMPTS, make, make_run
from tests.stages.execution.warm.test_warm import run_in
from tests.stages.test_reward import RIGHT, scoring, write_samples

pytestmark = [pytest.mark.processes, pytest.mark.xdist_group("residents")]

JUDGES = ("clip_score", "pickscore")
ITERATIONS = 2
LOADS = "Loading weights:   0%"
"""What transformers writes to the log of a stage when it begins to load a model."""

AUDIT = """
import os, sys
from pathlib import Path

HERE = Path(__file__).parent


def hear(event, arguments):
    # Whoever makes a session reads the settings of the library first.
    if event == "open" and str(arguments[0]).endswith("rapidocr/config.yaml"):
        with (HERE / "sessions").open("a") as file:
            print(os.getpid(), file=file)


sys.addaudithook(hear)
"""


def test_judges_that_take_turns_on_a_device_load_their_weights_once_per_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scorers = [{"name": name, **tiny_scorers.settings(name, tmp_path / name)} for name in JUDGES]
    values: dict[str, Any] = {
        "policy": {
            "model_name_or_path": "package:tiny-sd3",
            "lora": {},
            "diffusers": {"inference_size": [32, 32], "sample": {"num_steps": 2}},
        },
        "train": {"num_iterations": ITERATIONS, "train_policy": {"type": "nft", "dataset": FEW_PROMPTS}},
        "rollout": {"n_generation": 2},
        "rewards": [{"fn": scorer, "weight": 1.0} for scorer in scorers],
    }
    run = make_run(tmp_path / "store", values)
    make(requests.policy(run), tmp_path)
    make(run.prepared.embed, tmp_path)
    monkeypatch.setattr(locks, "LOCKS", tmp_path / "locks")
    monkeypatch.setenv(devices.VISIBLE, "GPU-one")

    def waves_of_run() -> Iterator[list[Request]]:
        for k in range(ITERATIONS):
            yield [requests.rollout(run, k)]
            yield rewards(run, run.slots.iteration(k, "rollout"), k)
            yield [requests.update(run, k)]

    loads: dict[str, list[int]] = {name: [] for name in JUDGES}
    launch = LaunchConfig(mode="warm", device="cpu", resident_gb=1)
    with closing(Waves(run.url, launch, Display())) as waves:
        for wave in waves_of_run():
            waves.make(wave[0].stage, wave)
            for request in wave if wave[0].stage == Judge.name else ():
                (log,) = Path(request.slot, "logs").iterdir()
                loads[request.settings(Judge).reward.name].append(log.read_text(encoding="utf-8").count(LOADS))
        (process,) = waves.processes().stay
        assert process.served == ITERATIONS * (1 + len(JUDGES) + 1)
    assert loads == {name: [1, 0] for name in JUDGES}


def test_the_text_recognition_is_loaded_by_the_first_fork_and_then_by_its_server(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_first(AUDIT, tmp_path, monkeypatch)
    source = write_samples(str(tmp_path / "rollout"), [RIGHT])
    others = psutil.Process().children()
    with closing(WarmServer(LaunchConfig(mode="warm"))) as server:
        (parent,) = [child.pid for child in psutil.Process().children() if child not in others]
        slots = [str(tmp_path / f"reward-{number}") for number in range(3)]
        forks = [run_in(server, scoring(slot, source), Path(f"{slot} at work")) for slot in slots]
    loads = [int(pid) for pid in (tmp_path / "sessions").read_text(encoding="utf-8").split()]
    assert loads == [forks[0], parent]
    assert all(Artifact(input_of(slot)).manifest.summary["ocr"] == 1.0 for slot in slots)
