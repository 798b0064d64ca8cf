"""The command that makes a stage again, to compare."""

from importlib import import_module
from typing import Annotated, Any

from typer import Option

from cosmos_rl_core.recipes.reading import launch_of
from flows.cli.base.command import WRONG_DATA, OwnExitCode
from flows.cli.base.options import JsonOption, RunArgument, StoreOption
from flows.cli.base.printing import notes_on_stderr, print_found
from flows.defaults import DEFAULT_STORE


def replay(
    run_id: RunArgument,
    stage: Annotated[str, Option(help="Name in `cosmos-flows status`: rollout, reward-ocr, update, export ...")],
    iteration: Annotated[int | None, Option(min=0, help="The iteration, or the policy version")] = None,
    samples: Annotated[str | None, Option(help="Compare these samples only: ids with commas between")] = None,
    cluster: Annotated[str | None, Option(help="Profile of another machine, instead of the run's")] = None,
    store: StoreOption = DEFAULT_STORE,
    as_json: JsonOption = False,
) -> None:
    """Make a stage again in a scratch place and compare it with its artifact. The run is only read.

    Under equal numerics every bit must be equal; under others, numbers must be within tolerances. Exits with 65 if
    something differs, and prints file, sample, tensor and by how much.

    Examples:
        cosmos-flows replay RUN --stage update --iteration 7
        cosmos-flows replay RUN --stage rollout --iteration 7 --samples ID,ID
    """
    launch = None if cluster is None else launch_of(cluster)
    wanted = () if samples is None else tuple(filter(None, samples.split(",")))
    replaying: Any = import_module("flows.auditing.replay")  # reads tables with pandas
    with notes_on_stderr(as_json):
        found = replaying.replay(store, run_id, stage, iteration, launch=launch, samples=wanted)
    print_found(found, found.lines(), as_json=as_json)
    if not found.equal:
        raise OwnExitCode(WRONG_DATA)
