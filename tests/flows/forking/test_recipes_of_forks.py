"""The recipe of a plan, as somebody would write it: a fork begins with that."""

from pathlib import Path
from typing import Any

import pytest

from cosmos_rl_core import shipped
from cosmos_rl_core.config.base import as_written
from cosmos_rl_core.recipes.reading import checked, read_values
from flows.planning import kinds
from flows.planning.plan import Settings, freeze, plan_of, read_plan


@pytest.mark.parametrize("name", shipped.files("recipe"))
def test_a_written_recipe_is_the_same_and_has_no_settings_without_effect(name: str) -> None:
    values = read_values(f"{shipped.PREFIX}{name}")
    kind = kinds.claiming(values)
    check = checked if kind is None else kind.check
    recipe, _ = check(values, name)
    again, idle = check(as_written(recipe), name)
    assert again == recipe
    assert not idle


def test_a_frozen_plan_equals_the_plan_that_is_read_down_to_the_order_of_tables(recipe: Any, tmp_path: Path) -> None:
    """Also the order of its tables, which decides what stages are given."""
    plan = plan_of(Settings(recipe(), str(tmp_path / "store"), "hand"))
    odd = plan.prompts[0].model_copy(update={"metadata": {"z": [{"b": 1, "a": 2}], "a": 1}})
    plan = plan.model_copy(update={"prompts": (odd, *plan.prompts[1:])})
    frozen, read = freeze(plan, str(tmp_path / "store")), read_plan(str(tmp_path / "store"), "hand")
    same = [(one.prompts, one.stage_versions) for one in (frozen, read)]
    assert repr(same[0]) == repr(same[1])
    assert repr(frozen.prompts) != repr(plan.prompts)
