"""The command that ends a run."""

from typing import Annotated

from typer import Option

from flows.cli.base.options import JsonOption, RunArgument, StoreOption
from flows.cli.base.printing import print_found
from flows.defaults import DEFAULT_STORE, STOP_WAIT_S
from flows.operations import stop as operation


def stop(
    run_id: RunArgument,
    store: StoreOption = DEFAULT_STORE,
    wait: Annotated[float, Option(min=0, help="Seconds to wait for its end")] = STOP_WAIT_S,
    as_json: JsonOption = False,
) -> None:
    """End a run at work, on whatever machine, by hand or under a Prefect worker. Its command continues it.

    Finished stages are kept, and the finished shards of a stage. Exit with 75 if the run works on after --wait.

    Examples:
        cosmos-flows stop nft-1a2b3c4d
        cosmos-flows stop nft-1a2b3c4d --store s3://bucket/prefix --wait 600
    """
    found = operation.stop(store, run_id, wait)
    print_found(found, found.lines(), as_json=as_json)
