"""The command that checks plugins."""

from typing import Annotated

from typer import Argument, Option

from flows.checking import plugin_suite
from flows.cli.base.command import OwnExitCode
from flows.cli.base.options import JsonOption
from flows.cli.base.printing import print_found


def check_plugin(
    paths: Annotated[list[str], Argument(metavar="PATH...", help="Files and folders of plugins of any kind")],
    settings: Annotated[list[str] | None, Option("--set", help="A setting: option=value; may be repeated")] = None,
    only: Annotated[str, Option(help="Make the checks alone whose sentence has these words")] = "",
    verbose: Annotated[bool, Option("--verbose", help="Show the lines and values of each failure")] = False,
    as_json: JsonOption = False,
) -> None:
    """Check plugins of your own by the suite of the shipped ones. It needs no network, and pytest.

    A model is compared with its stock pipeline, which takes minutes. Exit with 1 if a check failed, with 64 for a
    path without a plugin.

    Examples:
        cosmos-flows check-plugin redness.py rwr.py
        cosmos-flows check-plugin aura_flow --only "depend on its batch" --verbose
        cosmos-flows check-plugin my_reward.py --set threshold=0.5 --json
    """
    options = [word for setting in settings or () for word in ("--set", setting)]
    options += [*(["--only", only] if only else []), *(["--verbose"] if verbose else [])]
    found = plugin_suite.run_suite(paths, options)
    print_found(found, plugin_suite.lines_of(found), as_json=as_json)
    if found["failed"]:
        raise OwnExitCode(plugin_suite.FAILED)
