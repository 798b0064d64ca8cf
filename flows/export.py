"""Bring a run's exported weights to where they are wanted."""

import itertools
from pathlib import Path

from cosmos_rl_core.errors import ConfigError
from flows.plan import read_plan
from flows.requests import Run
from stages.artifacts import Artifact, input_of, standing


def export(store_url: str, run_id: str, directory: str) -> list[str]:
    """Copy the newest export, every byte checked; returns what to tell people.

    Raises :class:`ConfigError` if there is none.
    """
    run = Run(read_plan(store_url, run_id), store_url)
    newest = None
    # Probed upwards: the run may have gone further than its plan said when it began.
    for k in itertools.count():
        if standing(run.policy_after(k))[1] is None:
            break
        newest = k if standing(run.export_slot(k))[1] is not None else newest
    if newest is None:
        raise ConfigError(f"{run_id} has exported nothing yet; run it to the end of its first stages")
    names = Artifact(input_of(run.export_slot(newest))).copy_to(Path(directory))
    return [f"policy {newest} of {run_id}: {len(names)} files in {directory}"]
