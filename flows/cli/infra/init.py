"""The command that sets up a Prefect server."""

from importlib import import_module
from typing import Annotated, Any

from typer import Option

from cosmos_rl_core.errors import ConfigError
from flows.cli.base.options import JsonOption
from flows.cli.base.printing import print_found
from flows.running.server import named_server

GPUS = Option(min=0, help="Slots of the limit `gpus`; default: unchanged, 8 if it is new")
MESSAGE = Option(metavar="TYPE/NAME", help="Block of Prefect that tells of suspended runs: slack-webhook/team")
AUDIT = Option(metavar="FLOW/NAME", help="Deployment that audits each finished run: audit/runs")
PREPARE = Option(metavar="FLOW/NAME", help="Deployment for new files of its dataset: preprocess/local; may be repeated")


def init(
    gpus: Annotated[int | None, GPUS] = None,
    pool_type: Annotated[str, Option(help="Work pool: process, kubernetes, ...")] = "process",
    message: Annotated[str | None, MESSAGE] = None,
    audit: Annotated[str | None, AUDIT] = None,
    prepare: Annotated[list[str] | None, PREPARE] = None,
    as_json: JsonOption = False,
) -> None:
    """Create the work pool, its queues, the limit for GPUs and automations. Safe to repeat.

    The automation for crashed flow runs is always made, the others only with their options.

    Examples:
        cosmos-flows infra init --gpus 8
        cosmos-flows infra init --message slack-webhook/team --audit audit/runs --prepare preprocess/local
    """
    if named_server() is None:
        raise ConfigError(
            "no Prefect server is named: start one with `prefect server start`, then `prefect config set "
            "PREFECT_API_URL=http://127.0.0.1:4200/api`"
        )
    pools: Any = import_module("flows.operations.pools")  # asks Prefect
    wanted = import_module("flows.operations.automations").Wanted(message, audit, tuple(prepare or ()))
    found = pools.set_up(gpus, pool_type, wanted)
    print_found(found, found.lines(), as_json=as_json)
