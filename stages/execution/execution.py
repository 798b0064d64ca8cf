"""How a Request is run, as opposed to what it asks for: one typed value, ``execution.json`` beside ``request.json``."""

from pathlib import Path
from typing import Literal

from pydantic import Field

from cosmos_rl_core.config.base import Section
from cosmos_rl_core.parallel.parallelism import ALONE, Parallelism


class Execution(Section):
    """How one attempt is run. It is part of no digest and holds no secrets.

    What it does to bits is read back from the live process into the recorded numerics.
    """

    format: Literal[1] = 1
    parallelism: Parallelism = ALONE
    """The ranks and what they share. The runner refuses a process group of another size."""
    gpus: tuple[int, ...] = ()
    """Indices into the devices that are visible to the flow. Empty: the launcher chooses."""
    threads: int = Field(default=1, ge=1)
    """CPU threads of each rank. They change the last bits of results."""
    deterministic: bool = True
    """Whether kernels are refused whose bits differ from run to run."""
    tf32: bool = False
    """Whether factors of float32 products are rounded to 10 bits on GPUs."""
    rank_timeout_s: float = Field(default=3600.0, gt=0)
    """How long a rank waits for the others, in seconds."""
    numerics_record: str | None = None
    """URL where the run's numerics of this stage are pinned; None pins nothing."""
    allow_numerics_change: bool = False
    """Whether the stage runs although its numerics differ from the pinned ones."""
    halve: bool = False
    """Whether half as many samples are in memory at once as the last attempt had."""

    @staticmethod
    def beside(request: Path) -> Path:
        """Return the path of the file that belongs to the request at ``request``."""
        return request.with_name("execution.json")

    @classmethod
    def read(cls, request: Path) -> "Execution":
        """Read the file beside ``request``; the defaults where there is none. Raises ``ValidationError``."""
        path = cls.beside(request)
        return cls.model_validate_json(path.read_bytes()) if path.exists() else cls()

    def write(self, request: Path) -> None:
        """Write the file beside ``request``."""
        self.beside(request).write_text(self.model_dump_json(indent=1), encoding="utf-8")
