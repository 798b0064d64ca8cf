"""Blocks of pages that commands print: those that are stored are printed today, and pages have the columns of today."""

import re
from pathlib import Path

import pytest

from docs.figures import MEASURED
from flows.explaining import explain
from flows.planning.plan import Plan, Settings, plan_of
from tests.flows import printed
from tests.flows.by_hand import SECONDS
from tests.flows.ledger.test_ledger import written
from tests.hand_made import planned
from tests.pages import ROOT

STALE = "run `python -m tests.flows.printed`, then `python -m docs.figures`"


def stored(name: str) -> str:
    return (MEASURED / f"{name}.txt").read_text(encoding="utf-8").rstrip("\n")


def test_the_status_of_a_failed_run_is_as_the_page_shows_it(tmp_path: Path):
    assert printed.status(tmp_path) == stored("status"), STALE


@pytest.mark.slow
def test_the_plan_of_sd3_5_is_as_the_page_shows_it(tmp_path: Path):
    assert printed.plan(tmp_path) == stored("plan-sd3_5"), STALE


def test_the_page_lists_the_stages_that_the_recipe_of_sd3_5_plans(tmp_path: Path):
    """On a tiny model, for two of its iterations."""
    (tmp_path / "prompts.txt").write_text("\n".join(map(str, range(48))), encoding="utf-8")
    overrides = (
        "policy.model_name_or_path=package:tiny-sd3",
        "policy.diffusers.inference_size=[32, 32]",
        "policy.diffusers.max_prompt_length=12",
        "train.num_iterations=2",
        f"train.train_policy.dataset={{ name = 'prompts', path = '{tmp_path}/prompts.txt' }}",
    )
    plan = plan_of(Settings(str(ROOT / "configs/nft/sd3.toml"), str(tmp_path / "store"), overrides=overrides))
    assert isinstance(plan, Plan)
    found = re.search(r"^stages +(\d+): (.*)$", stored("plan-sd3_5"), re.MULTILINE)
    assert found is not None
    total, names = int(found[1]), found[2].split(", ")
    counts = explain.as_json(plan, str(tmp_path / "store"))["stages"]
    assert counts.keys() == {*names}, STALE
    # What runs once in an iteration runs 1000 times. Prompts of 5, 5, 10, 20 and 40 iterations are embedded together,
    # then twelve times the lines of 80.
    assert total == sum(500 * n for name, n in counts.items() if n == 2 and name != "export") + 1 + 2 + 5 + 12 + 1


def test_the_page_of_costs_has_the_columns_of_today(recipe, tmp_path, main):
    run = planned(recipe(), tmp_path, run_id="hand")
    written(run, SECONDS)
    _, out, _ = main("cost", "hand", "--store", run.store_url)
    page = (ROOT / "docs" / "cost.md").read_text(encoding="utf-8")
    (header,) = re.findall(r"^```\n(stage .*)$", page, re.MULTILINE)
    assert header.split() == out.splitlines()[0].split()
