"""A flow whose only stage has two GPUs of a limit: ``python -m tests.e2e.sharing RUN LIMIT LEASE_S REQUEST``."""

import sys
from contextlib import closing

from prefect import flow

from cosmos_rl_core.config.launch import LaunchConfig
from flows.running import gpus
from flows.running.display import Display
from flows.running.launch import launch
from flows.running.wave import Waves
from stages.artifacts.request import Request


def one_try(limit: str) -> LaunchConfig:
    """One try, on this machine, for stages on two GPUs."""
    return LaunchConfig(gpu_limit=limit, max_attempts=1, stage_gpus={"report": (0, 1)})


@flow(name="sharing", retries=0)
def share(run_url: str, limit: str, request: str) -> None:
    """Make one stage."""
    with closing(Waves(run_url, one_try(limit), Display())) as waves:
        launch(waves, "stage", Request.model_validate_json(request))


if __name__ == "__main__":
    gpus.LEASE_S = float(sys.argv[3])
    share(sys.argv[1], sys.argv[2], sys.argv[4])
