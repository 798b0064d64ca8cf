"""Preparation of a dataset as a Prefect flow: ``prefect deployment run preprocess/local``, or on a schedule."""

import time
from collections.abc import Sequence
from contextlib import closing
from functools import partial
from typing import cast
from uuid import UUID

from prefect import flow, get_run_logger
from prefect.artifacts import create_progress_artifact, create_table_artifact, update_progress_artifact
from prefect.runtime import deployment, flow_run

from cosmos_rl_core.recipes.dataset import DatasetConfig, read_dataset
from flows.defaults import store_of
from flows.devices.fitting import misfits_of
from flows.operations import preprocess as operation
from flows.running import events, gpus, pauses
from flows.running.display import Display
from flows.running.launch import launch
from flows.running.progress import INTERVAL_S, Reporter, slowest_of
from flows.running.wave import Waves
from flows.session.session import Override, Place, ends_in_state
from stages.artifacts import snapshots
from stages.execution.outcome import Status


class _Progress(Reporter):
    """A reporter that also shows the progress of the dataset's stages as an artifact of the flow run."""

    def __init__(self, root: str, dataset: str) -> None:
        super().__init__(root)
        self._dataset = dataset
        self._shown: tuple[str, int, UUID] | None = None
        self._shown_s = 0.0

    def working(self, wave: str, statuses: Sequence[Status]) -> None:
        """Write the progress of a stage, and show it every few seconds."""
        super().working(wave, statuses)
        at, now_s = slowest_of(statuses), time.monotonic()
        percent = 100 * at.step // max(at.total, 1)
        if self._shown is None or self._shown[0] != wave:
            key = f"{_key(self._dataset)}-progress"
            made = create_progress_artifact(percent, key=key, description=f"{wave} of {self._dataset}")
            self._shown, self._shown_s = (wave, percent, cast("UUID", made)), now_s
        elif percent != self._shown[1] and now_s - self._shown_s >= INTERVAL_S:
            update_progress_artifact(self._shown[2], percent)
            self._shown, self._shown_s = (wave, percent, self._shown[2]), now_s

    def done(self) -> None:
        """Show that a stage is done."""
        super().done()
        if self._shown is not None:
            update_progress_artifact(self._shown[2], 100)
            self._shown = None


def _key(dataset: str) -> str:
    """Return the key of a dataset's artifacts in Prefect."""
    return f"dataset-{dataset.lower().replace('_', '-')}"


def dataset_name() -> str:
    """Return the flow run's name in the UI."""
    return str(flow_run.get_parameters()["dataset"])


@flow(name="preprocess", description="Bring a dataset up to date with its files.", flow_run_name=dataset_name)
@ends_in_state
def preprocess(
    dataset: Place,
    store: Place | None = None,
    overrides: list[Override] | None = None,
    cluster: Place | None = None,
    verify: bool = False,
    merge: bool = False,
) -> str:
    """Index and caption new and changed items, write the next snapshot, and encode it for the named recipes.

    Args:
        dataset: Path of the TOML file of the dataset.
        store: Directory or URL (s3://bucket/prefix) of all datasets and runs. Default: COSMOS_FLOWS_STORE where the
            flow runs, else outputs.
        overrides: Settings of the file to change, one in each line: section.key=value.
        cluster: Path of a cluster profile (TOML).
        verify: Read all files, even if they look unchanged.
        merge: Read all files and make one part of all items.
    """
    store = store_of(store)

    def misfits(config: DatasetConfig) -> list[str]:
        return misfits_of(config.launch, operation.stages_of(config), gpus.gpu_slots, runs_here=True)

    config = read_dataset(dataset, tuple(overrides or ()), cluster, misfits)
    root = snapshots.root_of(store, config.name)
    log = get_run_logger().info if deployment.get_id() else None
    with _Progress(root, config.name) as reporter:
        shown = Display(log, reporter)
        # Package versions and machines may differ between parts of a dataset: each part records its own.
        gpu_slots, suspended = gpus.gpu_slots(config.launch), pauses.stop_if_suspended
        waves = Waves(root, config.launch, shown, allow_numerics_change=True, check=suspended, gpu_slots=gpu_slots)
        with shown, closing(waves):
            make = partial(launch, waves)
            snapshot, added = operation.preprocess(config, store, make, verify=verify, merge=merge)
            for name, request in operation.missing(config, store):
                make(name, request)
            shown.note(operation.outcome_of(snapshot, added))
    if added is not None:
        events.dataset_prepared(store, snapshot)
        words = f"Snapshot {snapshot.number} of {config.name}"
        create_table_artifact([operation.table_row(added)], key=_key(config.name), description=words)
    return operation.outcome_of(snapshot, added)
