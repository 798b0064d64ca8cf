"""The command that translates a recipe of cosmos-rl."""

import shlex
from pathlib import Path
from typing import Annotated

from typer import Argument, Option

from flows.cli.base.command import PROGRAM
from flows.cli.base.options import JsonOption
from flows.cli.base.printing import print_found, say
from flows.operations import import_recipe as importer


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
    translation = importer.translation_of(recipe)
    parts = (importer.table(translation), "", f"{recipe} is {translation.summary}")
    print_found(importer.as_json(translation), parts, as_json=as_json)
    if output is None:
        importer.check(translation, recipe)
    else:
        importer.write(translation, recipe, output)
        next_command = shlex.join([PROGRAM, "plan", str(Path(output).resolve())])
        say(f"written to {output}; next: {next_command}", err=as_json)
