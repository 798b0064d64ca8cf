"""Code that inductor compiled, which later processes of a machine take from a folder instead of compiling it again."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
from torch._inductor import config

from cosmos_rl_core.parallel import compiling

BLOCKS = """
import json, torch
from torch import nn
from cosmos_rl_core.config.parallelism import Parallelism
from stages.execution import torch_runtime
from stages.execution.execution import Execution
from cosmos_rl_core.parallel import compiling

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(8, 8)
    def forward(self, x):
        return x + nn.functional.gelu(self.inner(x)).softmax(-1)

class Blocks(nn.Module):
    _no_split_modules = ("Block",)
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([Block(), Block()])
    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x

def computed(batches):
    torch.manual_seed(0)
    blocks = Blocks()
    compiling.compile_blocks(blocks)
    found = []
    for batch in batches:
        x = torch.linspace(-1, 1, batch * 8).view(batch, 8).requires_grad_()
        y = blocks(x)
        y.square().sum().backward()
        found += [y.tolist(), x.grad.tolist()]
    return found

execution = Execution(parallelism=Parallelism(compile=True))
"""
PROGRAM = f"""{BLOCKS}
torch_runtime.start(execution)
found = computed((2, 3))
counters = torch._dynamo.utils.counters
told = {{
    "bits": found,
    "graphs": counters["stats"]["unique_graphs"],
    "hits": counters["aot_autograd"]["autograd_cache_hit"],
    "misses": counters["aot_autograd"]["autograd_cache_miss"],
    "workers": torch._inductor.config.compile_threads,
    "deterministic": torch._inductor.config.deterministic,
}}
print(json.dumps(told))
"""
STAYS = f"""{BLOCKS}
from stages.execution.warm.leftovers import Leftovers

torch_runtime.set_up(execution)
leftovers, told = Leftovers(lambda: torch_runtime.set_up(execution)), []
for batches in ((2, 3), (3, 2), (2, 3)):
    torch_runtime.start(execution)
    told.append([computed(batches), leftovers.found()])
print(json.dumps(told))
"""
"""Three stages in one process, as one that stays serves them."""


POOL = """
import json, os, sys, psutil
from cosmos_rl_core.parallel import compiling
compiling.set_up(deterministic=True, num_cpus=int(sys.argv[1]), num_ranks=int(sys.argv[2]))
from torch._inductor.async_compile import AsyncCompile
pool = AsyncCompile.process_pool()
told = {pool.submit(os.getpid).result() for _ in range(20)}
print(json.dumps([*told, *(child.pid for child in psutil.Process().children(recursive=True))]), flush=True)
if sys.argv[3] == "killed":
    os.kill(os.getpid(), 9)
"""


def ran(program: str, *words: str, status: int = 0, environment: dict[str, str] | None = None) -> Any:
    """What a program tells."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("TORCHINDUCTOR")}
    own = inherited | {"PYTHONPATH": os.getcwd()} | (environment or {})
    words = (sys.executable, "-c", program, *words)
    ended = subprocess.run(words, env=own, capture_output=True, text=True, check=False)
    assert ended.returncode == status, ended.stderr
    return json.loads(ended.stdout.splitlines()[-1])


@pytest.mark.slow
def test_new_and_resident_processes_take_the_code_of_the_first_and_compute_its_bits(tmp_path: Path):
    place = {"XDG_CACHE_HOME": str(tmp_path)}
    first, again = ran(PROGRAM, environment=place), ran(PROGRAM, environment=place)
    assert list((tmp_path / "cosmos-rl-flows" / "compiled").iterdir())
    without = ran(PROGRAM, environment=place | {"TORCHINDUCTOR_FORCE_DISABLE_CACHES": "1"})
    # A graph for each shape, which both blocks share.
    assert first["graphs"] == again["graphs"] == without["graphs"] == 2
    assert (first["hits"], first["misses"]) == (0, 2)
    assert (again["hits"], again["misses"]) == (2, 0)
    assert without["hits"] == 0
    assert first["bits"] == again["bits"] == without["bits"]
    assert first["deterministic"]
    # It compiles anew, by processes and threads of its own.
    stays = ran(STAYS, environment={"XDG_CACHE_HOME": str(tmp_path / "stays")})
    assert [left for _, left in stays] == [[], [], []]
    by_batch = [first["bits"][:2], first["bits"][2:]]
    assert [bits for bits, _ in stays] == [first["bits"], by_batch[1] + by_batch[0], first["bits"]]


@pytest.mark.parametrize(("num_cpus", "num_ranks", "expected"), [(2, 1, 2), (192, 8, 8), (192, 64, 3), (2, 8, 1)])
def test_ranks_of_a_machine_share_its_cpus(num_cpus: int, num_ranks: int, expected: int):
    with config.patch(compile_threads=1, deterministic=False):
        compiling.set_up(deterministic=True, num_cpus=num_cpus, num_ranks=num_ranks)
        assert (config.compile_threads, config.deterministic) == (expected, True)


@pytest.mark.processes
@pytest.mark.parametrize(("end", "status"), [("by itself", 0), ("killed", -9)])
def test_no_process_that_compiles_outlives_its_rank(end: str, status: int):
    workers = ran(POOL, "4", "2", end, status=status)
    assert len(set(workers)) > 1
    for _ in range(100):
        if not any(map(psutil.pid_exists, workers)):
            return
        time.sleep(0.1)
    pytest.fail(f"still there: {[pid for pid in workers if psutil.pid_exists(pid)]}")
