"""Every stage with torch on tiny models: a new process, and processes that served others, leave the same bytes."""

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from functools import partial
from pathlib import Path

from cosmos_rl_core.config.launch import LaunchConfig
from cosmos_rl_core.config.parallelism import Device
from flows.planning import requests
from flows.running.display import Display
from flows.running.wave import Waves
from stages.artifacts.request import Request
from stages.artifacts.slots import current_of
from stages.execution.execution import Execution
from tests.gpu.task import Rows, Task
from tests.hand_made import rewards
from tests.stages import every_stage
from tests.stages.conftest import make, make_run

AT_ONCE = 6
"""New processes at once, whose start is most of their time."""
TURNS = 2
"""How often the processes that stay make every stage: the second time after all others."""
JPEG = {"name": "jpeg"}
"""A reward of the lane, whose image may have no text recognition."""


def rows(task: Task) -> Rows:
    """Yield a row a stage, and why processes that should stay have ended."""
    device: Device = "cpu" if task.tiny else "cuda"
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name, "made")
        folder.mkdir()
        made = _few_stages(folder) if task.tiny else _stages(folder)
        with ThreadPoolExecutor(1 if task.tiny else AT_ONCE) as threads:
            cold = dict(zip(made, threads.map(partial(_cold, folder, device), made.values()), strict=True))
        settings = {"mode": "warm", "device": device, "resident_gb": 1, "max_attempts": 1}
        warm: dict[str, list[tuple[str, float]]] = {}
        with closing(Waves(str(folder), LaunchConfig.model_validate(settings), Display())) as waves:
            for turn in range(TURNS):
                for stage, request in made.items():
                    again = _aside(request, f"warm-{turn}")
                    warm.setdefault(stage, []).append(_made(again, partial(waves.make, stage, [again])))
            stayed = waves.processes()
    for stage, (content, seconds) in cold.items():
        contents = [found for found, _ in warm[stage]]
        yield {
            "what": "bits",
            "stage": stage,
            "warm_is_cold": contents == [content] * TURNS,
            "cold_s": seconds,
            "warm_s": [warm_s for _, warm_s in warm[stage]],
        }
    yield {"what": "processes", "stay": len(stayed.stay), "served": [one.served for one in stayed.stay]}
    yield {"what": "ended", "why": [*stayed.ended]}
    if differing := [stage for stage in made if any(found != cold[stage][0] for found, _ in warm[stage])]:
        raise RuntimeError(f"warm processes left other bytes than new ones: {', '.join(differing)}")


def _stages(folder: Path) -> dict[str, Request]:
    """Make all stages once in this process, and return the Requests of those with torch."""
    (folder / "vlm").mkdir()
    made = every_stage.stages_of_diffusion(folder, JPEG) | every_stage.stages_of_vlms(folder / "vlm")
    return {stage: request for stage, request in made.items() if request.config.torch}


def _few_stages(folder: Path) -> dict[str, Request]:
    """Make rollout and update, with all that comes before them."""
    nft = {"type": "nft", "batch_size_per_optimize": 4, "timesteps_fraction": 0.5, "dataset": {"name": "ocr"}}
    run = make_run(folder, every_stage.recipe(nft, JPEG, lora={"r": 2, "target_modules": ["to_q", "to_v"]}))
    for before in (requests.policy(run), run.prepared.embed):
        make(before, folder)
    made = {"rollout": requests.rollout(run, 0)}
    make(made["rollout"], folder)
    make(rewards(run, run.slots.iteration(0, "rollout"), 0)[0], folder)
    return made | {"update": requests.update(run, 0)}


def _aside(request: Request, name: str) -> Request:
    # In another folder: texts and media that were prepared before lie next to the slot, and would not be made again.
    folder, _, own = request.slot.rpartition("/")
    return request.model_copy(update={"slot": f"{folder}-{name}/{own}"})


def _made(request: Request, make_it: Callable[[], object]) -> tuple[str, float]:
    """Return the digest of what a Request's stage left, and the seconds that it took."""
    began_s = time.perf_counter()
    make_it()
    manifest = current_of(request.slot)[1]
    assert manifest is not None
    return manifest.content, round(time.perf_counter() - began_s, 3)


def _cold(folder: Path, device: Device, request: Request) -> tuple[str, float]:
    again = _aside(request, "cold")
    place = folder / "cold" / request.stage
    place.mkdir(parents=True)
    path = place / "request.json"
    path.write_text(again.model_dump_json(), encoding="utf-8")
    Execution(device=device).write(path)
    words = [sys.executable, "-m", "stages.execution.runner", str(path)]
    return _made(again, partial(subprocess.run, words, env=dict(os.environ), check=True))
