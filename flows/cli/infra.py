"""Commands for what runs need: Prefect, GPUs, stores, services."""

from importlib import import_module
from typing import Annotated

import typer
from typer import Option

from cosmos_rl_core.errors import ConfigError
from flows.cli.command import ClusterOption, JsonOption, StoreOption, command, print_json, print_parts
from flows.defaults import DEFAULT_STORE

infra_app = typer.Typer(no_args_is_help=True, help="Set up and check Prefect, GPUs and services.")


GPUS = Option(min=0, help="Slots of the limit `gpus`; default: unchanged, 8 if it is new")


@command(infra_app, "init")
def infra_init(
    gpus: Annotated[int | None, GPUS] = None,
    pool_type: Annotated[str, Option(help="Work pool: process, kubernetes, ...")] = "process",
) -> None:
    """Create the work pool, its queues, the limit for GPUs and the automation for crashed flow runs. Safe to repeat.

    Examples:
        cosmos-flows infra init --gpus 8
    """
    if import_module("flows.running.server").named_server() is None:
        raise ConfigError(
            "no Prefect server is named: start one with `prefect server start`, then `prefect config set "
            "PREFECT_API_URL=http://127.0.0.1:4200/api`"
        )
    print_parts(*import_module("flows.operations.pools").set_up(gpus, pool_type))


@command(infra_app, "check")
def infra_check(store: StoreOption = DEFAULT_STORE, cluster: ClusterOption = None, as_json: JsonOption = False) -> None:
    """Check server, pool, worker, GPUs, ranks, store and services. Exit with 75 if a check fails.

    Examples:
        cosmos-flows infra check --store s3://bucket/prefix
        cosmos-flows infra check --cluster deployments/clusters/eight-gpus.toml --json
    """
    check = import_module("flows.operations.flight_check")
    config = import_module("cosmos_rl_core.recipes.reading")
    launch = config.launch_of(cluster) if cluster else config.LaunchConfig()
    findings = check.flight_check(store, launch)
    print_json(findings) if as_json else print_parts(check.table(findings))
    check.require(findings)
