"""How stage processes are started and watched.

Nothing here changes what a run is; threads, processes and determinism change last bits, and are part of the numerics.
"""

from typing import Annotated, Literal

from pydantic import AfterValidator, Field, model_validator

from cosmos_rl_core.config.base import Section
from cosmos_rl_core.config.clusters import KubernetesConfig, SlurmConfig
from cosmos_rl_core.errors import ConfigError
from cosmos_rl_core.parallel.parallelism import Parallelism

ON_POLICY = ("rollout", "update", "finetune", "validate")
"""Stages that run our own transformer on latents, whose tokens processes can share."""


SET_BY_LAUNCHERS = {
    "CUDA_VISIBLE_DEVICES": "launch.stage_gpus chooses devices, or this variable of the flow",
    "CUDA_DEVICE_ORDER": "devices are counted as nvidia-smi counts them",
    "OMP_NUM_THREADS": "launch.threads is that number",
    "NCCL_NVLS_ENABLE": "launch.deterministic decides it",
} | dict.fromkeys(
    ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR", "MASTER_PORT"),
    "torchrun sets it for each rank",
)
"""Environment variables of stages that have another source, each with what it is."""


def _free_variable(name: str) -> str:
    if (source := SET_BY_LAUNCHERS.get(name)) is not None:
        raise ValueError(f"{name} cannot be set here: {source}")
    return name


