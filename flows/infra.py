"""The flight check as a Prefect flow: ``prefect deployment run infra/check``, or on a schedule."""

from dataclasses import asdict

from prefect import flow
from prefect.artifacts import create_table_artifact

from cosmos_rl_core.config.launch import LaunchConfig
from cosmos_rl_core.recipes.reading import launch_of
from flows.defaults import store_of
from flows.operations.flight_check import flight_check, require
from flows.session.session import Place, ends_in_state


@flow(name="infra", description="Check server, worker, GPUs, store and services.")
@ends_in_state
def check(store: Place | None = None, cluster: Place | None = None) -> str:
    """Check everything on the worker's machine. The flow fails if a check fails.

    Args:
        store: Directory or URL (s3://bucket/prefix) of all runs. Default: COSMOS_FLOWS_STORE where the flow runs, else
            outputs.
        cluster: Path of a cluster profile (TOML).
    """
    findings = flight_check(store_of(store), launch_of(cluster) if cluster else LaunchConfig())
    rows = [asdict(finding) for finding in findings]
    create_table_artifact(rows, key="infra-check", description="Results of the flight check")
    require(findings)
    return ", ".join(f"{f.name} {f.word}" for f in findings)
