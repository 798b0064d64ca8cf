"""Ranks without torchrun: forks of one process that has imported everything, for a real gloo group.

One such server for each pytest process, started by its first ranks; it ends with pytest, and its ranks with it.
Ranks with a GPU each start anew instead: a process that has looked for one cannot be forked.
"""

import multiprocessing
import os
import sys
import time
from collections.abc import Callable
from functools import partial
from multiprocessing import connection
from multiprocessing.process import BaseProcess
from pathlib import Path

import torch.distributed as dist

from cosmos_rl_core.processes import PARENT
from stages.execution import runner
from stages.execution.warm.fork_server import LIGHT, TORCH

GRACE_S = 2.0
"""What the other ranks have for their last words once one has failed."""
LAST_WORDS = 4000
"""Characters of each rank in an error."""

FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload(
    # Of plugins, which stages load by name, those that most ranks need.
    [
        *LIGHT,
        *TORCH,
        "tests.stages.ranks",
        "cosmos_rl_core.models.cosmos_predict2_5.model",
        "cosmos_rl_core.models.wan.model",
    ]
)
STARTS = multiprocessing.get_context("spawn")


class RanksFailed(RuntimeError):  # noqa: N818
    """Not every rank exited with 0; the message has what each of them said last."""


def run_on_ranks(
    argv: list[str],
    folder: Path,
    ranks: int,
    timeout_s: float,
    before: Callable[[], None] | None = None,
    *,
    gpus: bool = False,
) -> None:
    """Run a stage with these arguments on every rank, as :func:`start_ranks` does. ``before`` runs first."""
    start_ranks(partial(_run_stage, argv, before), folder, ranks, timeout_s, gpus=gpus)


def _run_stage(argv: list[str], before: Callable[[], None] | None) -> int:
    if before is not None:
        before()
    return runner.main(argv)


def start_ranks(
    work: Callable[[], int | None], folder: Path, ranks: int, timeout_s: float, *, gpus: bool = False
) -> None:
    """``work`` on every rank, each logging into ``folder``; it can be pickled, and returns an exit code if not 0.

    On the CPU, or with ``gpus`` each on its own. Raises :class:`RanksFailed`.
    """
    # Open before any rank is, as torchrun's agent has it: a free port that rank 0 is told to open may be taken by then.
    rendezvous = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    environment = os.environ | {
        "WORLD_SIZE": str(ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(rendezvous.port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "GLOO_SOCKET_IFNAME": "lo",
        **({} if gpus else {"CUDA_VISIBLE_DEVICES": ""}),
    }
    context = STARTS if gpus else FORKS
    logs = [folder / f"rank-{rank}.txt" for rank in range(ranks)]
    processes: list[BaseProcess] = []
    try:
        for rank, log in enumerate(logs):
            log.write_bytes(b"")
            own = {"RANK": str(rank), "LOCAL_RANK": str(rank)}
            processes.append(context.Process(target=_be_rank, args=(work, environment | own, log)))
            processes[-1].start()
        codes = _exit_codes(processes, timeout_s)
    finally:
        for process in processes:
            process.kill()
            process.join()
    if any(code != 0 for code in codes):
        ends = [f"exit code {code}" if code is not None else "killed while it ran" for code in codes]
        said = [log.read_text(encoding="utf-8", errors="replace")[-LAST_WORDS:] for log in logs]
        raise RanksFailed("\n".join(f"rank {n}, {ends[n]}:\n{said[n]}" for n in range(ranks)))


def _be_rank(work: Callable[[], int | None], environment: dict[str, str], log: Path) -> None:
    os.environ.clear()
    # Its parent is the server, which ends with pytest.
    os.environ.update(environment | {PARENT: str(os.getppid())})
    words = os.open(log, os.O_WRONLY | os.O_APPEND)
    for stream in (1, 2):
        os.dup2(words, stream)
    sys.exit(work())


def _exit_codes(processes: list[BaseProcess], timeout_s: float) -> list[int | None]:
    """How they ended; None where one had not when the time was over, which is soon after another has failed."""
    deadline_s = time.monotonic() + timeout_s
    while running := [process.sentinel for process in processes if process.exitcode is None]:
        left_s = deadline_s - time.monotonic()
        if left_s <= 0:
            break
        connection.wait(running, left_s)
        if any(process.exitcode for process in processes):
            deadline_s = min(deadline_s, time.monotonic() + GRACE_S)
    return [process.exitcode for process in processes]
