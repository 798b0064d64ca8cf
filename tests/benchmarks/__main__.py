"""Measure the true shapes and write what came out into ``results/``: ``make bench``, or with ``--tiny`` on a CPU."""

import argparse
import datetime
import gc
import json
import re
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from cosmos_rl_core.distributed import Group
from cosmos_rl_core.numerics import numerics
from cosmos_rl_core.precision import ParamDtype
from stages import torch_runtime
from tests.benchmarks import flops, models
from tests.benchmarks.models import Shape
from tests.benchmarks.work import Bench

RESULTS = Path(__file__).parent / "results"
WARM_UPS = 2
VARIANTS: tuple[tuple[ParamDtype, bool], ...] = (
    ("bfloat16", False),
    ("bfloat16", True),
    ("float32", False),
)
"""What transformers compute with, and whether their blocks are compiled. Each but the first is compared with it."""


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
    group = torch_runtime.start(threads=1, deterministic=not settings.nondeterministic, timeout_s=60.0)
    path = write(measure(group, settings), settings.output)
    print(f"wrote {path}")
    return 0


def measure(group: Group, settings: argparse.Namespace) -> dict[str, Any]:
    """All asked shapes in all variants, as plain JSON data."""
    found = numerics(world_size=1, threads=1, deterministic=not settings.nondeterministic, torch=torch)
    rows: list[dict[str, Any]] = []
    for name in settings.shapes:
        shape = Shape.read(name, tiny=settings.tiny)
        forward = flops.forward_flops(shape)
        # Compiling is no question of the shapes, and slow on a CPU.
        for dtype, compiled in [v for v in VARIANTS if not (settings.tiny and v[1])]:
            rows += _measure_variant(shape, group, dtype, compiled, forward, settings.repeats)
            for row in rows[-3:]:
                print(json.dumps(row), flush=True)
    kind = f"{group.device.type}{', tiny shapes' if settings.tiny else ''}"
    return {
        "date": datetime.datetime.now(tz=datetime.UTC).date().isoformat(),
        "what": kind,
        "device": found["device"],
        "flops": " ".join((flops.__doc__ or "").split()),
        "settings": {"repeats": settings.repeats, "warm_ups": WARM_UPS, "shapes": settings.shapes},
        "numerics": found,
        "measured": rows,
        "ratios": ratios(rows),
    }


def _measure_variant(
    shape: Shape, group: Group, dtype: ParamDtype, compiled: bool, forward: int, repeats: int
) -> list[dict[str, Any]]:
    """A row a kind of work."""
    bench = Bench(shape, group, dtype, compiled=compiled)
    rows = []
    for name, work in bench.work.items():
        with flops.counted(bench.model.transformer) as passes:
            work()
        seconds, peak_bytes = _timed(work, group.device, repeats)
        total = forward * passes.in_forwards
        peak = flops.peak_flops(_device_name(group.device), dtype)
        rows.append(
            {
                "shape": shape.name,
                "work": name,
                "param_dtype": dtype,
                "compiled": compiled,
                "batch": shape.batch,
                "seconds": seconds,
                "samples_per_s": shape.batch / seconds,
                "frames_per_s": shape.batch * shape.frames / seconds,
                "peak_bytes": peak_bytes,
                "flops": total,
                "mfu": None if peak is None else total / seconds / peak,
            }
        )
    del bench
    gc.collect()
    torch.compiler.reset()
    if group.device.type == "cuda":
        torch.cuda.empty_cache()
    return rows


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


def ratios(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """How much faster each variant is than the first one of the same shape and work."""
    dtype, compiled = VARIANTS[0]
    seconds = {(r["shape"], r["work"], r["param_dtype"], r["compiled"]): r["seconds"] for r in rows}
    return [
        {
            "shape": shape,
            "work": work,
            "of": f"{variant}{', compiled' if is_compiled else ''}",
            "to": dtype,
            "speedup": seconds[shape, work, dtype, compiled] / took,
        }
        for (shape, work, variant, is_compiled), took in seconds.items()
        if (variant, is_compiled) != (dtype, compiled)
    ]


def write(result: dict[str, Any], folder: Path) -> Path:
    """``<date>-<what>.json``; a later one of the same day replaces it."""
    name = result["device"] if result["what"] == "cuda" else result["what"]
    path = folder / f"{result['date']}-{re.sub(r'[^a-z0-9]+', '-', name.lower())}.json"
    folder.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    return path


def _device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks", description=__doc__)
    known = models.known()
    parser.add_argument("shapes", nargs="*", default=known, help=f"of {', '.join(known)} (default: all)")
    parser.add_argument("--tiny", action="store_true", help="tiny shapes, to see that it works")
    parser.add_argument("--repeats", type=int, default=5, help="of each kind of work; the median counts")
    parser.add_argument("--nondeterministic", action="store_true", help="also kernels whose bits differ")
    parser.add_argument("--output", type=Path, default=RESULTS, help="where the JSON goes")
    return parser


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
