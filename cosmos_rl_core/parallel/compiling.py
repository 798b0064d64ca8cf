"""Compilation of a transformer's blocks by torch.compile, with the same code in every process of a machine.

Inductor keeps compiled code in a folder, by a digest of graph, shapes, settings and versions. It writes a file under
another name and renames it, so ranks and stages of a machine share one folder: the first that needs code makes it.
"""

import sys

import torch
from torch import nn

from cosmos_rl_core.parallel.sharding import blocks

VERSIONS = 256
"""Largest number of compiled versions of a block; they multiply by kind, gradient, batch size and number of tokens."""
MOST_WORKERS = 8
"""Largest number of processes of a rank that compile."""


def set_up(*, deterministic: bool, num_cpus: int, num_ranks: int) -> None:
    """Set inductor up in this process, before anything is compiled.

    The ``num_ranks`` ranks of a machine divide its CPUs, since all of them compile at the same time. ``deterministic``
    forbids a choice between kernels by their speed, which differs from run to run.
    """
    # Imported here, because it takes long and only some processes compile.
    from torch._inductor import config  # noqa: PLC0415

    config.compile_threads = max(1, min(MOST_WORKERS, num_cpus // num_ranks))
    config.deterministic = deterministic
    config.fx_graph_cache = True


def end_workers() -> None:
    """End the threads and processes of this process that compile. The next compilation starts new ones."""
    if (compilation := sys.modules.get("torch._inductor.async_compile")) is None:
        return
    threads = compilation.AsyncCompile.pool
    if threads.cache_info().currsize:
        threads().shutdown()
        threads.cache_clear()
    compilation.shutdown_compile_workers()


def own_folder() -> str:
    """Return the folder that inductor uses by default."""
    from torch._inductor.runtime.cache_dir_utils import default_cache_dir  # noqa: PLC0415

    return default_cache_dir()


def compile_blocks(transformer: nn.Module, backend: str = "inductor") -> None:
    """Compile the repeated blocks one by one; equal blocks share the code of the first.

    Each shape has code of its own. Code for all shapes would depend on the shapes that came before, so that a retry,
    which makes only the missing samples, would round differently. A block that needs more than :data:`VERSIONS`
    versions raises; by default PyTorch would run it uncompiled from then on.
    """
    limits = torch._dynamo.config
    limits.recompile_limit = VERSIONS
    limits.accumulated_recompile_limit = max(limits.accumulated_recompile_limit, 8 * VERSIONS)
    limits.fail_on_recompile_limit_hit = True
    for block in blocks(transformer):
        block.compile(backend=backend, dynamic=False)