class LaunchConfig(Section):
    """Where the processes of a run live; a recipe may hold one, a file in ``deployments/clusters`` replaces it."""

    launcher: Literal["local", "slurm", "kubernetes"] = "local"
    """Who starts the processes: this machine, Slurm (``[launch.slurm]``) or Kubernetes (``[launch.kubernetes]``)."""
    slurm: SlurmConfig = SlurmConfig()
    """What Slurm is asked for."""
    kubernetes: KubernetesConfig | None = None
    """What Kubernetes is asked for."""
    python: str | None = Field(default=None, min_length=1)
    """Interpreter of the stages, where they run. None: the flow's own, in a container ``python``."""
    environment: dict[Annotated[str, AfterValidator(_free_variable)], str] = {}
    """More environment variables of every stage, beside those of :mod:`flows.launchers.variables`, which it has anyway.
    Not for secrets: the run's plan shows them."""
    mode: Literal["cold", "warm"] = "cold"
    """``cold`` starts every stage anew, under torchrun if it is distributed. ``warm`` forks them from one process that
    has imported everything: 0.1 to 0.5 s instead of 5 s for a stage of almost no work; for one process on a CPU."""
    processes: int = Field(default=1, ge=1)
    """Ranks of a distributed stage."""
    stage_processes: dict[str, Annotated[int, Field(ge=1)]] = {}
    """Ranks of single stages where they differ, e.g. ``{rollout = 8}``."""
    dp_shard_size: int = Field(default=1, ge=1)
    """Ranks that share one copy of the weights, each with some rows of every matrix (FSDP2); must divide the ranks of
    every distributed stage. 1 gives each rank all weights; fewer than there are ranks makes copies (HSDP)."""
    cp_size: int = Field(default=1, ge=1)
    """Ranks that share the tokens of each video (context parallelism; Wan2.1 and Cosmos-Predict2.5), and with them the
    activations; must divide the ranks of every stage that runs the transformer. 1 gives each rank videos of its own."""
    fsdp_offload: bool = False
    """Shared weights, their copies and their optimizer rest in the CPU's memory and visit the GPU by the block."""
    compile: bool = False
    """Compile the transformer's blocks (torch.compile): a minute at the start of each stage, then faster forwards."""
    stage_gpus: dict[str, tuple[Annotated[int, Field(ge=0)], ...]] = {}
    """GPUs of single stages, e.g. ``{update = [0, 1], rollout = [2, 3]}``, as indices into the devices that the flow
    sees (``CUDA_VISIBLE_DEVICES``); stages that run side by side need sets of their own. Absent means one for each
    process, whichever are free. A stage waits until no run of this machine uses its devices. With Slurm and Kubernetes
    only their number counts: each set is an allocation of its own."""
    gpu_limit: str | None = Field(default=None, min_length=1)
    """Global concurrency limit of the Prefect server whose slots are GPUs, as ``cosmos-flows infra init --gpus N``
    makes ``gpus``: stages wait until as many are free as they use, and then for the devices themselves. None: they wait
    for devices only. Slurm and Kubernetes have queues of their own."""
    threads: int = Field(default=1, ge=1)
    """CPU threads of each process."""
    deterministic: bool = True
    """Only kernels whose bits repeat. Turning it off is faster on GPUs and gives up the promise of equal bits."""
    tf32: bool = False
    """Round the factors of float32 matrix products and convolutions to 10 bits on GPUs (TF32): some times faster where
    float32 is computed (VAEs, text encoders, ``train.param_dtype = "float32"``), and no longer within 1e-4 of the stock
    pipeline, to which the GPU tests hold float32. PyTorch by itself rounds those of convolutions alone.
    """
    max_attempts: int = Field(default=4, ge=1)
    """Tries of a stage that fails for a reason that may pass: killed, hung, out of memory, a service away."""
    retry_delay_s: float = Field(default=2.0, ge=0)
    """Wait before the second try; doubles each time, with jitter."""
    stall_timeout_s: float = Field(default=1800.0, gt=0)
    """A stage without a sign of life for this long is ended and counts as hung."""
    time_limit_s: float | None = Field(default=None, gt=0)
    """A stage that has run for this long is ended and counts as hung. None: no limit."""
    stage_time_limits_s: dict[str, Annotated[float, Field(gt=0)]] = {}
    """Limits of single stages where they differ, e.g. ``{rollout = 7200}``."""

    @model_validator(mode="after")
    def _stages_have_room(self) -> "LaunchConfig":
        if self.mode == "warm" and (max([self.processes, *self.stage_processes.values()]) > 1 or self.stage_gpus):
            raise ValueError("mode = 'warm' forks single processes on the CPU; use mode = 'cold' for ranks and GPUs")
        mistakes: dict[str, list[str]] = {}
        for stage in dict.fromkeys((*ON_POLICY, *self.stage_processes, "any other stage")):
            try:
                self.parallelism_of(stage)
            except ConfigError as error:
                mistakes.setdefault(str(error), []).append(stage)
        if mistakes:
            raise ValueError("; ".join(f"{', '.join(stages)}: {mistake}" for mistake, stages in mistakes.items()))
        for stage, gpus in self.stage_gpus.items():
            if len(set(gpus)) != len(gpus) or len(gpus) < self.processes_of(stage):
                raise ValueError(
                    f"stage_gpus.{stage} = {list(gpus)} must be different GPUs, one for each of its "
                    f"{self.processes_of(stage)} processes"
                )
        return self

    @model_validator(mode="after")
    def _launcher_has_its_settings(self) -> "LaunchConfig":
        if self.launcher == "local":
            return self
        if self.gpu_limit is not None:
            raise ValueError(f"gpu_limit is for GPUs of this machine; launcher = {self.launcher!r} has its own queue")
        if self.mode == "warm":
            raise ValueError(f"mode = 'warm' forks on this machine; launcher = {self.launcher!r} needs mode = 'cold'")
        if self.launcher == "kubernetes" and self.kubernetes is None:
            raise ValueError("launcher = 'kubernetes' needs a table [launch.kubernetes] with an image")
        for stage in ("every stage", *self.allocations.stages, *self.stage_processes):
            processes, nodes = self.processes_of(stage), self.nodes_of(stage)
            if processes % nodes:
                raise ValueError(f"{processes} processes of {stage} cannot be spread evenly over {nodes} nodes")
        return self

    @property
    def allocations(self) -> SlurmConfig | KubernetesConfig:
        """The settings of the scheduler; only of a launcher that has one."""
        return self.kubernetes if self.launcher == "kubernetes" and self.kubernetes else self.slurm

    def nodes_of(self, stage: str) -> int:
        """Machines of one distributed stage."""
        return 1 if self.launcher == "local" else self.allocations.resources_of(stage).nodes

    def time_limit_of(self, stage: str) -> float | None:
        """Seconds that one stage may take."""
        return self.stage_time_limits_s.get(stage, self.time_limit_s)

    def parallelism_of(self, stage: str) -> Parallelism:
        """How the ranks of one distributed stage share its work. Raises :class:`ConfigError` if they cannot.

        All ranks of a stage that has fewer than ``dp_shard_size`` share one copy of the weights; a single one has
        nothing to share.
        """
        ranks = self.processes_of(stage)
        dp_shard_size = self.dp_shard_size if self.dp_shard_size % ranks else ranks
        return Parallelism(
            world_size=ranks,
            dp_shard_size=dp_shard_size,
            cp_size=self.cp_size if stage in ON_POLICY else 1,
            fsdp_offload=self.fsdp_offload and (dp_shard_size > 1 or self.dp_shard_size == 1),
            compile=self.compile,
        )

    def processes_of(self, stage: str) -> int:
        """Ranks of one stage."""
        return self.stage_processes.get(stage, self.processes)
