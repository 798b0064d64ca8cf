"""The command line of the modules that write a tiny model and its data."""

import argparse
from collections.abc import Callable
from pathlib import Path


def write(
    name: str, save_data: Callable[[Path], None], save_model: Callable[[Path, int], None], arguments: list[str] | None
) -> None:
    """Write the data to the directory that the command line names, and the model below it, for the module ``name``."""
    parser = argparse.ArgumentParser(
        prog=f"python -m cosmos_rl_core.tiny.{name}", description="Write a tiny model and the data that it learns."
    )
    parser.add_argument("dir", type=Path, help="directory to write to")
    parser.add_argument("--seed", type=int, default=0, help="seed of the random weights")
    options = parser.parse_args(arguments)
    save_data(options.dir)
    save_model(options.dir / "model", options.seed)
