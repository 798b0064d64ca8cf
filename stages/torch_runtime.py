"""Torch, started the same way for every stage, cold or warm: threads, deterministic kernels, the process group."""

import os

import torch
from diffusers.utils import constants

from cosmos_rl_core.distributed import Group
from cosmos_rl_core.parallelism import ALONE, Parallelism

ATTENTION_BACKEND = constants.DIFFUSERS_ATTN_BACKEND
"""What diffusers computes attention with; part of the numerics."""


def start(*, threads: int, deterministic: bool, timeout_s: float, parallelism: Parallelism = ALONE) -> Group:
    """Set this process up and join its group, whose ranks wait at most ``timeout_s`` for one another."""
    torch.set_num_threads(threads)
    if deterministic:
        # cuBLAS reads this when its first handle is made.
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)
    return Group(timeout_s, parallelism)
