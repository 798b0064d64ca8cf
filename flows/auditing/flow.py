"""The audit as a Prefect flow: ``prefect deployment run audit/runs``, or on a schedule."""

from typing import Annotated

from prefect import flow
from pydantic import Field

from cosmos_rl_core.errors import ArtifactError, ConfigError, UnreadableError, counted, first_line
from cosmos_rl_core.storage import store as stores
from flows.auditing import audit as auditing
from flows.auditing.checks.faults import SHOWN, Findings
from flows.checking.checks import BEFORE_A_PLAN
from flows.defaults import store_of
from flows.planning.plan import PLAN_FILE, run_url
from flows.running import events
from flows.session.session import Place, RunId, ends_in_state


@flow(name="audit", description="Compare every byte of runs with its digest.")
@ends_in_state
def audit(
    run_id: RunId | None = None,
    quick: bool = False,
    head: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")] | None = None,
    store: Place | None = None,
) -> str:
    """Audit a run, or all runs of a store. The flow fails if anything is wrong.

    Args:
        run_id: Name of the run. Leave empty for all runs of the store.
        quick: Compare sizes only; read no media and no tensors.
        head: Digest of a head that was kept: the run must still have it.
        store: Directory or URL (s3://bucket/prefix) of all runs. Default: COSMOS_FLOWS_STORE where the flow runs, else
            outputs.
    """
    if head is not None and run_id is None:
        raise ConfigError("head is the digest of a head of one run; name that run in run_id, or leave head out")
    store = store_of(store)
    names = [run_id] if run_id else _runs(store)
    found = {name: _audited(store, name, head, quick=quick) for name in names}
    faults = {name: [f"{one.file} {one.field}: {one.what}" for one in found[name].faults] for name in names}
    for name in filter(faults.get, names):
        events.audit_failed(store, name, faults[name])
    if every := [fault for some in faults.values() for fault in some]:
        listed = [f"  {fault}" for fault in every[:SHOWN]]
        raise ArtifactError("\n".join([f"{counted(len(every), 'fault')} in {counted(len(names), 'run')}", *listed]))
    size = sum(one.size for one in found.values())
    return f"nothing is wrong with {counted(len(names), 'run')}, {size / 1e6:.1f} MB"


def _audited(store: str, name: str, head: str | None, *, quick: bool) -> Findings:
    """Return the findings of a run. A plan that this machine cannot use is a fault, so that other runs are audited."""
    try:
        return auditing.audit(store, name, head=head, quick=quick)
    except ConfigError as error:
        findings = Findings(stores.absolute(store).rstrip("/"))
        findings.add(stores.join(run_url(store, name), PLAN_FILE), "plan", first_line(error))
        return findings


def _runs(store: str) -> list[str]:
    """Return the names of the runs of a store, with or without a plan, that have files.

    Raises :class:`ConfigError` if there are none: a schedule with a mistyped store would otherwise report every night
    that nothing is wrong.
    """
    folder = stores.join(stores.absolute(store), "runs")
    names = sorted(name for name in stores.names(folder) if _has_files(stores.join(folder, name)))
    if not names:
        raise ConfigError(f"the store {stores.absolute(store)} has no runs; expected a folder {folder} with some")
    return names


def _has_files(url: str) -> bool:
    """Return whether a run's folder has files that are not written before a plan; True if it cannot be listed."""
    try:
        # The listing of a file is its own name.
        return bool(stores.names(url) - BEFORE_A_PLAN - {url.rpartition("/")[2]})
    except UnreadableError:
        return True
