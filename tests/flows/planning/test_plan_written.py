"""Plans as they are written and read."""

from pathlib import Path
from typing import Any

from flows.planning.plan import Settings, freeze, plan_of, read_plan


def test_a_frozen_plan_equals_the_plan_that_is_read_down_to_the_order_of_tables(recipe: Any, tmp_path: Path) -> None:
    """Also the order of its tables, which decides what stages are given."""
    plan = plan_of(Settings(recipe(), str(tmp_path / "store"), "hand"))
    odd = plan.prompts[0].model_copy(update={"metadata": {"z": [{"b": 1, "a": 2}], "a": 1}})
    plan = plan.model_copy(update={"prompts": (odd, *plan.prompts[1:])})
    frozen, read = freeze(plan, str(tmp_path / "store")), read_plan(str(tmp_path / "store"), "hand")
    same = [(one.prompts, one.stage_versions) for one in (frozen, read)]
    assert repr(same[0]) == repr(same[1])
    assert repr(frozen.prompts) != repr(plan.prompts)
