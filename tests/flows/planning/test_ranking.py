"""What ranks the policies of a run: chosen, kept and shown in the report. No processes."""

from pathlib import Path
from typing import Any

import pytest

from cosmos_rl_core.errors import ConfigError
from cosmos_rl_core.rewards import jpeg
from cosmos_rl_core.storage import store
from cosmos_rl_core.storage.sealed import seal
from flows.library import open_run
from flows.library.lines import all_runs
from flows.operations.upgrades import settled
from flows.planning import requests
from flows.planning.plan import Settings, freeze, plan_of
from flows.planning.ranking import RankingRule, ranking_rule
from flows.planning.run import Run
from flows.planning.steps import read_run
from flows.planning.versions import Versions
from stages.reporting.contracts import Fragment, Report
from tests.flows.by_hand import HELD_OUT_MEDIA, validated
from tests.flows.judged_runs import SECOND_REWARD, TWO_AND_A_GATE, best, judged_by, make_with, run_of
from tests.flows.tracked import go
from tests.hand_made import planned


def test_a_finished_run_goes_on_with_another_number_that_ranks_its_policies(recipe: Any, tmp_path: Path):
    run, path = judged_by(recipe, tmp_path, "ocr"), str(tmp_path / "tiny.toml")
    for best_by, expected in (("jpeg", (0, "held-out jpeg")), ("", (2, "held-out weighted reward"))):
        asked = (f"validation.best_by={best_by}",) if best_by else ()
        wanted = plan_of(Settings(path, run.store_url, "by-ocr", overrides=(TWO_AND_A_GATE, *asked)))
        again = Run(freeze(wanted, run.store_url), run.store_url)
        assert again.plan.identity() == run.plan.identity()
        assert best(again)[:2] == expected
        # The plan is written once; what the run goes on with is recorded next to it.
        settled(again, remake=False)
        assert best(read_run(run.store_url, "by-ocr"))[:2] == expected
        assert open_run("by-ocr", run.store_url).now().as_json()["best"]["by"] == expected[1]
        (line,) = all_runs(run.store_url)
        assert line.reward_name == expected[1]
        assert settled(again, remake=False) is again


@pytest.mark.parametrize(
    ("best_by", "name"), [("", "weighted reward"), ("reward", "weighted reward"), ("jpeg", "jpeg"), ("ocr", "ocr")]
)
def test_the_report_begins_with_the_number_that_ranks_policies(recipe: Any, tmp_path: Path, best_by: str, name: str):
    asked = (f"validation.best_by={best_by}",) if best_by else ()
    path = validated(recipe, tmp_path)
    run = planned(path, tmp_path, run_id="hand", overrides=(TWO_AND_A_GATE, *asked))
    go(run)
    report = requests.report(run, 2, [0, 2]).settings(Report)
    assert (report.ranked_by, report.reward) == (name, "ocr")
    # Fragments hold every number that may rank policies, so that another choice makes none again.
    fragment = requests.judged(run, 0).settings(Fragment)
    assert (fragment.weights, [*fragment.gates]) == ({"ocr": 1.0, "jpeg": 0.5}, ["pixel_statistics"])


def test_the_report_of_a_run_that_a_loss_ranks_begins_with_the_loss(tmp_path: Path):
    run = run_of(tmp_path, HELD_OUT_MEDIA)
    make_with(run, {0: 0.5, 4: 0.25})
    assert requests.report(run, 4, [0, 4]).settings(Report).ranked_by == "loss"
    assert requests.judged(run, 0).settings(Fragment).weights == {}


def test_a_record_from_before_it_held_the_ranking_leaves_the_plans(recipe: Any, tmp_path: Path):
    run = judged_by(recipe, tmp_path, "ocr")
    record = Versions(run_id="by-ocr", number=1, versions=run.plan.stage_versions)
    body = record.model_dump(mode="json", exclude={"best_by"})
    store.put_if_absent(store.join(run.url, "versions.1.json"), seal("versions", body))
    assert best(read_run(run.store_url, "by-ocr")) == best(run)


def test_a_number_that_nothing_measures_cannot_rank(recipe: Any, tmp_path: Path):
    known = "known: reward, ocr, jpeg, pixel_statistics"
    with pytest.raises(ConfigError, match=f"validation.best_by = 'loss' is not measured by this recipe; {known}"):
        judged_by(recipe, tmp_path, "loss")


@pytest.mark.parametrize(("name", "number"), [("loss", "the held-out loss"), ("reward", "the weighted sum")])
def test_a_reward_called_like_another_number_cannot_be_named(recipe: Any, tmp_path: Path, name: str, number: str):
    plugin = tmp_path / f"{name}.py"
    plugin.write_text(Path(jpeg.__file__).read_text().replace('Literal["jpeg"]', f'Literal["{name}"]'))
    path = validated(recipe, tmp_path)
    mine = (f"plugins=['{plugin}']", f"rewards=[{{ fn = {{ name = 'ocr' }} }}, {{ fn = {{ name = '{name}' }} }}]")
    said = rf"validation\.best_by = '{name}' names {number}.* and one of the rewards ocr, {name}; expected .*: give"
    with pytest.raises(ConfigError, match=said):
        plan_of(Settings(path, overrides=(*mine, f"validation.best_by={name}")))
    assert plan_of(Settings(path, overrides=(*mine, "validation.best_by=ocr"))).recipe.rewards


@pytest.mark.parametrize("label", ["loss", "reward"])
def test_the_only_number_of_a_run_may_have_any_name(tmp_path: Path, label: str):
    run = run_of(tmp_path, SECOND_REWARD)
    named = run.recipe.rewards[0].fn.model_copy(update={"name": label})
    rewards = (run.recipe.rewards[0].model_copy(update={"fn": named}),)
    plan = run.plan.model_copy(update={"recipe": run.recipe.model_copy(update={"rewards": rewards})})
    assert ranking_rule(Run(plan, run.store_url)) == RankingRule((f"evaluate-{label}",), f"held-out {label}")
