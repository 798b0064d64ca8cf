"""The command that lists and prints logs."""

from typing import Annotated

from typer import Option

from cosmos_rl_core.errors import ConfigError
from flows.cli.base.options import JsonOption, RunArgument, StoreOption
from flows.cli.base.printing import print_json, print_parts, say
from flows.defaults import DEFAULT_STORE
from flows.watching import logs as operation


def logs(
    run_id: RunArgument,
    stage: Annotated[str | None, Option(help="Print its newest log: a name that status shows, such as update")] = None,
    iteration: Annotated[int | None, Option(min=0, help="The iteration, or the policy version")] = None,
    attempt: Annotated[int | None, Option(min=1, help="With --stage: this attempt, from 1, not the newest")] = None,
    store: StoreOption = DEFAULT_STORE,
    as_json: JsonOption = False,
) -> None:
    """List the logs of all attempts at the stages of a run, or print one.

    An attempt leaves its log in the store when it ends, whether it made its artifact or not.

    Examples:
        cosmos-flows logs nft-1a2b3c4d
        cosmos-flows logs nft-1a2b3c4d --stage update --iteration 7
        cosmos-flows logs nft-1a2b3c4d --stage rollout --iteration 7 --attempt 1
    """
    if attempt is not None and stage is None:
        raise ConfigError("--attempt is one of a stage: add --stage")
    found = operation.logs(store, run_id, stage, iteration)
    if as_json:
        print_json(found)
    elif stage is None:
        print_parts(*found.parts())
    else:
        say(operation.text_of(found, attempt).rstrip())
