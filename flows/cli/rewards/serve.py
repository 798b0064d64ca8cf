"""The command that serves rewards."""

import logging
import os
from importlib import import_module
from pathlib import Path
from typing import Annotated

from typer import Argument

from cosmos_rl_core.reward_service.config import read
from flows.cli.base.printing import say


def serve(config: Annotated[Path, Argument(help="TOML: cosmos-rl's rewards.toml, or one with [service]")]) -> None:
    """Serve the rewards of a file, until SIGTERM or Ctrl-C.

    Examples:
        cosmos-flows reward-service serve rewards.toml
    """
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    settings = read(config, os.environ)
    import_module("cosmos_rl_core.reward_service.server").run(settings, say)  # brings FastAPI along
