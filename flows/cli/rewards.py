"""Commands of the reward service."""

import logging
import os
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any

import typer
from typer import Argument, Option
from typer.core import TyperGroup

from flows.cli.command import JsonOption, command, print_json, print_parts

SERVE = "serve"


class ServeByDefault(TyperGroup):
    """A group whose first word may be a file of settings, which is then served."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Name the command ``serve`` before arguments that name none."""
        if args and not args[0].startswith("-") and args[0] not in self.commands:
            args = [SERVE, *args]
        return super().parse_args(ctx, args)


rewards_app = typer.Typer(
    cls=ServeByDefault, no_args_is_help=True, help="Serve rewards: `reward-service rewards.toml`, or a command."
)


@command(rewards_app, SERVE)
def serve(config: Annotated[Path, Argument(help="TOML: cosmos-rl's rewards.toml, or one with [service]")]) -> None:
    """Serve the rewards of a file, until SIGTERM or Ctrl-C.

    Examples:
        cosmos-flows reward-service serve rewards.toml
    """
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    settings: Any = import_module("cosmos_rl_core.reward_service.config").read(config, os.environ)
    import_module("cosmos_rl_core.reward_service.server").run(settings, lambda line: typer.echo(line))


@command(rewards_app, "check")
def check(
    url: Annotated[str, Argument(help="URL of the service: http://host:8080")],
    reward: Annotated[list[str] | None, Option(help="A reward to try; may be repeated. Default: all it tells")] = None,
    timeout_s: Annotated[float, Option(min=0.1, help="Seconds to wait for the scores of each")] = 120.0,
    as_json: JsonOption = False,
) -> None:
    """Try any service with a test frame: this one or cosmos-rl's. The token is REMOTE_REWARD_TOKEN.

    Exit with 64 for a wrong URL, token or reward, with 75 for a service or scorer that does not work now.

    Examples:
        cosmos-flows reward-service check http://localhost:8080
        cosmos-flows reward-service check http://localhost:8080 --reward pickscore
    """
    found: list[Any] = []
    try:
        tried = import_module("flows.operations.reward_check").check(url, reward or (), timeout_s, os.environ)
        for finding in tried:
            found.append(finding)
            if not as_json:
                state = "works" if finding.works else "FAILS"
                print_parts(f"{finding.reward}: {state} in {finding.seconds:.1f} s: {finding.found}")
    finally:
        if as_json:
            print_json(found)
