"""Settings as they are written down."""

import pytest

from cosmos_rl_core import shipped
from cosmos_rl_core.config.base import as_written
from cosmos_rl_core.recipes.reading import checked, read_values
from flows.planning import kinds


@pytest.mark.parametrize("name", shipped.files("recipe"))
def test_a_written_recipe_is_the_same_and_has_no_settings_without_effect(name: str) -> None:
    values = read_values(f"{shipped.PREFIX}{name}")
    kind = kinds.claiming(values)
    check = checked if kind is None else kind.check
    recipe, _ = check(values, name)
    again, idle = check(as_written(recipe), name)
    assert again == recipe
    assert not idle
