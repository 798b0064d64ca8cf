"""Nodes of stages: a section for Ray, one for Slurm, one for Kubernetes, and prices."""

from typing import Annotated, TypeVar

from pydantic import Field

from cosmos_rl_core.config.base import Section

Name = Annotated[str, Field(pattern=r"^[^\s#=]+$")]


class Nodes(Section):
    """Machines of a stage. Under ``stages.<name>``, fields left out have the value for all stages."""

    nodes: int = Field(default=1, ge=1)
    """Number of machines. Ranks of a distributed stage are spread evenly over them; other stages run on the first."""
    gpus_per_node: int = Field(default=0, ge=0)
    """Number of GPUs of each machine. Each rank gets one."""
    cpus_per_node: int | None = Field(default=None, ge=1)
    """Number of CPU cores of each machine that a stage gets. Default: the scheduler's; with Ray one."""


class RayNodes(Nodes):
    """Nodes of a Ray cluster."""

    accelerator_type: Name | None = None
    """Kind of GPU, as Ray names it, e.g. ``H100`` or ``L4``. Default: any."""
    labels: dict[str, str] = {}
    """Labels that nodes must have (``ray start --labels``), e.g. ``{"ray.io/market-type" = "spot"}``."""


_R = TypeVar("_R", bound=Section)


class RayConfig(RayNodes):
    """Runs stages on the nodes of a Ray cluster."""

    address: str = Field(default="auto", min_length=1)
    """Address of the cluster, e.g. ``10.0.0.1:6379``. The flow's machine must have joined it, without resources:
    ``ray start --address=10.0.0.1:6379 --num-cpus=0 --num-gpus=0``. ``auto``: the cluster that it has joined."""
    head_timeout_s: float = Field(default=300.0, gt=0)
    """Seconds for which an attempt waits for a cluster that does not answer."""
    nodes_timeout_s: float = Field(default=600.0, ge=0)
    """Seconds for which a stage waits for nodes that the cluster does not have, such as nodes that an autoscaler adds.
    It waits without a limit for nodes that are in use."""
    stages: dict[str, RayNodes] = {}
    """Other nodes of single stages, e.g. ``[launch.ray.stages.rollout] accelerator_type = "L40S"``."""

    def resources_of(self, stage: str) -> RayNodes:
        """Return the nodes of one stage."""
        return _merged(self, RayNodes, self.stages.get(stage))


class SlurmNodes(Nodes):
    """Nodes of a Slurm job."""

    partition: Name | None = None
    """Slurm partition. Default: Slurm's default partition."""
    time_limit_min: int | None = Field(default=None, ge=1)
    """Minutes after which Slurm ends the job. Default: the partition's limit."""
    options: tuple[Annotated[str, Field(pattern=r"^--\S.*$")], ...] = ()
    """Additional options of ``sbatch``, e.g. ``["--account=mine", "--constraint=h100"]``."""
    srun_options: tuple[Annotated[str, Field(pattern=r"^--\S.*$")], ...] = ()
    """Additional options of each stage's ``srun``, e.g. ``["--container-image=/images/cosmos.sqsh"]``."""


class SlurmConfig(SlurmNodes):
    """Runs stages as steps of the Slurm job in which the flow runs; ``cosmos-flows cluster render slurm`` writes the
    batch script of this job, or the scripts of a Ray cluster (``launcher = "ray"``)."""

    work_dir: str | None = Field(default=None, min_length=1)
    """Directory on a file system that all nodes share, for Requests and logs of running stages. Default: the run's
    directory, if the store is a directory."""
    setup: tuple[str, ...] = ()
    """Lines of shell at the start of the batch script, e.g. ``["module load cuda"]``."""
    stages: dict[str, SlurmNodes] = {}
    """Other settings of single stages, e.g. ``[launch.slurm.stages.update] nodes = 2``; with Ray, other settings of the
    nodes that ``[launch.ray.stages.<name>]`` gives single stages, e.g. ``partition = "l40s"``."""

    def resources_of(self, stage: str) -> SlurmNodes:
        """Return the settings of one stage."""
        return _merged(self, SlurmNodes, self.stages.get(stage))


class Volume(Section):
    """A volume of each pod, with weights or data."""

    claim: Name
    """Name of a PersistentVolumeClaim of the namespace."""
    path: str = Field(pattern=r"^/\S*$")
    """Folder in which containers see it."""
    read_only: bool = True
    """Whether pods only read it."""


class KubernetesPods(Section):
    """Pods that are nodes of a Ray cluster."""

    memory_gb_per_node: int | None = Field(default=None, ge=1)
    """Memory of each pod in GiB; Kubernetes kills a pod that exceeds it. Default: no limit."""
    gpu_resource: Name = "nvidia.com/gpu"
    """Name of the cluster's GPU resource."""
    node_selector: dict[str, str] = {}
    """Labels that machines must have."""
    tolerations: tuple[Name, ...] = ()
    """Keys of taints of machines that pods accept, e.g. ``["nvidia.com/gpu"]``."""
    min_nodes: int | None = Field(default=None, ge=0)
    """Number of pods that stay when no stage needs them. Default: the number that a stage needs."""


class KubernetesConfig(KubernetesPods):
    """Pods of the Ray cluster and of the flow that ``cosmos-flows cluster render kuberay`` writes (KubeRay)."""

    image: str = Field(default="", pattern=r"^\S*$")
    """Container image with this project and its extra ``ray`` installed."""
    namespace: Name = "default"
    """Namespace of all objects."""
    service_account: Name | None = None
    """Service account of the pods. Default: the namespace's default account."""
    secrets: tuple[Name, ...] = ()
    """Names of secrets whose keys become environment variables, e.g. the store's credentials. Values are never sent."""
    shared_memory_gb: int = Field(default=16, ge=1)
    """Size of ``/dev/shm`` in GiB, which ranks of one node use to communicate."""
    volumes: tuple[Volume, ...] = ()
    """Volumes of all pods."""
    stages: dict[str, KubernetesPods] = {}
    """Other settings of the pods that ``[launch.ray.stages.<name>]`` gives single stages, e.g.
    ``[launch.kubernetes.stages.rollout] node_selector = {gpu = "l40s"}``."""

    def pods_of(self, stage: str) -> KubernetesPods:
        """Return the settings of the pods of one stage."""
        return _merged(self, KubernetesPods, self.stages.get(stage))


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
    """Price of 10^9 bytes read from the store."""
    written_gb: float = Field(default=0.0, ge=0)
    """Price of 10^9 bytes written to the store."""


def _merged(every_stage: Section, kind: type[_R], one_stage: _R | None) -> _R:
    own = {} if one_stage is None else one_stage.model_dump(exclude_unset=True)
    return kind.model_validate(every_stage.model_dump(include=set(kind.model_fields)) | own)
