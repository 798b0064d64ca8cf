"""What kind of failure an error is, by the classes and texts that libraries raise."""

import errno
import sqlite3

import numpy as np
import pytest
import torch
import torch.distributed as dist
from safetensors import SafetensorError

from cosmos_rl_core.errors import ArtifactError, ConfigError
from cosmos_rl_core.parallel.distributed import is_collective
from stages.execution.outcome import Failure, failure_of

NCCL = (
    "NCCL error in: /pytorch/torch/csrc/distributed/c10d/NCCLUtils.cpp:94, unhandled cuda error (run with "
    "NCCL_DEBUG=INFO for details), NCCL version 2.28.9\nncclUnhandledCudaError: Call to CUDA function failed.\n"
    "Last error:\n"
)
CPU = (
    "[enforce fail at alloc_cpu.cpp:124] err == 0. DefaultCPUAllocator: can't allocate memory: you tried to allocate "
    "281474976710656 bytes. Error code 12 (Cannot allocate memory)"
)
GLOO = "[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:547] Connection closed by peer [127.0.0.1]:40213"


def judge(error: BaseException) -> Failure:
    """As the runner does."""
    return failure_of(error, collective=is_collective(error))


@pytest.mark.parametrize(
    "error",
    [
        MemoryError("it does not fit"),
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"),
        RuntimeError("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 139.80 GiB"),
        RuntimeError(CPU),
        RuntimeError("[enforce fail at alloc_cpu.cpp:80] data. DefaultCPUAllocator: not enough memory: you tried"),
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
        RuntimeError("cuDNN error: CUDNN_STATUS_ALLOC_FAILED"),
        RuntimeError("cuDNN error: CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED"),
        RuntimeError("cusolver error: CUSOLVER_STATUS_ALLOC_FAILED, when calling `cusolverDnCreate(handle)`"),
        RuntimeError("CUDA error: out of memory\nCUDA kernel errors might be asynchronously reported"),
        torch.AcceleratorError("CUDA error: out of memory\nSearch for `cudaErrorMemoryAllocation' in ..."),
        RuntimeError("CUDA driver error: out of memory"),
        RuntimeError("std::bad_alloc"),
        dist.DistBackendError(f"{NCCL}Failed to CUDA calloc async 608 bytes"),
        dist.DistBackendError(f"{NCCL}Failed to CUDA calloc 2097152 bytes"),
        dist.DistBackendError(f"{NCCL}Cuda failure 2 'out of memory'"),
        dist.DistBackendError(f"{NCCL}Cuda failure 'out of memory'"),
        RuntimeError("unable to mmap 4096 bytes from file </torch_1_2>: Cannot allocate memory (12)"),
        OSError(errno.ENOMEM, "Cannot allocate memory"),
        RuntimeError("Triton Error [CUDA]: out of memory"),
        RuntimeError("Triton Error [HIP]: out of memory"),
        RuntimeError("CUDA error: CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasCreate(handle)`"),
        RuntimeError("CUBLAS_STATUS_NOT_INITIALIZED when calling cublasCreate(handle)"),
        RuntimeError("CUDA error: HIPBLAS_STATUS_NOT_INITIALIZED when calling `hipblasCreate(handle)`"),
        RuntimeError("Unable to find a valid cuDNN algorithm to run convolution"),
        RuntimeError("GET was unable to find an engine to execute this computation"),
        RuntimeError("FIND was unable to find an engine to execute this computation"),
        RuntimeError("CUDA driver error: 2"),
        RuntimeError("CUDA Error: out of memory (2)"),
        RuntimeError("HIP error: out of memory\nHIP kernel errors might be asynchronously reported"),
        RuntimeError("HIP error: hipErrorOutOfMemory"),
        RuntimeError("cudaMalloc failed: out of memory"),
        RuntimeError("allocating 96.00 MiB on device 0: cudaMalloc failed: out of memory"),
        RuntimeError("hipMallocAsync failed: out of memory"),
        RuntimeError("cuMemCreate failed for 2097152 bytes: out of memory"),
        RuntimeError("nvrtc: error: out of memory"),
        RuntimeError("[Errno 12] Cannot allocate memory"),
        RuntimeError("Caught OSError in worker process 0.\nOSError: [Errno 12] Cannot allocate memory"),
        RuntimeError("a process could not be started ([Errno 12] Cannot allocate memory)"),
    ],
    ids=lambda error: f"{type(error).__name__}: {str(error)[-40:]}",
)
def test_an_exhausted_memory_is_recognised_whatever_library_found_it(error: BaseException):
    failure = judge(error)
    assert (failure.kind, failure.retryable, failure.collective) == ("out_of_memory", True, False)


