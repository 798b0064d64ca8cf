"""What a stage asks of a cluster's scheduler: one closed section for Slurm, one for Kubernetes."""

from typing import Annotated, Any

from pydantic import Field, model_validator

from cosmos_rl_core.config.base import Section

Name = Annotated[str, Field(pattern=r"^[^\s#=]+$")]


class Resources(Section):
    """Resources of one allocation. Under ``stages.<name>`` a field that is not set is that of every stage."""

    nodes: int = Field(default=1, ge=1)
    """Machines. The ranks of a distributed stage are spread over them evenly; any other stage runs on the first."""
    gpus_per_node: int = Field(default=0, ge=0)
    """GPUs asked for on each machine; 0 asks for none."""
    cpus_per_node: int | None = Field(default=None, ge=1)
    """CPU cores asked for on each machine. None: the scheduler's default."""
    time_limit_min: int | None = Field(default=None, ge=1)
    """Minutes after which the scheduler ends the allocation and what runs in it, to be tried again in another one.
    None: the scheduler's default."""


class SlurmResources(Resources):
    """Resources of one Slurm job."""

    partition: Name | None = None
    """Where it runs. None: Slurm's default partition."""
    options: tuple[Annotated[str, Field(pattern=r"^--\S.*$")], ...] = ()
    """More options of ``sbatch``, e.g. ``["--account=mine", "--constraint=h100"]``."""
    srun_options: tuple[Annotated[str, Field(pattern=r"^--\S.*$")], ...] = ()
    """More options of each stage's ``srun``, e.g. ``["--container-image=/images/cosmos.sqsh"]``."""


class KubernetesResources(Resources):
    """Resources of one Job, or of a JobSet for several nodes."""

    image: str = Field(default="", pattern=r"^\S*$")
    """Container image with this project in it; every stage needs one."""
    memory_gb_per_node: int | None = Field(default=None, ge=1)
    """Memory asked for on each node, in GiB; a stage that takes more is killed. None: no limit."""
    gpu_resource: Name = "nvidia.com/gpu"
    """What the cluster calls a GPU."""
    node_selector: dict[str, str] = {}
    """Labels that a node must have."""


class Holding(Section):
    """How a flow deals with its allocations."""

    hold: bool = True
    """Keep an allocation from stage to stage, so that only the first one waits for it; stages that ask for the same
    share it. False asks for a new one for every stage, and for no GPU where a stage does not need any."""
    idle_s: float = Field(default=600.0, gt=0)
    """A held allocation in which nothing runs gives itself back when no flow has been heard of for this long."""
    query_s: float = Field(default=10.0, gt=0)
    """How often the scheduler is asked how an allocation is; stages are watched without it."""


class SlurmConfig(SlurmResources, Holding):
    """Stages as steps of Slurm jobs."""

    work_dir: str | None = Field(default=None, min_length=1)
    """Directory on a file system that the flow and all nodes share, for logs and what flow and allocation tell each
    other. None: in the run's own directory, if the store is one."""
    setup: tuple[str, ...] = ()
    """Lines of shell that the batch script begins with, e.g. ``["module load cuda"]``."""
    stages: dict[str, SlurmResources] = {}
    """What single stages ask for instead, e.g. ``[launch.slurm.stages.rollout] partition = "l40s"``."""

    def resources_of(self, stage: str) -> SlurmResources:
        """Resources of one stage."""
        return SlurmResources.model_validate(_merged(self, SlurmResources, self.stages.get(stage)))


class KubernetesConfig(KubernetesResources, Holding):
    """Stages in the pods of Jobs."""

    namespace: Name = "default"
    """Where the Jobs go."""
    service_account: Name | None = None
    """Whose rights the pods have. None: the namespace's default."""
    secrets: tuple[Name, ...] = ()
    """Secrets whose keys become environment variables, e.g. the store's credentials. Only their names are ever sent."""
    shared_memory_gb: int = Field(default=16, ge=1)
    """Size of ``/dev/shm``, in GiB, which ranks of one node use to talk to each other."""
    keep_finished_s: int = Field(default=3600, ge=0)
    """Ended Jobs and their pods' logs stay for this long."""
    stages: dict[str, KubernetesResources] = {}
    """What single stages ask for instead."""

    @model_validator(mode="after")
    def _has_image(self) -> "KubernetesConfig":
        if not self.image:
            raise ValueError("launch.kubernetes.image must name a container image with this project in it")
        return self

    def resources_of(self, stage: str) -> KubernetesResources:
        """Resources of one stage."""
        return KubernetesResources.model_validate(_merged(self, KubernetesResources, self.stages.get(stage)))


def _merged(every_stage: Section, kind: type[Section], one_stage: Section | None) -> dict[str, Any]:
    own = {} if one_stage is None else one_stage.model_dump(exclude_unset=True)
    return every_stage.model_dump(include=set(kind.model_fields)) | own
