"""Defaults of options. The command line shows them without importing the modules that use them."""

import os

DEFAULT_STORE = "outputs"
"""Directory of all runs where nothing names a store."""
STORE_VARIABLE = "COSMOS_FLOWS_STORE"
"""Environment variable: the store of commands and flows that name no store."""
REPORTS_VARIABLE = "COSMOS_FLOWS_REPORTS"
"""Environment variable: the address of the server ``cosmos-flows report --serve``. Pages in Prefect link to it."""
REPORTS_PORT = 8090
"""Port of ``cosmos-flows report --serve``."""
GRACE_H = 24.0
"""Hours without a write after which an attempt counts as ended. Longer than any stage computes without writing."""
STOP_WAIT_S = 120.0
"""Seconds that a command waits until a run that it stops has ended. Its stages end first, on other machines too."""
SNAPSHOTS_KEPT = 3
"""Number of snapshots of a dataset that ``gc`` keeps: the newest, with everything that they name."""


def served_report(run_id: str) -> str:
    """Return the address of a run's report on the server of :data:`REPORTS_VARIABLE`; "" if that is not set."""
    address = os.environ.get(REPORTS_VARIABLE, "").rstrip("/")
    return f"{address}/runs/{run_id}/report/index.html" if address else ""


def store_of(given: str | None) -> str:
    """Return the given store, else the value of :data:`STORE_VARIABLE`, else :data:`DEFAULT_STORE`."""
    return given or os.environ.get(STORE_VARIABLE) or DEFAULT_STORE
