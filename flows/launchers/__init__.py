"""Launchers of stage processes: one file each, named by ``launch.launcher``."""

import importlib

from cosmos_rl_core.config.launch import LaunchConfig
from cosmos_rl_core.errors import ConfigError
from flows.launchers._base import JobLauncher


def load(run_url: str, config: LaunchConfig) -> JobLauncher:
    """Return the launcher that a cluster profile names, and import no other.

    Raises :class:`ConfigError` if a package that it needs is not installed.
    """
    try:
        launcher = importlib.import_module(f"flows.launchers.{config.launcher}")
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"launcher = {config.launcher!r} needs {error.name}: pip install '.[{config.launcher}]'"
        ) from error
    return launcher.JobLauncher(run_url, config)
