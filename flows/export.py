"""Bring a run's exported weights to where they are wanted."""

from pathlib import Path

from cosmos_rl_core.errors import ConfigError
from flows.status import states
from flows.steps import open_run
from stages.artifacts import Artifact, input_of


def export(store_url: str, run_id: str, directory: str) -> list[str]:
    """Copy the newest export that stands, every byte checked; returns what to tell people.

    Raises :class:`ConfigError` if there is none.
    """
    exports = [state for state in states(open_run(store_url, run_id)) if state.step.stage == "export"]
    standing = [state for state in exports if state.word == "stands"]
    if not standing:
        raise ConfigError(
            f"{run_id} has exported nothing that stands; run it, or look at `cosmos-flows status {run_id}`"
        )
    newest = standing[-1].step
    names = Artifact(input_of(newest.slot)).copy_to(Path(directory))
    passed_over = [f"{state.step.name} is {state.word}" for state in exports if (state.step.k or 0) > (newest.k or 0)]
    return [f"policy {newest.k} of {run_id}: {len(names)} files in {directory}", *passed_over]
