"""A test of the ranks' connection and its speed: ``python -m torch.distributed.run ... -m stages.execution.ring``."""

import json
import time

import torch
import torch.distributed as dist

MIB = 64
ROUNDS = 5


def main() -> None:
    """Sum a tensor over all ranks, check the sum, and print one line of JSON on rank 0.

    ``gb_per_s`` is the data that each rank sends per second: 2 (n - 1) / n times the tensor, as in a ring.
    """
    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    # NCCL refuses two ranks on one GPU.
    backend = "nccl" if torch.cuda.device_count() >= size else "gloo"
    device = torch.device("cuda", rank) if backend == "nccl" else torch.device("cpu")
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
        found = {"backend": backend, "device": device.type, "ranks": size}
        print(json.dumps(found | {"gb_per_s": round(gigabytes / min(seconds), 3)}), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
