"""The schema of recipes, which editors read."""

from cosmos_rl_core.config.recipe import Recipe
from cosmos_rl_core.recipes.schema import documented, markdown


def test_docstrings_become_markdown():
    assert markdown("See :class:`a.B` and ``c``.") == "See `a.B` and `c`."
    assert documented(Recipe)["plugins"].startswith("Files or folders")
