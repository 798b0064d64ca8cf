"""Commands that take over recipes, weights and embeddings of others."""

import shlex
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from typing import Annotated

import typer
from typer import Argument, Option

from flows.cli.command import PROGRAM, TAKE, JsonOption, command, print_json, print_parts, say

imports_app = typer.Typer()


@command(imports_app, panel=TAKE)
def import_recipe(
    recipe: Annotated[str, Argument(help="A TOML file of cosmos-rl, in either schema")],
    output: Annotated[str | None, Option(help="File for the translation; default: none")] = None,
    as_json: JsonOption = False,
) -> None:
    """Show how each key of a cosmos-rl recipe is translated, and write the translated recipe.

    Examples:
        cosmos-flows import-recipe stable-diffusion-3-5-medium-nft.toml --output sd3.toml
        cosmos-flows import-recipe stable-diffusion-3-5-medium-nft.toml --json
    """
    importer = import_module("flows.operations.import_recipe")
    translation = importer.translation_of(recipe)
    if as_json:
        print_json(importer.as_json(translation))
    else:
        print_parts(importer.table(translation), "", f"{recipe} is {translation.summary}")
    if output is None:
        importer.check(translation, recipe)
    else:
        importer.write(translation, recipe, output)
        next_command = shlex.join([PROGRAM, "plan", str(Path(output).resolve())])
        say(f"written to {output}; next: {next_command}", err=as_json)


@command(imports_app, panel=TAKE)
def import_weights(
    weights: Annotated[str, Argument(help="A .pt file of the original cosmos code")],
    base: Annotated[str, Argument(help="A diffusers pipeline of the same model")],
    directory: Annotated[str, Argument(help="A new directory for the pipeline")],
) -> None:
    """Convert Cosmos-Predict2.5 weights of the original cosmos code to a diffusers pipeline.

    Examples:
        cosmos-flows import-weights 81edfebe_ema_bf16.pt Cosmos-Predict2.5-2B-diffusers my-base
    """
    # In its own process, because it needs torch, which no command imports.
    module = "cosmos_rl_core.importers.native_weights"
    command = [sys.executable, "-m", module, weights, base, directory]
    raise typer.Exit(subprocess.run(command, check=False).returncode)


@command(imports_app, panel=TAKE)
def import_embeddings(
    folder: Annotated[str, Argument(help="A folder with t5_xxl/ or text_embedding/, and metas/")],
    directory: Annotated[str, Argument(help="A new directory for the safetensors files")],
) -> None:
    """Convert text embeddings that cosmos-rl's scripts pickled to safetensors, without unpickling them.

    Examples:
        cosmos-flows import-embeddings datasets/cosmos_nemo_assets embeddings
    """
    print_parts(import_module("flows.operations.import_embeddings").import_embeddings(folder, directory))
