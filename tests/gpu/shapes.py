"""The work of stages on a model of a true shape with random weights: speed, memory next to the plan's, and causes."""

from collections.abc import Callable

import torch

from stages.contracts import MediaShape
from stages.execution import torch_runtime
from stages.execution.execution import Execution
from stages.generating.plans import vae_batches
from tests.benchmarks import flops
from tests.benchmarks.__main__ import DTYPE, measured
from tests.benchmarks.models import Shape
from tests.benchmarks.timing import finish, free, peak_of, seconds_of
from tests.benchmarks.work import Bench
from tests.gpu.causes import causes
from tests.gpu.counts import shape_of
from tests.gpu.task import Row, Rows, Task

REPEATS = 3


def rows(task: Task) -> Rows:
    """Yield a row for sampling and for each kind of optimizer step, then for the VAE, then the causes of each."""
    shape, compiled = shape_of(task), "compiled" in task.options
    if compiled and task.tiny:
        yield {"what": "work", "left out": "to compile takes a minute, however small the shape"}
        return
    group = torch_runtime.start(Execution(device="cpu" if task.tiny else "cuda"))
    repeats = 1 if task.tiny else REPEATS
    forward = task.fact(f"counts {shape.name}", what="forward").get("flops") or flops.forward_flops(shape)
    yield from _work_rows(task, Bench(shape, group, DTYPE, compiled=compiled), forward, repeats)
    free(group.device)
    if not compiled:
        yield from _vae_rows(task, shape, group.device, repeats)
        free(group.device)


def _work_rows(task: Task, bench: Bench, forward: int, repeats: int) -> Rows:
    for row in measured(bench, forward, repeats):
        planned = task.fact(f"counts {bench.shape.name}", what="planned memory", work=row["work"])
        yield {"what": "work", **row, **besides_peaks(task, row), "planned_bytes": planned.get("bytes")}
    for name, work in bench.work.items():
        yield {"what": "causes", "work": name, "compiled": bench.compiled, **causes(work, bench.group.device)}


def besides_peaks(task: Task, row: Row) -> Row:
    """Return the share of the device's measured matrix product that a row's useful arithmetic is."""
    best = task.fact("machine", what="matrix product", dtype=DTYPE).get("flops_per_s")
    return {"of_measured_product": None if best is None else row["flops"] / row["seconds"] / best}


def _vae_rows(task: Task, shape: Shape, device: torch.device, repeats: int) -> Rows:
    """Yield what decoding and encoding take, in batches of the stages, and whether their bits are the same again."""
    model = shape.empty_model(device)
    model.pipeline.vae = vae = shape.vae(device)
    media = MediaShape(size=shape.size, frames=shape.frames)
    count = len(range(shape.batch)[next(iter(vae_batches(shape.batch, media)))])
    generator = torch.Generator(device).manual_seed(0)
    latents = torch.randn(count, *model.latent_shape(shape.size, shape.frames), generator=generator, device=device)
    pixels = torch.randint(0, 256, (count, shape.frames, *shape.size, 3), generator=generator, device=device)
    pixels = pixels.to(torch.uint8)
    calls: dict[str, Callable[[], torch.Tensor]] = {
        "decode": lambda: model.decode(latents),
        "encode": lambda: model.encode_media(pixels),
    }
    held = sum(tensor.nbytes for tensor in vae.parameters())
    for name, work in calls.items():
        with torch.no_grad():
            first, again = work(), work()
            finish(device)
            seconds = seconds_of(work, device, repeats, 0)
            yield {
                "what": "vae",
                "shape": shape.name,
                "work": name,
                "batch": count,
                "seconds": seconds,
                "samples_per_s": count / seconds,
                "peak_bytes": peak_of(work, device),
                "weights_bytes": held,
                "same_bits_again": torch.equal(first, again),
            }
            yield {"what": "causes", "work": name, **causes(work, device)}
