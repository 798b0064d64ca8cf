"""The command that checks what runs need."""

from importlib import import_module
from typing import Any

from cosmos_rl_core.config.launch import LaunchConfig
from cosmos_rl_core.recipes.reading import launch_of
from flows.cli.base.options import ClusterOption, JsonOption, StoreOption
from flows.cli.base.printing import print_found
from flows.defaults import DEFAULT_STORE


def check(store: StoreOption = DEFAULT_STORE, cluster: ClusterOption = None, as_json: JsonOption = False) -> None:
    """Check server, pool, worker, GPUs, ranks, store and services. Exit with 75 if a check fails.

    Examples:
        cosmos-flows infra check --store s3://bucket/prefix
        cosmos-flows infra check --cluster deployments/clusters/eight-gpus.toml --json
    """
    launch = launch_of(cluster) if cluster else LaunchConfig()
    check: Any = import_module("flows.operations.flight_check")  # asks Prefect
    findings = check.flight_check(store, launch)
    print_found(findings, [check.table(findings)], as_json=as_json)
    check.require(findings)
