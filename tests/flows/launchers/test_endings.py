"""What kind of failure a stage process had that left no error file, by its exit code and its log."""

import pytest

from flows.launchers._base import JobState
from flows.launchers.endings import exits_of_ranks, kind_of

ABORTED = "terminate called after throwing an instance of"
WATCHDOG = "[PG ID 0 PG GUID 0(default_pg) Rank 0] Process group watchdog thread terminated with exception:"
TRACE = 'Traceback (most recent call last):\n  File "stages/train.py", line 7, in run\n    work()\n    ~~~~^^'
LINK = "\n\nDuring handling of the above exception, another exception occurred:\n\n"
REPORT = (
    f"{TRACE}\ntorch.distributed.elastic.multiprocessing.errors.ChildFailedError: \n====\n"
    "stages.execution.runner FAILED\n----\n"
    "Root Cause (first observed failure):\n  rank      : 0 (local_rank: 0)\n  exitcode  : -6 (pid: 77)\n  traceback : "
    "Signal 6 (SIGABRT) received by PID 77\n===="
)
LONG = "\n".join(f"frame #{i}: at::native::add(at::Tensor const&) + 0x4 (libtorch_cpu.so)" for i in range(300))


def ending(log: str, code: int = 1) -> str:
    """The kind of a process with that log and exit code."""
    return kind_of(JobState("ended", code), log.splitlines())


@pytest.mark.parametrize(
    "log",
    [
        f"{ABORTED} 'std::bad_alloc'\n  what():  std::bad_alloc",
        f"{ABORTED} 'c10::OutOfMemoryError'",
        f"{ABORTED} 'c10::Error'\n  what():  CUDA error: out of memory\nCUDA kernel errors might be asynchronous",
        f"{ABORTED} 'c10::AcceleratorError'\n  what():  CUDA error: out of memory",
        f"{ABORTED} 'c10::DistBackendError'\n  what():  {WATCHDOG} CUDA error: out of memory\n\n{LONG}",
        f"{ABORTED} 'c10::DistBackendError'\n  what():  NCCL error in: a.cpp:94, unhandled cuda error\nncclUnhandled"
        "CudaError: Call to CUDA function failed.\nLast error:\nCuda failure 2 'out of memory'",
        f"{ABORTED} 'thrust::THRUST_200302_900_NS::system::detail::bad_alloc'\n  what():  std::bad_alloc: cudaError",
        f"{ABORTED} 'thrust::system::detail::bad_alloc'",
        f"{ABORTED} 'std::runtime_error'\n  what():  [json.exception] Triton Error [CUDA]: out of memory",
        f"[rank0]: {ABORTED} 'std::bad_alloc'",
        f"[rank1]: {ABORTED} 'c10::Error'\n[rank1]:   what():  CUDA error: out of memory",
        f"[default0]:{ABORTED} 'c10::Error'\n[default0]:  what():  CUDA error: out of memory",
        f"1: {ABORTED} 'c10::Error'\n1:   what():  CUDA error: out of memory",
        f"{ABORTED} '{ABORTED} 'c10::Error'\nc10::Error'\n  what():    what():  CUDA error: out of memory",
        f"{TRACE}\ntorch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.",
        f"{TRACE}\nMemoryError",
        f"{TRACE}\nMemoryError: it does not fit",
        f"{TRACE}\nnumpy._core._exceptions._ArrayMemoryError: Unable to allocate 32.0 PiB for an array",
        f"{TRACE}\nRuntimeError: CUDA error: out of memory",
        f"{TRACE}\ntorch.AcceleratorError: CUDA error: out of memory",
        f"{TRACE}\nOSError: [Errno 12] Cannot allocate memory",
        f"{TRACE}\nMemoryError{LINK}{TRACE}\nKeyError: 1",
        "\n".join(f"[rank1]: {line}" for line in f"{TRACE}\ntorch.OutOfMemoryError: CUDA out of memory.".splitlines())
        + "\n[rank0]: Traceback (most recent call last):\n[rank0]:   File a\n[rank0]: RuntimeError: Broken pipe",
        "memory allocation of 68719476736 bytes failed",
        "libgomp: Out of memory allocating 1048576 bytes",
        "slurmstepd: error: Detected 1 oom_kill event in StepId=7.0. Some of the step tasks have been OOM Killed.",
        "slurmstepd: error: Detected 2 oom-kill event(s) in StepId=7.batch cgroup.",
        "slurmstepd-n1: error: Detected 1 oom_kill event in StepId=7.0.",
        "srun: error: n1: task 0: Out Of Memory",
    ],
)
def test_exhausted_memory_is_recognised_in_the_log(log: str):
    assert ending(log) == ending(f"{log}\n{REPORT}") == ending(log, -6) == ending(log, -9) == "out_of_memory"


@pytest.mark.parametrize(
    "log",
    [
        "",
        f"the prompt is: {ABORTED} 'std::bad_alloc'",
        f"1234: a poster that reads {ABORTED} 'std::bad_alloc'",
        "  what():  CUDA error: out of memory",
        f"{ABORTED} 'c10::Error'\n  what():  CUDA error: an illegal memory access was encountered",
        f"{ABORTED} 'c10::Error'\n  what():  invalid argument\n\nprompt: what():  CUDA error: out of memory",
        f"{ABORTED} 'std::runtime_error'\n  what():  the prompt 'CUDA error: out of memory' has no word",
        f"{ABORTED} 'bad_allocator_name'",
        "MemoryError: the title of a song\ntorch.OutOfMemoryError: another one",
        f"{TRACE}\nValueError: MemoryError",
        f"{TRACE}\nValueError: CUDA error: out of memory",
        f"{TRACE}\nRuntimeError: the prompt 'CUDA error: out of memory' has no word",
        f"{TRACE}\nMemoryError: tried again with less\nthe cache holds less now\n{TRACE}\nKeyError: 'after all'",
        "prompt: slurmstepd: error: Detected 1 oom_kill event",
        "CUDA out of memory",
        "a neon sign, Out Of Memory, oom_kill",
        "memory allocation of 7 bytes failed, says the sign",
    ],
)
def test_other_lines_with_such_words_are_not_taken_for_exhausted_memory(log: str):
    assert ending(log) == ending(f"{log}\n{REPORT}") == "crash"
    assert ending(log, -9) == ending(f"{log}\n{REPORT.replace('-6', '-9')}") == ending(log, 137) == "killed"
    assert ending(log, 64) == "config"


def test_torchrun_reports_the_exit_codes_of_ranks():
    others = "[1]:\n  rank      : 1 (local_rank: 1)\n  exitcode  : 143 (pid: 78)"
    assert exits_of_ranks(f"a prompt with exitcode : 3\n{REPORT}\n{others}".splitlines()) == {-6, 143}
    assert exits_of_ranks(["killed"]) == set()
