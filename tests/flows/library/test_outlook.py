"""What status and the list of runs say of a run: reward before and now, time left, cost, the report's address."""

import json

import pytest

from cosmos_rl_core.storage import store
from flows.library import open_run
from flows.library.lines import all_runs
from flows.library.outlook import Change, Score
from flows.planning.run import Run
from flows.watching.status_table import rendered
from stages.artifacts.generations import invalidate
from tests.flows.by_hand import SECONDS, make_all
from tests.flows.ledger.test_ledger import written
from tests.hand_made import planned


def lines(run: Run) -> list[str]:
    found = rendered(open_run(run.plan.run_id, run.store_url).now())
    return [part for part in found if isinstance(part, str)]


def test_a_run_says_what_is_left_and_where_its_report_is(recipe, tmp_path):
    run = planned(recipe(), tmp_path, run_id="hand")
    make_all(run)
    written(run, SECONDS)
    for k in (0, 1):
        invalidate(run.slots.iteration(k, "update"), 1, "test")
    report = store.join(run.slots.report, "index.html")
    store.write(report, b"<html>")
    told = lines(run)
    # Iteration 1 and the report of 5 s are to be made anew with both updates; fragments have no time in this ledger.
    found = open_run("hand", run.store_url).now().outlook
    assert found.left_s == pytest.approx(2 * 30 + 10 + 3 + 4 + 5, abs=1.0)
    assert found.device_s is not None
    assert told[2] == f"report: {report}"
    assert told[1] == f"about {found.left_s:.1f} s of work left, {found.device_s:.3g} s of device time spent"


def test_without_evaluations_the_change_comes_from_rollouts(recipe, tmp_path):
    run = planned(recipe(), tmp_path, run_id="hand")
    make_all(run)
    assert open_run("hand", run.store_url).now().outlook.change == Change(
        "ocr of rollouts", "iteration", Score(0, 0.25, None), Score(1, 0.25, None)
    )
    assert str(Score(3, 0.5, 0.0125)) == "0.500 ± 0.013"


def test_time_left_comes_from_a_run_of_the_same_shape_until_a_run_has_its_own(recipe, tmp_path):
    written(planned(recipe(), tmp_path, run_id="first"), SECONDS)
    run = planned(recipe(), tmp_path, run_id="second")
    whole = open_run("second", run.store_url).now().outlook.left_s
    assert whole == pytest.approx(1 + 2 + 2 * 4 + 2 * 43 + 5, abs=1.0)
    slower = {kind: 2 * seconds for kind, seconds in SECONDS.items()}
    written(run, slower, until="iteration-0001/rollout")
    found = open_run("second", run.store_url).now().outlook
    # The report is not in its own ledger yet.
    assert found.left_s == pytest.approx(2 * (1 + 2 + 2 * 4 + 2 * 43), abs=1.0)


def test_the_list_has_time_left_and_device_time(recipe, tmp_path, main):
    run = planned(recipe(), tmp_path, run_id="hand", overrides=("train.num_iterations=5",))
    ended = planned(recipe(), tmp_path, run_id="ended")
    make_all(ended)
    written(ended, SECONDS)
    make_all(run.going_to(1))
    written(run, SECONDS, until="iteration-0001/rollout")
    first, second = all_runs(run.store_url)
    assert (first.run, first.left_s, first.device_s) == ("ended", None, 96.0)
    assert (second.run, second.iterations, second.device_s) == ("hand", 1, 47.0)
    assert second.left_s == pytest.approx(4 * 43, abs=1.0)
    assert (first.first_reward, first.reward, second.first_reward) == (0.25, 0.25, None)
    code, out, _ = main("runs", "hand", "ended", "--store", run.store_url)
    assert code == 0
    assert [line.split()[0] for line in out.splitlines()[1:3]] == ["hand", "ended"]
    assert "hand and ended have equal settings" in out
    code, out, _ = main("runs", "ended", "--store", run.store_url, "--json")
    assert json.loads(out) == [json.loads(json.dumps(vars(first)))]
    code, _, error = main("runs", "nobody", "--store", run.store_url)
    assert (code, "there is no run 'nobody'" in error) == (64, True)


def test_compared_runs_show_the_settings_that_differ(recipe, tmp_path, main):
    planned(recipe(), tmp_path, run_id="a")
    planned(recipe(), tmp_path, run_id="b", overrides=("train.seed=7", "train.optm_lr=0.5"))
    code, out, _ = main("runs", "a", "b", "--store", str(tmp_path / "store"))
    assert code == 0
    assert out.splitlines()[-3:] == ["a -> b:", "  recipe.train.optm_lr: 0.001 -> 0.5", "  recipe.train.seed: 0 -> 7"]
