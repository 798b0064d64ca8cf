"""The command that lists what the package holds."""

from typing import Annotated

from typer import Argument

from cosmos_rl_core.shipped import listed
from flows.cli.base.options import JsonOption
from flows.cli.base.printing import print_found


def shipped(
    name: Annotated[str | None, Argument(help="A name of the list: print its path")] = None,
    as_json: JsonOption = False,
) -> None:
    """List the recipes, cluster profiles, pipelines and deployments inside the package.

    `package:NAME` names one wherever a path is expected.

    Examples:
        cosmos-flows shipped
        cosmos-flows shipped tiny/nft
        cosmos-flows shipped --json
    """
    found = listed(name)
    lines = (row["path"] if name else "{kind:16} {name:22} {path}".format_map(row) for row in found)
    print_found(found, lines, as_json=as_json)
