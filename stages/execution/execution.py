"""The execution of a Request: ranks, threads, precision, limits; ``execution.json`` next to ``request.json``."""

from pathlib import Path
from typing import Literal

from pydantic import Field

from cosmos_rl_core.config.base import Section
from cosmos_rl_core.config.parallelism import ALONE, Attention, Device, Parallelism


class Execution(Section):
    """Settings of one attempt. They are part of no digest and hold no secrets.

    Their effect on bits is read from the running process and recorded in the numerics.
    """

    format: Literal[1] = 1
    parallelism: Parallelism = ALONE
    """Number of ranks and how they share the work. The runner refuses a process group of another size."""
    processes: int = Field(default=1, ge=1)
    """Processes over which a stage without torch spreads its work; they change no bits."""
    device: Device | None = None
    """Where ranks compute: ``cuda`` or ``cpu``. None: on a GPU if the process sees one. An assigned GPU that cannot be
    used is an error."""
    gpus: tuple[int, ...] = ()
    """Indices into the devices that the flow sees. Empty: the launcher chooses."""
    threads: int = Field(default=1, ge=1)
    """CPU threads of each rank. They change the last bits of results."""
    deterministic: bool = True
    """Whether to refuse kernels whose bits differ from run to run."""
    tf32: bool = False
    """Whether GPUs round the factors of float32 products to 10 bits."""
    attention: Attention = "auto"
    """Kernel of attention that may run; ``auto`` permits all: PyTorch chooses among them by device, type and shapes."""
    rank_timeout_s: float = Field(default=3600.0, gt=0)
    """Seconds for which a rank waits for the others."""
    numerics_record: str | None = None
    """URL of this stage's pinned numerics; None pins nothing."""
    allow_numerics_change: bool = False
    """Whether the stage runs even if its numerics differ from the pinned ones."""
    scorer_record: str | None = None
    """URL below which the run pins the scorers of reward services; None pins none."""
    accept_scorer: bool = False
    """Whether another scorer than the pinned one may score samples that have no scores yet."""
    units: str | None = None
    """Folder of the socket at which the launcher hands out units. None: the ranks share all units."""
    worker: int = 0
    """Number of this worker among the workers that get units there."""
    halve: bool = False
    """Whether to hold half as many samples in memory at once as in the last attempt."""

    @staticmethod
    def path_for(request: Path) -> Path:
        """Return the path of the file next to ``request``."""
        return request.with_name("execution.json")

    @classmethod
    def read(cls, request: Path) -> "Execution":
        """Read the file next to ``request``; return the defaults if there is none. Raises ``ValidationError``."""
        path = cls.path_for(request)
        return cls.model_validate_json(path.read_bytes()) if path.exists() else cls()

    def write(self, request: Path) -> None:
        """Write the file next to ``request``."""
        self.path_for(request).write_text(self.model_dump_json(indent=1), encoding="utf-8")