def test_installed_libraries_raise_errors_that_are_recognised():
    with pytest.raises(RuntimeError, match="DefaultCPUAllocator") as torchs:
        torch.empty(2**55, dtype=torch.uint8, device="cpu")
    with pytest.raises(MemoryError, match="Unable to allocate") as numpys:
        np.empty(2**55, dtype=np.uint8)
    assert [judge(caught.value).kind for caught in (torchs, numpys)] == ["out_of_memory"] * 2


def test_an_error_that_exhausted_memory_led_to_counts_as_out_of_memory():
    def failing(*, explicit: bool) -> None:
        try:
            raise RuntimeError(CPU)
        except RuntimeError as error:
            if explicit:
                raise ValueError("the batch could not be made") from error
            raise KeyError("cleanup")  # noqa: B904

    for explicit in (True, False):
        with pytest.raises((ValueError, KeyError)) as caught:
            failing(explicit=explicit)
        assert judge(caught.value).kind == "out_of_memory"
    ours = ConfigError("batch_size = 512 does not fit")
    ours.__cause__ = MemoryError()
    assert judge(ours).kind == "config"


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (OSError(errno.ENOSPC, "No space left on device"), "unavailable"),
        (FileNotFoundError(errno.ENOENT, "No such file or directory", "/data/CUDA out of memory/a.png"), "crash"),
        (RuntimeError("cannot read /data/CUDA error: out of memory/std::bad_alloc/a.png"), "crash"),
        (RuntimeError("the prompt 'CUDA out of memory' has no word to draw"), "crash"),
        (RuntimeError("/tmp/CUBLAS_STATUS_ALLOC_FAILED.log is not readable"), "crash"),
        (ValueError("a poster that shows std::bad_alloc"), "crash"),
        (ValueError("Triton Error [CUDA]: out of memory"), "crash"),
        (RuntimeError("Triton Error [CUDA]: an illegal memory access was encountered"), "crash"),
        (RuntimeError("the prompt 'Triton Error [CUDA]: out of memory' has no word to draw"), "crash"),
        (RuntimeError("cannot read /data/cudaMalloc failed: out of memory"), "crash"),
        (RuntimeError("CUDA error: CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasSgemm(handle)`"), "crash"),
        (RuntimeError("CUDA driver error: 201"), "crash"),
        (RuntimeError("CUDA driver error: 2.5"), "crash"),
        (RuntimeError("cudaMalloc failed: invalid argument"), "crash"),
        (RuntimeError("nvrtc: error: invalid value for --gpu-architecture"), "crash"),
        (RuntimeError("the caption 'Unable to find a valid cuDNN algorithm to run convolution' is empty"), "crash"),
        (RuntimeError("no file /data/[Errno 12] Cannot allocate memory"), "crash"),
        (ArtifactError("s3://bucket/CUDA out of memory is damaged"), "data"),
        (RuntimeError("CUDA error: an illegal memory access was encountered"), "crash"),
        (RuntimeError("out of resource: shared memory, Required: 245760, Hardware limit: 232448"), "crash"),
        (ConnectionError("connection reset by peer"), "unavailable"),
    ],
    ids=lambda value: str(value)[-40:],
)
def test_other_errors_with_such_words_are_not_out_of_memory(error: BaseException, kind: str):
    assert (judge(error).kind, judge(error).collective) == (kind, False)


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError(GLOO),
        RuntimeError("[../third_party/gloo/gloo/transport/tcp/unbound_buffer.cc:81] Timed out waiting 1800000ms"),
        RuntimeError("Gloo connectFullMesh failed with [pair.cc:144] timed out connecting"),
        RuntimeError("Connection reset by peer"),
        dist.DistBackendError("NCCL communicator was aborted on rank 1."),
        RuntimeError(f"{NCCL}socketProgress: Connection closed by remote peer n2<41234>"),
        RuntimeError("NCCL communicator was aborted on rank 1."),
        RuntimeError("[Rank 1] NCCL watchdog thread terminated with exception: NCCL error: remote process exited"),
        RuntimeError("[PG ID 0 Rank 1] Process group watchdog thread terminated with exception: unknown"),
        RuntimeError("[Rank 1] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=3, OpType=ALLREDUCE)"),
        RuntimeError("Detected mismatch between collectives on ranks. Rank 0 is running collective: ALLREDUCE"),
        RuntimeError("[Rank 0] Detected mismatch between collectives on ranks. Rank 1 is running BROADCAST"),
        RuntimeError("Some NCCL operations have failed or timed out. Due to the asynchronous nature of CUDA kernels"),
        RuntimeError("[Rank 0] Ranks 1 failed to pass monitoredBarrier in 1000 ms"),
        RuntimeError("[Rank 0]: Rank 1 failed to pass monitoredBarrier in 1000 ms"),
        RuntimeError("[Rank 0] Ranks 1, 2, 3 failed to pass monitoredBarrier in 1000 ms"),
        RuntimeError("Rank 1 successfully reached monitoredBarrier, but received errors while waiting for rank 0"),
        RuntimeError("Timed out initializing process group in store based barrier on rank: 1, for key: store_based"),
        RuntimeError("[c10d] The client socket has timed out after 600s while trying to connect to (n1, 29500)."),
        RuntimeError("The client socket has failed to connect to any network address of (n1, 29500)."),
        dist.DistNetworkError("The client socket has timed out after 600s while trying to connect to (n1, 29500)."),
    ],
    ids=lambda error: str(error)[:40],
)
def test_the_loss_of_another_rank_is_collective(error: BaseException):
    assert judge(error).collective
    outer = RuntimeError("the update failed")
    outer.__cause__ = error
    assert judge(outer).collective


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("cannot decode /data/gloo/a.mp4"),
        RuntimeError("[Errno 5] /mnt/nccl/gloo/weights.safetensors"),
        ValueError(GLOO),
        FileNotFoundError(errno.ENOENT, "No such file or directory", "/home/nccl/gloo.toml"),
        ArtifactError("s3://gloo/nccl is damaged: connection reset by peer"),
        RuntimeError("the prompt 'igloo in the snow' has no word to draw"),
        RuntimeError("The NCCL error of dataset x"),
        RuntimeError("NCCL errors of dataset x"),
        RuntimeError("nccl error in: x"),
        RuntimeError("SOME NCCL OPERATIONS HAVE FAILED OR TIMED OUT."),
        RuntimeError("s3: Connection reset by peer"),
        RuntimeError("the judge at http://n1 does not answer:\nConnection refused by peer"),
        RuntimeError("the prompt 'Detected mismatch between collectives on ranks' has no word to draw"),
        RuntimeError("Ranks 1 to 3 of the list failed to pass monitoredBarrier"),
        RuntimeError("/data/Some NCCL operations have failed or timed out.txt"),
        RuntimeError("the ncclSystemError of a caption"),
    ],
    ids=str,
)
def test_a_path_or_a_prompt_with_such_a_word_makes_no_error_collective(error: BaseException):
    assert not judge(error).collective


