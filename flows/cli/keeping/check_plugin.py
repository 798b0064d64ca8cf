"""The command that checks plugins."""

from functools import partial
from typing import Annotated

from typer import Argument, Option

from flows.cli.base.command import OwnExitCode
from flows.cli.base.options import JsonOption
from flows.cli.base.printing import print_found, say
from flows.plugin_checks import suite


def check_plugin(
    paths: Annotated[list[str], Argument(metavar="PATH...", help="Files and folders of plugins of any kind")],
    settings: Annotated[list[str] | None, Option("--set", help="A setting: option=value; may be repeated")] = None,
    only: Annotated[str, Option(help="Make only the checks whose sentence has these words")] = "",
    verbose: Annotated[bool, Option("--verbose", help="Show the lines and values of each failure")] = False,
    as_json: JsonOption = False,
) -> None:
    """Check plugins of your own by the suite of the shipped ones. It needs no network, and pytest.

    A model is compared with its stock pipeline, and makes two small runs, which takes a minute. Exit with 1 if a check
    failed, with 64 for a path without a plugin.

    Examples:
        cosmos-flows check-plugin redness.py rwr.py
        cosmos-flows check-plugin aura_flow --only "depend on its batch" --verbose
        cosmos-flows check-plugin my_reward.py --set threshold=0.5 --json
    """
    options = [word for setting in settings or () for word in ("--set", setting)]
    found = suite.run_suite(paths, [*options, *(["--verbose"] if verbose else [])], only, partial(say, err=True))
    print_found(found, suite.lines_of(found), as_json=as_json)
    if found["failed"]:
        raise OwnExitCode(suite.FAILED)
