"""Measure the true shapes and write what came out into ``results/``: ``make bench``, or with ``--tiny`` on a CPU."""

import argparse
import gc
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from cosmos_rl_core.errors import ConfigError
from cosmos_rl_core.parallel.distributed import Group
from cosmos_rl_core.parallel.precision import ParamDtype
from stages.execution import torch_runtime
from stages.execution.execution import Execution
from tests.benchmarks import flops, models, record
from tests.benchmarks.models import Shape
from tests.benchmarks.work import Bench

WARM_UPS = 2
DTYPE: ParamDtype = "bfloat16"
"""What transformers compute with, from float32 weights."""


def main(argv: list[str]) -> int:
    """Measure and write; returns the exit code."""
    settings = _parser().parse_args(argv)
    if not settings.tiny and not torch.cuda.is_available():
        print(
            f"the true shapes need a CUDA device, and torch {torch.__version__} finds none; nothing was measured. "
            "`python -m tests.benchmarks --tiny` runs the same code on tiny shapes",
            file=sys.stderr,
        )
        return 1
    group = torch_runtime.start(Execution(deterministic=not settings.nondeterministic))
    try:
        found = measure(group, settings)
    except ConfigError as error:
        print(f"nothing was written: {error}", file=sys.stderr)
        return 1
    what = "tiny shapes" if settings.tiny else "true shapes"
    print(f"wrote {record.write(settings.output, what, found)}")
    return 0


def measure(group: Group, settings: argparse.Namespace) -> dict[str, Any]:
    """All asked shapes, as they are and with ``--compile`` also compiled, as plain JSON data."""
    rows: list[dict[str, Any]] = []
    for name in settings.shapes:
        shape = Shape.read(name, tiny=settings.tiny)
        forward = flops.forward_flops(shape)
        for compiled in (False, True) if settings.compile else (False,):
            rows += _measure(shape, group, forward, settings.repeats, compiled=compiled)
            _free(group.device)
    return {
        "flops": " ".join((flops.__doc__ or "").split()),
        "settings": {"repeats": settings.repeats, "warm_ups": WARM_UPS, "shapes": settings.shapes},
        "measured": rows,
    }


def _measure(shape: Shape, group: Group, forward: int, repeats: int, *, compiled: bool) -> list[dict[str, Any]]:
    """A row a kind of work."""
    bench = Bench(shape, group, DTYPE, compiled=compiled)
    peak = flops.peak_flops(record.device_name(), DTYPE)
    rows = []
    for name, work in bench.work.items():
        with flops.counted(bench.model.transformer) as passes:
            work()
        seconds, peak_bytes = _timed(work, group.device, repeats)
        total = forward * passes.in_forwards
        row = {
            "shape": shape.name,
            "work": name,
            "param_dtype": DTYPE,
            "compiled": compiled,
            "size": shape.size,
            "frames": shape.frames,
            "batch": shape.batch,
            "seconds": seconds,
            "samples_per_s": shape.batch / seconds,
            "images_per_s": shape.batch * shape.frames / seconds,
            "peak_bytes": peak_bytes,
            "flops": total,
            "mfu": None if peak is None else total / seconds / peak,
        }
        print(json.dumps(row), flush=True)
        rows.append(row)
    return rows


def _free(device: torch.device) -> None:
    """Forget the last model: the next one needs the memory."""
    gc.collect()
    torch.compiler.reset()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def _timed(work: Callable[[], object], device: torch.device, repeats: int) -> tuple[float, int | None]:
    """Median seconds, and the most memory of the device; None for a CPU."""
    cuda = device.type == "cuda"
    for _ in range(WARM_UPS - 1):
        work()
    if cuda:
        torch.cuda.reset_peak_memory_stats(device)
    seconds = []
    for _ in range(repeats):
        _finish(device)
        started_s = time.perf_counter()
        work()
        _finish(device)
        seconds.append(time.perf_counter() - started_s)
    return statistics.median(seconds), torch.cuda.max_memory_allocated(device) if cuda else None


def _finish(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks", description=__doc__)
    known = models.known()
    parser.add_argument("shapes", nargs="*", default=known, help=f"of {', '.join(known)} (default: all)")
    parser.add_argument("--tiny", action="store_true", help="tiny shapes, to see that it works")
    parser.add_argument("--compile", action="store_true", help="also with compiled blocks, which takes minutes")
    parser.add_argument("--repeats", type=int, default=3, help="of each kind of work; the median counts")
    parser.add_argument("--nondeterministic", action="store_true", help="also kernels whose bits differ")
    parser.add_argument("--output", type=Path, default=record.FOLDER, help="where the JSON goes")
    return parser


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
