"""A test of the ranks' devices and connection: ``python -m torch.distributed.run ... -m stages.execution.ring DEVICE``.

``DEVICE`` is ``cuda``, ``cpu``, or ``any``: a GPU each if there are as many, else the CPU.
"""

import json
import sys
import time

import torch
import torch.distributed as dist

from cosmos_rl_core.config.parallelism import Device
from cosmos_rl_core.parallel.devices import settled

MIB = 64
ROUNDS = 5


def main() -> None:
    """Sum a tensor over all ranks, check the sum, and print one line of JSON on rank 0.

    ``gb_per_s`` is the data that each rank sends per second: 2 (n - 1) / n times the tensor, as in a ring. A single
    rank sends none. Raises :class:`ConfigError` if a rank cannot compute where it must.
    """
    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    device = settled(_wanted(sys.argv[1], size), rank)
    backend = "nccl" if device.type == "cuda" else "gloo"
    ring = dist.new_group(backend=backend)
    numbers = torch.empty(MIB * 2**20 // 4, device=device)
    seconds = []
    for _ in range(ROUNDS):
        numbers.fill_(rank + 1)
        dist.barrier()
        began_s = time.monotonic()
        dist.all_reduce(numbers, group=ring)
        # Reading a number synchronizes the device.
        total = float(numbers[0])
        seconds.append(time.monotonic() - began_s)
        if total != size * (size + 1) / 2 or not bool((numbers == total).all()):
            raise RuntimeError(f"{size} ranks summed 1 to {size} to {total}")
    if rank == 0:
        gigabytes = 2 * (size - 1) / size * numbers.nbytes / 1e9
        rate = round(gigabytes / min(seconds), 3) if size > 1 else None
        found = {"backend": backend, "device": device.type, "ranks": size, "gb_per_s": rate}
        print(json.dumps(found), flush=True)
    dist.destroy_process_group()


def _wanted(device: str, size: int) -> Device | None:
    if device == "any":
        # NCCL refuses two ranks on one GPU.
        return "cpu" if torch.cuda.device_count() < size else None
    return "cuda" if device == "cuda" else "cpu"


if __name__ == "__main__":
    main()
