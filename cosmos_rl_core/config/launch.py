"""Start and supervision of stage processes.

Nothing here changes the identity of a run. Threads, processes and determinism change last bits; artifacts record them.
"""

import math
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, model_validator

from cosmos_rl_core.config.base import Section
from cosmos_rl_core.config.clusters import (
    KubernetesConfig,
    KubernetesPods,
    PricesConfig,
    RayConfig,
    SlurmConfig,
    SlurmNodes,
)
from cosmos_rl_core.config.parallelism import Attention, Device, ElasticConfig, Parallelism
from cosmos_rl_core.errors import ConfigError

ON_POLICY = ("rollout", "update", "finetune", "validate")
"""Stages that run the transformer on latents, so that ranks can share the tokens of a video."""

SIDE_BY_SIDE = ("reward",)
"""Stages without torch whose work several processes share."""

_TORCHRUN = "RANK WORLD_SIZE LOCAL_RANK LOCAL_WORLD_SIZE GROUP_RANK MASTER_ADDR MASTER_PORT"
SET_BY_LAUNCHERS = {
    "CUDA_VISIBLE_DEVICES": "use launch.stage_gpus, or set the variable for the flow",
    "CUDA_DEVICE_ORDER": "devices have the order of nvidia-smi",
    "OMP_NUM_THREADS": "use launch.threads",
    "NCCL_NVLS_ENABLE": "use launch.deterministic",
} | dict.fromkeys(_TORCHRUN.split(), "torchrun sets it for each rank")
"""Environment variables that a recipe cannot set, each with the reason or with the setting to use instead."""


def _free_variable(name: str) -> str:
    if not name or "=" in name or "\0" in name:
        raise ValueError(f"{name!r} is no name of an environment variable")
    if (source := SET_BY_LAUNCHERS.get(name)) is not None:
        raise ValueError(f"{name} cannot be set here: {source}")
    return name


def _value_of_variable(value: str) -> str:
    if "\0" in value:
        raise ValueError("has a zero byte, which no environment variable can hold")
    return value


def _mode_of(others: dict[str, Any]) -> Literal["cold", "warm"]:
    """Return the default of ``mode``, which depends on settings before it."""
    named = others.get("device") is None and any(others.get(name) for name in ("gpus", "stage_gpus", "gpu_limit"))
    if others.get("launcher") == "ray":
        return "warm"
    on_gpus = others.get("launcher") == "local" and (others.get("device") == "cuda" or named)
    return "warm" if on_gpus and others.get("python") is None else "cold"


