"""The audit as a Prefect flow: ``prefect deployment run audit/runs``, or on a schedule."""

from typing import Annotated

from prefect import flow
from pydantic import Field

from cosmos_rl_core.errors import ArtifactError, ConfigError
from cosmos_rl_core.storage import store as stores
from flows.auditing import audit as auditing
from flows.auditing.faults import SHOWN
from flows.defaults import DEFAULT_STORE
from flows.running.session import Place, RunId, ends_in_state


@flow(name="audit", description="Compare every byte of runs with its digest.")
@ends_in_state
def audit(
    run_id: RunId | None = None,
    quick: bool = False,
    head: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")] | None = None,
    store: Place = DEFAULT_STORE,
) -> str:
    """Audit a run, or all runs of a store. The flow fails if anything is wrong.

    Args:
        run_id: Name of the run. Leave empty for all runs of the store.
        quick: Compare sizes only; read no media and no tensors.
        head: Digest of a head that was kept: the run must still have it.
        store: Directory or URL (s3://bucket/prefix) of all runs.
    """
    if head is not None and run_id is None:
        raise ConfigError("head is the digest of a head of one run; name that run in run_id, or leave head out")
    names = [run_id] if run_id else _runs(store)
    found = {name: auditing.audit(store, name, head=head, quick=quick) for name in names}
    faults = [fault for one in found.values() for fault in one.faults]
    if faults:
        listed = [f"  {fault.file} {fault.field}: {fault.what}" for fault in faults[:SHOWN]]
        raise ArtifactError("\n".join([f"{len(faults)} faults in {len(names)} runs", *listed]))
    size = sum(one.size for one in found.values())
    return f"nothing is wrong with {len(names)} runs, {size / 1e6:.1f} MB"


def _runs(store: str) -> list[str]:
    """Return the names of the runs of a store: folders with files. Raises :class:`ConfigError` if there are none.

    A schedule with a mistyped store would otherwise report every night that nothing is wrong.
    """
    folder = stores.join(stores.absolute(store), "runs")
    # A file is listed as itself.
    names = sorted(name for name in stores.names(folder) if stores.names(stores.join(folder, name)) - {name})
    if not names:
        raise ConfigError(f"the store {stores.absolute(store)} has no runs; expected a folder {folder} with some")
    return names
