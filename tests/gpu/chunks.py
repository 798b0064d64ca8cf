"""The tests of the fixture ``device`` in chunks, each a call of pytest."""

import importlib.util
import json
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.gpu.task import Rows, Task

ROOT = Path(__file__).parents[2]
CHUNKS: dict[str, tuple[str, ...]] = {
    "stages": (
        "stages/execution/test_first_device.py",
        "stages/execution/warm/test_leftovers.py",
        "stages/training/test_transitions.py",
        "stages/training/test_sharded_training.py",
        "stages/training/test_every_model.py",
    ),
    "parts": (
        "core/parallel/test_kept.py",
        "core/weights/test_half_weights.py",
        "core/weights/test_policy_weights.py",
        "core/sampling/test_kernels.py",
        "core/parallel/test_precision.py",
        "core/models/test_page_model.py",
        "core/pipelines/test_memory.py",
        "core/weights/test_lora_options.py",
        "core/footprint/test_footprint.py",
    ),
    "models": (
        "core/models/test_every_model_conforms.py",
        "core/models/test_conformance_clips.py",
        "core/models/test_conformance_references.py",
        "core/models/test_wan.py",
        "core/models/test_z_image.py",
        "core/pipelines/test_buckets.py",
    ),
    "training": ("core/models/test_every_model_trains.py", "core/models/test_references_training.py"),
    "compiled": ("core/parallel/test_compiled.py",),
}
"""Files below ``tests``, by chunk: first what only a device can show."""
ALONE = ("stages",)
"""Chunks whose tests fill the device, or share it with processes that they start."""
WORKERS = 4
TINY = ("core/sampling/test_kernels.py",)


def rows(task: Task) -> Rows:
    """Yield how the tests of a chunk ended, and what they measured."""
    (chunk,) = task.options
    if task.tiny and chunk not in ALONE:
        yield {"what": "tests", "left out": "of all chunks one is run on tiny shapes"}
        return
    files = [f"tests/{name}" for name in (TINY if task.tiny else CHUNKS[chunk])]
    spread = not task.tiny and chunk not in ALONE and importlib.util.find_spec("xdist") is not None
    with tempfile.TemporaryDirectory() as folder:
        words = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *files, "--results", folder]
        words += ["--device", "cpu" if task.tiny else "cuda", *(["-n", str(WORKERS)] if spread else [])]
        ended = subprocess.run(words, cwd=ROOT, check=False)
        (path,) = Path(folder).iterdir()
        found = json.loads(path.read_text(encoding="utf-8"))
    kept = ("outcomes", "seconds", "not_passed", "measured")
    yield {"what": "tests", "exit code": ended.returncode, **{name: found[name] for name in kept}}
    if ended.returncode:
        raise RuntimeError(f"tests failed: {', '.join(found['not_passed'])}")
