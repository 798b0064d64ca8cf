"""The command that prints the schema of recipes."""

from typing import Annotated

from typer import Argument

from cosmos_rl_core.recipes.schema import recipe_schema
from flows.cli.base.printing import print_json


def schema(
    recipe: Annotated[str | None, Argument(help="A recipe with plugins to include")] = None,
) -> None:
    """Print the JSON Schema of recipes, for completion and checks in editors.

    Examples:
        cosmos-flows schema
        cosmos-flows schema my_recipe.toml
    """
    print_json(recipe_schema(recipe))
