"""The command that sets up a Prefect server."""

from importlib import import_module
from typing import Annotated, Any

from typer import Option

from cosmos_rl_core.errors import ConfigError
from flows.cli.base.options import JsonOption
from flows.cli.base.printing import print_found
from flows.running.server import named_server

GPUS = Option(min=0, help="Slots of the limit `gpus`; default: unchanged, 8 if it is new")


def init(
    gpus: Annotated[int | None, GPUS] = None,
    pool_type: Annotated[str, Option(help="Work pool: process, kubernetes, ...")] = "process",
    as_json: JsonOption = False,
) -> None:
    """Create the work pool, its queues, the limit for GPUs and the automation for crashed flow runs. Safe to repeat.

    Examples:
        cosmos-flows infra init --gpus 8
    """
    if named_server() is None:
        raise ConfigError(
            "no Prefect server is named: start one with `prefect server start`, then `prefect config set "
            "PREFECT_API_URL=http://127.0.0.1:4200/api`"
        )
    pools: Any = import_module("flows.operations.pools")  # asks Prefect
    found = pools.set_up(gpus, pool_type)
    print_found(found, found.lines(), as_json=as_json)
