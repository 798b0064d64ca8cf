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
        "stages/test_first_device.py",
        "stages/test_leftovers.py",
        "stages/test_transitions.py",
        "stages/test_sharding.py",
        "stages/test_every_model.py",
    ),
    "parts": (
        "core/test_kept.py",
        "core/test_frozen_matrices.py",
        "core/test_policy_weights.py",
        "core/test_kernels.py",
        "core/test_precision.py",
        "core/test_page_model.py",
        "core/test_memory.py",
        "core/test_lora_options.py",
        "core/test_footprint.py",
    ),
    "models": (
        "core/test_every_model_conforms.py",
        "core/test_conformance_clips.py",
        "core/test_conformance_references.py",
        "core/test_wan22.py",
        "core/test_z_image.py",
        "core/test_buckets.py",
    ),
    "training": ("core/test_every_model_trains.py", "core/test_references_training.py"),
    "compiled": ("core/test_compiled.py",),
}
"""Files below ``tests``, by chunk: first what only a device can show."""
ALONE = ("stages",)
"""Chunks whose tests fill the device, or share it with processes that they start."""
WORKERS = 4
TINY = ("core/test_kernels.py",)


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
