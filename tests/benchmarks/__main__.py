"""Measure the true shapes and write what came out into ``results/``: ``make bench``, or with ``--tiny`` on a CPU."""

import argparse
import json
import sys
from collections.abc import Iterator
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
from tests.benchmarks.timing import WARM_UPS, free, peak_of, seconds_of
from tests.benchmarks.work import Bench

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
            rows += measured(Bench(shape, group, DTYPE, compiled=compiled), forward, settings.repeats)
            free(group.device)
    return {
        "flops": " ".join((flops.__doc__ or "").split()),
        "settings": {"repeats": settings.repeats, "warm_ups": WARM_UPS, "shapes": settings.shapes},
        "measured": rows,
    }


def measured(bench: Bench, forward: int, repeats: int) -> Iterator[dict[str, Any]]:
    """A row a kind of work, of a model whose forward pass of one sample takes ``forward`` operations."""
    shape, device = bench.shape, bench.group.device
    peak = flops.peak_flops(record.device_name(), DTYPE)
    for name, work in bench.work.items():
        with flops.counted(bench.model.transformer) as passes:
            work()
        seconds = seconds_of(work, device, repeats, WARM_UPS - 1)
        total = forward * passes.in_forwards
        row = {
            "shape": shape.name,
            "work": name,
            "param_dtype": DTYPE,
            "compiled": bench.compiled,
            "size": shape.size,
            "frames": shape.frames,
            "batch": shape.batch,
            "num_steps": shape.num_steps,
            "seconds": seconds,
            "samples_per_s": shape.batch / seconds,
            "images_per_s": shape.batch * shape.frames / seconds,
            "peak_bytes": peak_of(work, device),
            "flops": total,
            "mfu": None if peak is None else total / seconds / peak,
        }
        print(json.dumps(row), flush=True)
        yield row


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