FREE = "`cosmos-flows gc RUN --store STORE` deletes what killed attempts of a run left; free some space and run again"
SHM = "/dev/shm/nccl-4D1b8y (size 9637888), error: No space left on device (28)"


@pytest.mark.parametrize(
    "error",
    [
        OSError(errno.ENOSPC, "No space left on device", "/data/a.npy"),
        OSError(errno.EDQUOT, "Disk quota exceeded"),
        OSError("cannot write /data/a.parquet: No space left on device"),
        FileNotFoundError(errno.ENOENT, "No usable temporary directory found in ['/tmp', '/var/tmp']"),
        RuntimeError("No space left on device"),
        RuntimeError("Data processing error: I/O error: No space left on device (os error 28)"),
        RuntimeError("Caught OSError in worker process 0.\nOSError: [Errno 28] No space left on device: '/data/a'"),
        SafetensorError("I/O error: No space left on device (os error 28)"),
        sqlite3.OperationalError("database or disk is full"),
    ],
    ids=str,
)
def test_a_full_disk_is_recognised_whatever_library_found_it(error: BaseException):
    failure = judge(error)
    assert (failure.kind, failure.message) == ("unavailable", f"no space left: {error}; {FREE}")


@pytest.mark.parametrize(
    "error",
    [
        ValueError("prompt 'disk is full' has no quoted text"),
        ValueError("No space left on device"),
        KeyError("No space left on device"),
        TypeError("disk is full"),
        RuntimeError("the prompt 'disk is full' has no word to draw"),
        RuntimeError("the prompt 'a sign: no space left on device' has no word to draw"),
        RuntimeError("cannot decode /data/no space left on device/a.mp4"),
        RuntimeError("No space left on device/a.png is no picture"),
        FileNotFoundError(errno.ENOENT, "No such file or directory", "/data/disk is full"),
        FileNotFoundError(errno.ENOENT, "No such file or directory", "disk quota exceeded"),
        sqlite3.OperationalError("no such table: disk is full of"),
    ],
    ids=str,
)
def test_other_errors_with_such_words_are_no_full_disk(error: BaseException):
    failure = judge(error)
    assert (failure.kind, failure.message) == ("crash", f"{type(error).__name__}: {error}")
