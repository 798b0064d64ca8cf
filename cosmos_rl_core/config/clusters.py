"""Resources that a stage requests from a cluster: a section for Ray, one for Slurm, one for Kubernetes."""

from typing import Annotated, TypeVar

from pydantic import Field, model_validator

from cosmos_rl_core.config.base import Section

Name = Annotated[str, Field(pattern=r"^[^\s#=]+$")]


class Nodes(Section):
    """Machines of a stage. Under ``stages.<name>``, fields left out have the value for all stages."""

    nodes: int = Field(default=1, ge=1)
    """Number of machines. Ranks of a distributed stage are spread evenly over them; other stages run on the first."""
    gpus_per_node: int = Field(default=0, ge=0)
    """Number of GPUs to request on each machine. With Ray: GPUs that a machine has, of which each rank gets one."""
    cpus_per_node: int | None = Field(default=None, ge=1)
    """Number of CPU cores to request on each machine. Default: the scheduler's; with Ray one."""


class Resources(Nodes):
    """Resources of one allocation of a scheduler."""

    time_limit_min: int | None = Field(default=None, ge=1)
    """Minutes after which the scheduler ends the allocation; its stage is then retried in a new one. Default: the
    scheduler's."""


class SlurmResources(Resources):
    """Resources of one Slurm job."""

    partition: Name | None = None
    """Slurm partition. Default: Slurm's default partition."""
    options: tuple[Annotated[str, Field(pattern=r"^--\S.*$")], ...] = ()
    """Additional options of ``sbatch``, e.g. ``["--account=mine", "--constraint=h100"]``."""
    srun_options: tuple[Annotated[str, Field(pattern=r"^--\S.*$")], ...] = ()
    """Additional options of each stage's ``srun``, e.g. ``["--container-image=/images/cosmos.sqsh"]``."""


class KubernetesResources(Resources):
    """Resources of one Kubernetes Job, or of a JobSet for several nodes."""

    image: str = Field(default="", pattern=r"^\S*$")
    """Container image with this project installed; every stage needs one."""
    memory_gb_per_node: int | None = Field(default=None, ge=1)
    """Memory limit on each node, in GiB; the cluster kills stages that exceed it. Default: no limit."""
    gpu_resource: Name = "nvidia.com/gpu"
    """Name of the cluster's GPU resource."""
    node_selector: dict[str, str] = {}
    """Labels that nodes must have."""


class RayNodes(Nodes):
    """Nodes of a Ray cluster."""

    accelerator_type: Name | None = None
    """Kind of GPU, as Ray names it, e.g. ``H100`` or ``L4``. Default: any."""
    labels: dict[str, str] = {}
    """Labels that nodes must have (``ray start --labels``), e.g. ``{"ray.io/market-type" = "spot"}``."""


_R = TypeVar("_R", bound=Nodes)


class Holding(Section):
    """Settings of the allocations that a flow keeps."""

    hold: bool = True
    """Keep an allocation for the following stages that request the same resources, so that only the first stage waits.
    ``false`` requests a new allocation for every stage, without GPUs for stages that need none."""
    idle_s: float = Field(default=600.0, gt=0)
    """Seconds after which an idle held allocation ends if no flow contacts it."""
    query_s: float = Field(default=10.0, gt=0)
    """Seconds between queries to the scheduler for the state of an allocation; stages are watched without it."""


class SlurmConfig(SlurmResources, Holding):
    """Runs stages as steps of Slurm jobs."""

    work_dir: str | None = Field(default=None, min_length=1)
    """Directory on a file system that the flow and all nodes share, for logs and for messages between flow and
    allocation. Default: inside the run's directory, if the store is a directory."""
    setup: tuple[str, ...] = ()
    """Lines of shell at the start of the batch script, e.g. ``["module load cuda"]``."""
    stages: dict[str, SlurmResources] = {}
    """Other resources of single stages, e.g. ``[launch.slurm.stages.rollout] partition = "l40s"``."""

    def resources_of(self, stage: str) -> SlurmResources:
        """Return the resources of one stage."""
        return _merged(self, SlurmResources, self.stages.get(stage))


class KubernetesConfig(KubernetesResources, Holding):
    """Runs stages in the pods of Kubernetes Jobs."""

    namespace: Name = "default"
    """Namespace of the Jobs."""
    service_account: Name | None = None
    """Service account of the pods. Default: the namespace's default account."""
    secrets: tuple[Name, ...] = ()
    """Names of secrets whose keys become environment variables, e.g. the store's credentials. Values are never sent."""
    shared_memory_gb: int = Field(default=16, ge=1)
    """Size of ``/dev/shm`` in GiB, which ranks of one node use to communicate."""
    keep_finished_s: int = Field(default=3600, ge=0)
    """Seconds that ended Jobs and their logs are kept."""
    stages: dict[str, KubernetesResources] = {}
    """Other resources of single stages, e.g. ``[launch.kubernetes.stages.rollout] gpus_per_node = 2``."""

    @model_validator(mode="after")
    def _has_image(self) -> "KubernetesConfig":
        if not self.image:
            raise ValueError("launch.kubernetes.image must name an image with this project in it")
        return self

    def resources_of(self, stage: str) -> KubernetesResources:
        """Return the resources of one stage."""
        return _merged(self, KubernetesResources, self.stages.get(stage))


class RayConfig(RayNodes):
    """Runs stages on the nodes of a Ray cluster."""

    address: str = Field(default="auto", min_length=1)
    """Address of the cluster, e.g. ``10.0.0.1:6379``. The flow's machine must have joined it, without resources:
    ``ray start --address=10.0.0.1:6379 --num-cpus=0 --num-gpus=0``. ``auto``: the cluster that it has joined."""
    head_timeout_s: float = Field(default=300.0, gt=0)
    """Seconds for which an attempt waits for a cluster that does not answer."""
    nodes_timeout_s: float = Field(default=600.0, ge=0)
    """Seconds for which a stage waits for nodes that the cluster does not have, such as those that an autoscaler adds.
    It waits for nodes that others use without a limit."""
    stages: dict[str, RayNodes] = {}
    """Other nodes of single stages, e.g. ``[launch.ray.stages.rollout] accelerator_type = "L40S"``."""

    def resources_of(self, stage: str) -> RayNodes:
        """Return the nodes of one stage."""
        return _merged(self, RayNodes, self.stages.get(stage))


class PricesConfig(Section):
    """Prices of machines, for ``cosmos-flows cost``. Nothing else reads them."""

    currency: str = Field(default="USD", min_length=1)
    """Unit of all prices."""
    device_hour: float = Field(default=0.0, ge=0)
    """Price of an hour of one device: of one GPU, or of one rank on a CPU."""
    stage_device_hour: dict[str, Annotated[float, Field(ge=0)]] = {}
    """Prices of device hours of single stages, e.g. ``{rollout = 1.2}`` where rollouts use other GPUs."""
    process_hour: float = Field(default=0.0, ge=0)
    """Price of an hour of any stage's process besides its devices."""
    read_gb: float = Field(default=0.0, ge=0)
    """Price of 10^9 bytes from the store."""
    written_gb: float = Field(default=0.0, ge=0)
    """Price of 10^9 bytes to the store."""


def _merged(every_stage: Nodes | Holding, kind: type[_R], one_stage: _R | None) -> _R:
    own = {} if one_stage is None else one_stage.model_dump(exclude_unset=True)
    return kind.model_validate(every_stage.model_dump(include=set(kind.model_fields)) | own)