class LaunchConfig(Section):
    """Processes of a run and their machines. A cluster profile (``deployments/clusters``) replaces this section."""

    launcher: Literal["local", "ray", "slurm"] = "local"
    """Where processes start: ``local`` on this machine, ``ray`` on the nodes of a Ray cluster (``[launch.ray]``),
    ``slurm`` as steps of the Slurm job in which the flow runs (``[launch.slurm]``)."""
    ray: RayConfig = RayConfig()
    """Nodes of a Ray cluster."""
    slurm: SlurmConfig = SlurmConfig()
    """Steps of stages in a Slurm job, and the batch script of this job or of a Ray cluster."""
    kubernetes: KubernetesConfig = KubernetesConfig()
    """Pods of a Ray cluster."""
    python: str | None = Field(default=None, min_length=1)
    """Path of the Python interpreter of stages, on their machines. Default: the flow's own interpreter."""
    environment: dict[
        Annotated[str, AfterValidator(_free_variable)], Annotated[str, AfterValidator(_value_of_variable)]
    ] = {}
    """Additional environment variables of every stage. Not for secrets: the plan of the run shows them."""
    device: Device | None = None
    """Where ranks compute. ``cuda``: on a GPU each; it is an error if CUDA cannot be used. ``cpu``: on the CPU; GPUs
    are counted and locked as if ranks used them, to rehearse a profile. Default: ``cuda`` if this section names GPUs or
    the machine shows some, else the CPU."""
    gpus: int | None = Field(default=None, ge=1)
    """Number of GPUs of this machine that stages may use at once. Stages that need more are refused before anything
    starts; stages of one wave that together need more run one after the other. Default: all that the flow sees. Not for
    Ray and Slurm, which have ``gpus_per_node``."""
    device_memory_gb: float | None = Field(default=None, gt=0)
    """Memory of each GPU in GiB, as ``nvidia-smi`` shows it; 79 for an H100 with 80 GB. A plan refuses stages that need
    more and names a setting that makes them fit. Default: unknown, so that nothing is refused."""
    stage_device_memory_gb: dict[str, Annotated[float, Field(gt=0)]] = {}
    """Memory of each GPU in GiB for single stages that run on other GPUs, in place of ``device_memory_gb``, e.g.
    ``{rollout = 44}``."""
    processes: int = Field(default=1, ge=1)
    """Number of ranks of each distributed stage."""
    stage_processes: dict[str, Annotated[int, Field(ge=1)]] = {}
    """Number of ranks of single stages, in place of ``processes``, e.g. ``{rollout = 8}``. ``reward = n`` scores with
    n processes, each with its own copy of the reward. The reward ``remote`` has n windows of 16 requests."""
    elastic: ElasticConfig | None = None
    """Workers that share the units of a stage, e.g. ``{min = 1, max = 8}``. A lost worker costs its unfinished unit;
    others join when devices are free. Default: a fixed number of ranks shares every stage (``processes``)."""
    dp_shard_size: int = Field(default=1, ge=1)
    """Number of ranks over which FSDP2 shards the weights; must divide the ranks of every distributed stage. 1
    keeps all weights on each rank; a number below the ranks keeps several sharded copies (HSDP)."""
    cp_size: int = Field(default=1, ge=1)
    """Number of ranks that share the tokens of each video (context parallelism, for Wan2.1 and Cosmos-Predict2.5),
    which divides activation memory. Must divide the ranks of every stage that runs the transformer. 1 gives each
    rank whole videos."""
    fsdp_offload: bool = False
    """Keep sharded weights and optimizer state in CPU memory; each block moves to the GPU when it computes. Saves
    GPU memory, is slower."""
    compile: bool = False
    """Compile the transformer's blocks with torch.compile, once for each shape: about a minute for the first stage of a
    shape on a machine, then faster forward passes. The code is kept in ``~/.cache/cosmos-rl-flows/compiled``, or where
    ``TORCHINDUCTOR_CACHE_DIR`` says (``launch.environment``). Not worth it where texts of many lengths are not padded
    (Qwen-Image): each length is a shape, and more than 256 end the stage."""
    stage_gpus: dict[str, tuple[Annotated[int, Field(ge=0)], ...]] = {}
    """GPUs of single stages, e.g. ``{update = [0, 1], rollout = [2, 3]}``: indices into the flow's devices
    (``CUDA_VISIBLE_DEVICES``). Stages with disjoint sets can run side by side. Default: any free GPU for each
    process. A stage waits until no other run on this machine uses its devices. Not for Ray and Slurm."""
    gpu_limit: str | None = Field(default=None, min_length=1)
    """Name of a global concurrency limit of the Prefect server with one slot per GPU, such as ``gpus`` from
    ``cosmos-flows infra init --gpus N``. Stages wait for as many free slots as they use GPUs, then for the devices.
    Default: wait for the devices only. Not for Ray and Slurm, which have their own queues."""
    mode: Literal["cold", "warm"] = Field(default_factory=_mode_of)
    """``cold`` starts a new process for every stage, several ranks under torchrun. ``warm`` saves that time, with the
    same bits; it is the default where this section names GPUs of this machine and no ``python``. On the CPU it forks
    the ranks of stages from one process that has imported everything: a stage with almost no work takes 0.1 to 0.5 s
    instead of 5 s. On GPUs each one keeps a process between stages, which has imported everything and has a CUDA
    context. Stages without torch are forks in both cases."""
    resident_gb: float | None = Field(default=None, ge=0)
    """GiB of frozen weights that a process of ``mode = "warm"`` may keep between stages, so that the next one does not
    read them again; the memory of ``plan`` has room for them. With 0 no process stays: stages on GPUs start cold. With
    more they stay on the CPU too, where stages are forks otherwise. Default: they stay on GPUs, and keep no weights."""
    threads: int = Field(default=1, ge=1)
    """Number of CPU threads of each process."""
    deterministic: bool = True
    """Use only kernels with repeatable bits. ``false`` is faster on GPUs, but results are no longer bit-identical
    when repeated."""
    tf32: bool = False
    """Round the factors of float32 matrix products and convolutions to 10 bits on GPUs (TF32). Faster where float32
    is computed (VAEs, text encoders, ``train.param_dtype = "float32"``), but results no longer match the stock
    pipeline within 1e-4. PyTorch's own default rounds convolutions only. Rewards never use it, nor does the reward
    service, so that one scorer has one score."""
    attention: Attention = "auto"
    """The one attention kernel that ranks use: ``flash``, ``efficient``, ``cudnn`` or ``math`` of PyTorch. The stage
    fails if the kernel does not support the model, such as ``flash`` with text masks. ``auto``: PyTorch chooses by
    device, type and shapes alone among all but ``cudnn``, whose gradients can be wrong on H100 and H200. On a CPU there
    are ``flash`` and ``math``. Scorers always have ``auto``."""
    max_attempts: int = Field(default=4, ge=1)
    """Number of attempts of a stage that fails for a passing reason: killed, hung, out of memory, service
    unavailable. The same Python exception at the same line on two attempts is no passing reason."""
    retry_delay_s: float = Field(default=2.0, ge=0)
    """Seconds before the second attempt; doubles with each attempt, with jitter."""
    stall_timeout_s: float = Field(default=1800.0, gt=0)
    """Seconds without progress after which a stage is ended and counts as hung."""
    time_limit_s: float | None = Field(default=None, gt=0)
    """Seconds after which a stage is ended and counts as hung. Default: no limit."""
    stage_time_limits_s: dict[str, Annotated[float, Field(gt=0)]] = {}
    """Time limits of single stages in seconds, in place of ``time_limit_s``, e.g. ``{rollout = 7200}``."""
    prices: PricesConfig | None = None
    """Prices of these machines. Default: ``cosmos-flows cost`` shows hours without prices."""

    @model_validator(mode="after")
    def _stages_have_room(self) -> "LaunchConfig":
        if self.forks and self.stage_gpus:
            raise ValueError(
                "stage_gpus is given, and mode = 'warm' with device = 'cpu' forks stages, which use no GPU; leave "
                "stage_gpus out, or rehearse those GPUs with mode = 'cold' or resident_gb = 1"
            )
        if self.device == "cpu" and self.attention in ("efficient", "cudnn"):
            raise ValueError(f"attention = {self.attention!r} is for GPUs; device = 'cpu' has 'flash' and 'math'")
        mistakes: dict[str, list[str]] = {}
        for stage in dict.fromkeys((*ON_POLICY, *self._stage_ranks, "any other stage")):
            try:
                self.parallelism_of(stage)
            except ConfigError as error:
                mistakes.setdefault(str(error), []).append(stage)
        if mistakes:
            found = (f"{', '.join(stages)}: {text}" for text, stages in mistakes.items())
            raise ValueError("; ".join(found))
        for stage, gpus in self.stage_gpus.items():
            elastic = self.elastic_of(stage)
            count = self.processes_of(stage) * (elastic.min if elastic else 1)
            if len(set(gpus)) != len(gpus) or len(gpus) < count:
                expected = f"different GPUs, one for each of its {count} processes"
                raise ValueError(f"stage_gpus.{stage} = {list(gpus)} must be {expected}")
        return self

    @model_validator(mode="after")
    def _workers_have_room(self) -> "LaunchConfig":
        if self.elastic is None:
            return self
        if self.launcher not in ("local", "ray"):
            raise ValueError(f"elastic needs launcher = 'local' or 'ray', found {self.launcher!r}")
        if self.gpu_limit is not None and self.elastic.min != self.elastic.max:
            raise ValueError(
                "gpu_limit has slots for a fixed number of GPUs; set elastic.min = elastic.max, or leave it out"
            )
        if named := [stage for stage in self._stage_ranks if self.elastic_of(stage)]:
            raise ValueError(
                f"stage_processes.{named[0]} is given, and elastic decides the number of its workers; leave one out, "
                "or list the elastic stages in elastic.stages"
            )
        return self

    @model_validator(mode="after")
    def _launcher_has_its_settings(self) -> "LaunchConfig":
        if self.launcher == "local":
            return self
        for name in ("gpu_limit", "gpus"):
            if getattr(self, name) is not None:
                raise ValueError(f"{name} needs launcher = 'local', found {self.launcher!r}")
        if self.stage_gpus:
            raise ValueError(
                f"stage_gpus needs launcher = 'local', found {self.launcher!r}; each rank gets one of the GPUs of "
                f"its node (launch.{self.launcher}.gpus_per_node)"
            )
        mode = "warm" if self.launcher == "ray" else "cold"
        if self.mode != mode:
            raise ValueError(f"launcher = {self.launcher!r} needs mode = {mode!r}, found {self.mode!r}")
        for stage in ("every stage", *self.cluster.stages, *self._stage_ranks):
            processes, nodes = self.processes_of(stage), self.nodes_of(stage)
            if processes % nodes:
                found = f"{processes} processes of {stage}"
                raise ValueError(f"{found} cannot share {nodes} nodes evenly; make their number a multiple of {nodes}")
        return self

    @property
    def forks(self) -> bool:
        """Return whether every stage is a fork on the CPU. Such stages count and lock no device."""
        return self.mode == "warm" and self.device == "cpu" and not self.resident_gb

    @property
    def kept_bytes(self) -> int:
        """Return the bytes of frozen weights that a process may keep between stages."""
        return int((self.resident_gb or 0.0) * 2**30) if self.mode == "warm" else 0

    def ranks_on(self, device: Device | None) -> Literal["cold", "forked", "resident"]:
        """Return how the ranks of a stage with torch start if it computes on ``device``.

        ``cold``: new processes. ``forked``: forks of a server that has imported everything. ``resident``: processes
        that stay between stages.
        """
        if self.mode == "cold" or (device == "cuda" and self.resident_gb == 0):
            return "cold"
        return "resident" if device == "cuda" or self.resident_gb else "forked"

    @property
    def cluster(self) -> RayConfig | SlurmConfig:
        """Return the section of the cluster. Only for launchers that have one."""
        return self.ray if self.launcher == "ray" else self.slurm

    def nodes_of(self, stage: str) -> int:
        """Return the number of machines of a distributed stage, or of each worker of an elastic one."""
        return 1 if self.launcher == "local" or self.elastic_of(stage) else self.cluster.resources_of(stage).nodes

    def time_limit_of(self, stage: str) -> float | None:
        """Return the time limit of a stage in seconds, or None."""
        return self.stage_time_limits_s.get(stage, self.time_limit_s)

    def device_memory_of(self, stage: str) -> float | None:
        """Return the memory of a stage's devices in GiB; None if it is not known."""
        return self.stage_device_memory_gb.get(stage, self.device_memory_gb)

    def parallelism_of(self, stage: str) -> Parallelism:
        """Return how the ranks of a stage share its work. Raises :class:`ConfigError` if the sizes do not fit.

        A stage with fewer ranks than ``dp_shard_size`` shards the weights over all its ranks.
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

    def elastic_of(self, stage: str) -> ElasticConfig | None:
        """Return the settings of the workers that share the units of a stage; None if it has ranks instead."""
        return self.elastic if self.elastic is not None and stage in self.elastic.stages else None

    def processes_of(self, stage: str) -> int:
        """Return the number of ranks of a stage; for an elastic one, of each worker: the ranks that share a model."""
        if self.elastic_of(stage):
            return math.lcm(self.dp_shard_size, self.cp_size) if stage in ON_POLICY else 1
        return self.stage_processes.get(stage, self.processes)

    @property
    def most_ranks(self) -> int:
        """Return the largest number of ranks of a stage."""
        return max([self.processes, *self._stage_ranks.values()])

    @property
    def _stage_ranks(self) -> dict[str, int]:
        return {stage: count for stage, count in self.stage_processes.items() if stage not in SIDE_BY_SIDE}

    def side_by_side(self, stage: str) -> int:
        """Return the number of processes that share the work of a stage without torch."""
        return self.stage_processes.get(stage, 1) if stage in SIDE_BY_SIDE else 1


def readable(written: dict[str, Any]) -> dict[str, Any]:
    """Return the section ``launch`` of a plan of any version, without the fields that this version does not have.

    They can be dropped because machines decide no result. The former launcher ``kubernetes`` becomes ``local``.
    """
    found = _fields(LaunchConfig, written)
    for name, section, stage in (("slurm", SlurmConfig, SlurmNodes), ("kubernetes", KubernetesConfig, KubernetesPods)):
        held = found.pop(name, None) or {}
        stages = {each: _fields(stage, settings) for each, settings in held.get("stages", {}).items()}
        found[name] = _fields(section, held) | {"stages": stages}
    return found | ({"launcher": "local"} if found.get("launcher") == "kubernetes" else {})


def _fields(section: type[Section], written: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in written.items() if name in section.model_fields}
