"""The command that converts weights of the original cosmos code."""

import subprocess
import sys
from typing import Annotated

import typer
from typer import Argument

from cosmos_rl_core.pipelines import directories
from flows.cli.base.options import JsonOption
from flows.cli.base.printing import print_json


def import_weights(
    weights: Annotated[str, Argument(help="A .pt file of the original cosmos code")],
    base: Annotated[str, Argument(help="A diffusers pipeline of the same model")],
    directory: Annotated[str, Argument(help="A new directory for the pipeline")],
    as_json: JsonOption = False,
) -> None:
    """Convert Cosmos-Predict2.5 weights of the original cosmos code to a diffusers pipeline.

    Examples:
        cosmos-flows import-weights 81edfebe_ema_bf16.pt Cosmos-Predict2.5-2B-diffusers my-base
    """
    # In its own process, because it needs torch, which no command imports.
    module = "cosmos_rl_core.importers.native_weights"
    command = [sys.executable, "-m", module, weights, base, directory]
    stderr = 2
    ended = subprocess.run(command, stdout=stderr if as_json else None, check=False)
    if ended.returncode:
        raise typer.Exit(ended.returncode)
    if as_json:
        print_json({"directory": directory, "base": base} | directories.read_json(directory, directories.ORIGIN))
