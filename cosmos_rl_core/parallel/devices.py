"""The device of a process: its GPU, or the CPU if the settings say so. It never falls back from a GPU to the CPU."""

import os

import torch

from cosmos_rl_core.config.parallelism import Device
from cosmos_rl_core.errors import ConfigError, first_line

VISIBLE = "CUDA_VISIBLE_DEVICES"
ADVICE = "install a PyTorch that fits the driver, which `nvidia-smi` shows, or ask for the CPU with device = 'cpu'"


def settled(wanted: Device | None, local_rank: int = 0, *, setting: str = "launch.device") -> torch.device:
    """Make this process compute on the ``wanted`` device, and return it.

    ``cpu`` hides all GPUs from this process and its children, so that every library in it computes on the CPU.
    None takes a GPU if the process sees one. Raises :class:`ConfigError` if a GPU was asked for, or assigned by
    ``CUDA_VISIBLE_DEVICES``, and cannot be used, or if there is none for the rank ``local_rank`` of this machine. The
    message names ``setting`` as the setting that asked.
    """
    if wanted == "cpu":
        os.environ[VISIBLE] = ""
        return torch.device("cpu")
    if not torch.cuda.is_available():
        assigned = os.environ.get(VISIBLE, "")
        if wanted is None and not _names_a_device(assigned):
            return torch.device("cpu")
        asked = f"{setting} = 'cuda'" if wanted else f"{VISIBLE} = {assigned!r}"
        raise ConfigError(f"{asked}, and {os.uname().nodename} cannot use CUDA: {_why_not()}; {ADVICE}")
    if local_rank >= (count := torch.cuda.device_count()):
        raise ConfigError(
            f"rank {local_rank} of {os.uname().nodename} has no GPU of its own: CUDA shows a process {count} (of MIG "
            "devices always 1); use fewer processes (launch.processes)"
        )
    return torch.device("cuda", local_rank)


def current() -> torch.device:
    """Return the GPU that this process has chosen, by default its first one, or the CPU. Raises like :func:`settled`.

    Call it after :func:`settled`, for example to load a model in a stage or a service.
    """
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else settled(None)


def _names_a_device(assigned: str) -> bool:
    """Return whether the first entry of ``CUDA_VISIBLE_DEVICES`` names a device; CUDA stops at any other entry."""
    first = assigned.partition(",")[0].strip()
    return first.isdecimal() or first.startswith(("GPU-", "MIG-"))


def _why_not() -> str:
    """Return why CUDA shows no device, in one line."""
    if torch.version.cuda is None:
        return f"torch {torch.__version__} is built without it"
    try:
        torch.cuda.init()
    except RuntimeError as error:
        return first_line(str(error))
    return "it shows no device"
