"""The command that decodes the samples which a rollout left as latents."""

from importlib import import_module
from typing import Annotated

from typer import Option

from flows.cli.base.options import ClusterOption, JsonOption, RunArgument, StoreOption
from flows.cli.base.printing import notes_on_stderr, print_found
from flows.defaults import DEFAULT_STORE
from flows.library import open_run
from flows.running.server import prefect_server


def decode(
    run_id: RunArgument,
    iteration: Annotated[int, Option(min=0, help="Number of the iteration, from 0")],
    store: StoreOption = DEFAULT_STORE,
    cluster: ClusterOption = None,
    allow_numerics_change: Annotated[bool, Option(help="Accept other versions or devices")] = False,
    as_json: JsonOption = False,
) -> None:
    """Decode the samples of a rollout that were left as latents (rollout.decode_share). Changes nothing of the run.

    Examples:
        cosmos-flows decode nft-1a2b3c4d --iteration 7
    """
    with notes_on_stderr(as_json), prefect_server():
        stage = import_module("flows.stage")  # brings Prefect along
        words = {"cluster": cluster, "allow_numerics_change": allow_numerics_change}
        stage.run(run_id, "decode", iteration, store=store, **words)
    artifact = open_run(run_id, store).run.slots.iteration(iteration, "decode")
    print_found({"run": run_id, "artifact": artifact}, [artifact], as_json=as_json)
