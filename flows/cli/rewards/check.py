"""The command that tries a reward service."""

import os
from typing import Annotated

from typer import Argument, Option

from flows.cli.base.options import JsonOption
from flows.cli.base.printing import print_json, print_parts
from flows.operations import reward_check


def check(
    url: Annotated[str, Argument(help="URL of the service: http://host:8080")],
    reward: Annotated[list[str] | None, Option(help="A reward to try; may be repeated. Default: all it names")] = None,
    timeout_s: Annotated[float, Option(min=0.1, help="Seconds to wait for the scores of each")] = 120.0,
    as_json: JsonOption = False,
) -> None:
    """Try any service with a test frame: this one or cosmos-rl's. The token is REMOTE_REWARD_TOKEN.

    Exit with 64 for a wrong URL, token or reward, with 75 for a service or scorer that does not work now.

    Examples:
        cosmos-flows reward-service check http://localhost:8080
        cosmos-flows reward-service check http://localhost:8080 --reward pickscore
    """
    found = list[reward_check.Finding]()
    try:
        tried = reward_check.check(url, reward or (), timeout_s, os.environ)
        for finding in tried:
            found.append(finding)
            if not as_json:
                state = "works" if finding.works else "FAILS"
                print_parts(f"{finding.reward}: {state} in {finding.seconds:.1f} s: {finding.found}")
    finally:
        if as_json:
            print_json(found)
