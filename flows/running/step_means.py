"""Numbers of an iteration from its optimizer steps, for the run's log and for its table in Prefect."""

import importlib
from collections.abc import Iterable
from typing import Any

from cosmos_rl_core.errors import CosmosRLError
from stages.artifacts.files import read_entry
from stages.artifacts.manifest import Manifest
from stages.contracts import METRICS

MEASURED = ("kl", "loss", "data_loss", "grad_norm")
"""Columns of ``metrics.parquet`` whose means are shown. An algorithm lacks the columns that it does not measure."""


def means_of(steps: Any, names: Iterable[str] = MEASURED) -> dict[str, float]:
    """Return the means of columns over the optimizer steps, without missing values. Leave out columns without any."""
    return {name: float(steps[name].mean()) for name in names if name in steps and steps[name].notna().any()}


def shown_of(manifest: Manifest) -> dict[str, Any]:
    """Return the summary of an artifact without its seconds; numbers of optimizer steps are their means.

    Empty if the table of an update cannot be read: the next stage reads it too, and raises the error.
    """
    summary = {name: value for name, value in manifest.summary.items() if name != "seconds"}
    if METRICS not in manifest.files:
        return summary
    # Imported here because Prefect imports this file again to cancel a flow run.
    tables = importlib.import_module("stages.formats.tables")
    try:
        steps = tables.from_parquet(read_entry(manifest.slot, manifest.files[METRICS]))
    except CosmosRLError:
        return {}
    measured = means_of(steps, dict.fromkeys((*summary, *MEASURED)))
    return {name: value for name, value in summary.items() if name not in steps} | measured
