"""Launch settings that name stages which do not exist, or which are not of the kind that the setting is for."""

from collections.abc import Iterable

from cosmos_rl_core.config.launch import SIDE_BY_SIDE, LaunchConfig
from stages.registry import STAGES


def misplaced(launch: LaunchConfig) -> list[str]:
    """Return a message for each setting that names an unknown stage, or a stage without ranks where it needs them."""
    distributed = sorted(name for name, stage in STAGES.items() if stage.distributed)
    several = sorted({*distributed, *SIDE_BY_SIDE})
    elastic = sorted(name for name, stage in STAGES.items() if stage.elastic)
    return [
        *_unknown("stage_processes", launch.stage_processes, "stage of several processes", several),
        *_unknown("elastic.stages", launch.elastic.stages if launch.elastic else (), "elastic stage", elastic),
        *_unknown("stage_gpus", launch.stage_gpus, "distributed stage", distributed),
        *_unknown("stage_device_memory_gb", launch.stage_device_memory_gb, "distributed stage", distributed),
        *_unknown("stage_time_limits_s", launch.stage_time_limits_s, "stage", sorted(STAGES)),
        *_unknown("ray.stages", launch.ray.stages, "stage", sorted(STAGES)),
        *_unknown("slurm.stages", launch.slurm.stages, "stage", sorted(STAGES)),
        *_unknown("kubernetes.stages", launch.kubernetes.stages, "stage", sorted(STAGES)),
    ]


def _unknown(field: str, names: Iterable[str], what: str, known: list[str]) -> list[str]:
    message = f"unknown {what}; known: {', '.join(known)}"
    return [f"launch.{field}.{name}: {message}" for name in names if name not in known]
