"""Commands of the reward service."""

import logging
import os
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any

import typer
from typer import Argument
from typer.core import TyperGroup

from flows.cli.command import command

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
        cosmos-flows reward-service configs/rewards.toml
    """
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    settings: Any = import_module("cosmos_rl_core.reward_service.config").read(config, os.environ)
    import_module("cosmos_rl_core.reward_service.server").run(settings, lambda line: typer.echo(line))
