"""What a process records of itself."""

from types import SimpleNamespace
from typing import Any

import torch

from cosmos_rl_core.numerics import numerics

H100, L40S = "NVIDIA H100 80GB HBM3", "NVIDIA L40S"


def torch_on(device: str, *, flash: bool = True, capability: tuple[int, int] = (9, 0), **switches: Any) -> Any:
    """The parts of the module torch that are read, on a machine with this GPU."""
    cuda_backend = SimpleNamespace(
        matmul=SimpleNamespace(allow_tf32=False, allow_bf16_reduced_precision_reduction=True)
    )
    for kernel, is_on in {"flash": flash, "mem_efficient": True, "math": True, "cudnn": False}.items():
        setattr(cuda_backend, f"{kernel}_sdp_enabled", lambda is_on=is_on: is_on)
    cudnn = SimpleNamespace(version=lambda: 91002, allow_tf32=False, deterministic=False, benchmark=False)
    cpu = SimpleNamespace(get_cpu_capability=lambda: "AVX512")
    vars(cudnn).update(switches)
    return SimpleNamespace(
        get_num_threads=lambda: 8,
        are_deterministic_algorithms_enabled=lambda: True,
        get_default_dtype=lambda: torch.float32,
        get_float32_matmul_precision=lambda: "highest",
        version=SimpleNamespace(cuda="13.0"),
        backends=SimpleNamespace(cuda=cuda_backend, cudnn=cudnn, cpu=cpu),
        distributed=SimpleNamespace(is_nccl_available=lambda: True),
        cuda=SimpleNamespace(
            is_available=lambda: True,
            get_device_name=lambda: device,
            get_device_capability=lambda: capability,
            nccl=SimpleNamespace(version=lambda: (2, 28, 9)),
        ),
    )


def test_a_process_with_a_gpu_records_its_libraries_and_not_the_hosts_cpu():
    found = numerics(torch_on(H100))
    assert (found["device"], found["cuda"], found["cudnn"], found["nccl"]) == (H100, "13.0", 91002, "2.28.9")
    assert found["attention_kernels"] == ["flash", "math", "mem_efficient"]
    assert not found.keys() & {"cpu", "cpu_capability"}


def test_a_gpu_without_the_kernel_attends_in_blocks():
    """Flash attention may be off, and GPUs before Ampere have none."""
    gpus = [torch_on(H100), torch_on(H100, flash=False), torch_on("Tesla V100", capability=(7, 0))]
    assert [numerics(gpu)["segment_attention"] for gpu in gpus] == ["varlen", "blocks", "blocks"]


def test_a_process_on_a_cpu_records_its_model_and_instructions():
    found = numerics(torch)
    assert found["device"] == "cpu"
    assert found["cpu_capability"] == torch.backends.cpu.get_cpu_capability()
    assert found["cpu"]


def test_a_process_without_torch_records_its_packages_alone():
    assert numerics().keys() == {"python", "packages"}


def test_switches_are_read_from_the_live_process():
    threads, before = torch.get_num_threads(), numerics(torch)
    try:
        torch.set_num_threads(threads + 1)
        torch.use_deterministic_algorithms(True)
        torch.set_default_dtype(torch.float64)
        torch.set_float32_matmul_precision("medium")
        found = numerics(torch)
    finally:
        torch.set_num_threads(threads)
        torch.use_deterministic_algorithms(before["deterministic"])
        torch.set_default_dtype(torch.float32)
        torch.set_float32_matmul_precision("highest")
    assert (found["threads"], found["deterministic"]) == (threads + 1, True)
    assert (found["default_dtype"], found["float32_matmul_precision"]) == ("float64", "medium")
    assert numerics(torch) == before
