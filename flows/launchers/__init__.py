"""Who starts stage processes: a file each, named by ``launch.launcher``."""

import importlib
from collections.abc import Mapping

from cosmos_rl_core.config.launch import LaunchConfig
from cosmos_rl_core.errors import ConfigError
from flows.launchers._base import JobLauncher
from stages.contracts import STAGES


def load(run_url: str, config: LaunchConfig) -> JobLauncher:
    """The launcher that a cluster profile names. Imports no other."""
    try:
        launcher = importlib.import_module(f"flows.launchers.{config.launcher}")
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"launcher = {config.launcher!r} needs {error.name}: pip install '.[{config.launcher}]'"
        ) from error
    return launcher.JobLauncher(run_url, config)


def misplaced(launch: LaunchConfig) -> list[str]:
    """Settings that name no stage, or none that has ranks."""
    distributed = {"stage_processes": launch.stage_processes, "stage_gpus": launch.stage_gpus}
    any_stage = {"stage_time_limits_s": launch.stage_time_limits_s, "slurm.stages": launch.slurm.stages}
    any_stage |= {} if launch.kubernetes is None else {"kubernetes.stages": launch.kubernetes.stages}
    known = sorted(name for name, stage in STAGES.items() if stage.distributed)
    return [*_unknown(distributed, "distributed stage", known), *_unknown(any_stage, "stage", sorted(STAGES))]


def _unknown(fields: Mapping[str, Mapping[str, object]], what: str, known: list[str]) -> list[str]:
    return [
        f"launch.{field}.{name}: no {what} of that name; known: {', '.join(known)}"
        for field, stages in fields.items()
        for name in stages
        if name not in known
    ]
