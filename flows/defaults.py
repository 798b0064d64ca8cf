"""Defaults of options, which the command line shows without importing what uses them."""

import os

DEFAULT_STORE = "outputs"
"""Directory of all runs where nothing names a store."""
STORE_VARIABLE = "COSMOS_FLOWS_STORE"
"""Environment variable with the store of commands and flows that are given none."""
REPORTS_VARIABLE = "COSMOS_FLOWS_REPORTS"
"""Environment variable with the address of ``cosmos-flows report --serve``, which pages in Prefect link."""
REPORTS_PORT = 8090
"""Port of ``cosmos-flows report --serve``."""
GRACE_H = 24.0
"""Hours without a write after which an attempt counts as ended. Longer than any stage computes without writing."""
STOP_WAIT_S = 120.0
"""Seconds that a command waits for the end of a run that it stops: stages end first, on other machines too."""
SNAPSHOTS_KEPT = 3
"""Newest snapshots of a dataset that are kept, with all that they name."""


def served_report(run_id: str) -> str:
    """Return the address of a run's report on the server of :data:`REPORTS_VARIABLE`; "" if that is not set."""
    address = os.environ.get(REPORTS_VARIABLE, "").rstrip("/")
    return f"{address}/runs/{run_id}/report/index.html" if address else ""


def store_of(given: str | None) -> str:
    """Return the store that was given, else the one of :data:`STORE_VARIABLE` here, else :data:`DEFAULT_STORE`."""
    return given or os.environ.get(STORE_VARIABLE) or DEFAULT_STORE
