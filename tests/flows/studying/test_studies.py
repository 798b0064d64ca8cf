"""Plans of studies, their records, and reports of runs made by hand."""

import json
from pathlib import Path
from typing import Any

import pytest

from cosmos_rl_core.canonical import digest
from cosmos_rl_core.errors import ArtifactError, ConfigError
from cosmos_rl_core.storage import store
from flows.forking.plan import judged_by, plan_of_fork
from flows.forking.references import refer_to_origin
from flows.lineage.origin import StoredRollouts
from flows.planning.base import AnyRun
from flows.planning.plan import Settings, freeze, plan_of
from flows.planning.run import Run, run_of
from flows.post_train import post_train
from flows.studying.members import planned_study
from flows.studying.over_seeds import as_begun, plan_of_study
from flows.studying.report import report_of, write_report
from flows.studying.study import NUMBERS, Study, read
from flows.studying.what_if import UNCHANGED, plan_of_what_if
from tests.flows.by_hand import make_all, planned_run, validated
from tests.flows.forking.forked import begun, made
from tests.hand_made import planned

LR = "train.optm_lr=1e-3,2e-3"


@pytest.fixture
def origin(recipe: Any, tmp_path: Path) -> Run:
    """A finished run of two iterations."""
    run = planned_run(recipe, tmp_path)
    make_all(run)
    return run


def what_if(origin: AnyRun, *overrides: str, **chosen: Any) -> Any:
    settings = Settings("", origin.store_url, overrides=overrides)
    return plan_of_what_if(origin.plan.run_id, settings, StoredRollouts(), **chosen)


def test_a_what_if_has_the_run_itself_and_controls_of_each_other_setting(origin: Run) -> None:
    study, planned = what_if(origin, sweeps=["train.optm_lr=2e-3,3e-3"], controls=2)
    found = [(one.setting, one.control) for one in study.members]
    assert found == [(UNCHANGED, 0), *((f"optm_lr={lr}", control) for lr in ("2e-3", "3e-3") for control in range(3))]
    assert len({one.run for one in study.members}) == 7
    assert all(one.settings.of_study and one.settings.run_id == one.member.run for one in planned)
    shuffled = [one.plan.recipe.train.train_policy.shuffle_groups for one in planned]
    assert shuffled == [0, 0, 1, 2, 0, 1, 2]
    assert not store.listed(study.url(origin.store_url))


def test_a_setting_that_changes_nothing_is_the_run_itself(origin: Run) -> None:
    study, _ = what_if(origin, sweeps=[LR], controls=1)
    # 1e-3 is the recipe's own, which needs no control either.
    assert [(one.setting, one.control) for one in study.members] == [
        (UNCHANGED, 0),
        ("optm_lr=2e-3", 0),
        ("optm_lr=2e-3", 1),
    ]


def test_under_other_rewards_the_last_policy_of_the_run_is_evaluated_with_them(origin: Run, tmp_path: Path) -> None:
    rewards = tmp_path / "rewards.toml"
    rewards.write_text('[[rewards]]\nfn = { name = "jpeg" }\n', encoding="utf-8")
    _, (itself, other) = what_if(origin, rewards=str(rewards), controls=0)
    assert (itself.member.setting, itself.plan.first, itself.plan.recipe.train.num_iterations) == (UNCHANGED, 2, 2)
    assert judged_by(itself.plan) == judged_by(other.plan) != judged_by(origin.plan)
    assert (other.member.setting, other.plan.first) == (f"rewards={rewards}", 0)
    assert {step.stage for wave in post_train(run_of(itself.plan, origin.store_url)) for step in wave.steps} == {
        "embed",
        "export",
        "evaluate",
        "evaluate-jpeg",
        "fragment",
        "report",
    }


def test_evaluations_cover_all_runs(origin: Run) -> None:
    study, planned = what_if(origin, "validation.n_generation=3", "train.optm_lr=2e-3", controls=1)
    assert [one.plan.recipe.validation.n_generation for one in planned] == [3, 3, 3]
    assert [one.setting for one in study.members] == [UNCHANGED, "optm_lr=2e-3", "optm_lr=2e-3"]


def test_another_number_of_iterations_is_another_study(origin: Run) -> None:
    one, other = (what_if(origin, iterations=some, controls=0)[0] for some in ("0", "0-1"))
    assert (one.until, other.until) == (1, 2)
    assert one.members == other.members
    assert one.name != other.name


def test_a_what_if_of_a_fork_begins_where_the_fork_did(origin: Run) -> None:
    fork = begun(origin, 1, overrides=("train.optm_lr=5e-3",))
    make_all(fork)
    study, planned = what_if(fork, "train.optm_lr=2e-3", controls=0)
    assert [one.plan.first for one in planned] == [1, 1]
    unchanged = run_of(freeze(planned[0].plan, origin.store_url), origin.store_url)
    refer_to_origin(unchanged)
    own = [slot for slot in make_all(unchanged) if slot.startswith(unchanged.url) and made(slot).slot == slot]
    assert own == [unchanged.slots.report]
    with pytest.raises(ConfigError, match="began with policy 1; earlier iterations are of another recipe"):
        what_if(fork, iterations="0-1")
    assert study.until == 2


@pytest.mark.parametrize("anchor", ["own", "behaviour"])
def test_a_what_if_of_a_what_if_has_its_anchor(origin: Run, anchor: Any) -> None:
    settings = Settings("", origin.store_url, overrides=("train.optm_lr=2e-3",))
    _, planned = plan_of_what_if("hand", settings, StoredRollouts(anchor=anchor), controls=0)
    first = run_of(freeze(planned[1].plan, origin.store_url), origin.store_url)
    refer_to_origin(first)
    make_all(first)
    assert isinstance(first, Run)
    _, (again, *_) = what_if(first, controls=0)
    unchanged = run_of(freeze(again.plan, origin.store_url), origin.store_url)
    refer_to_origin(unchanged)
    own = [slot for slot in make_all(unchanged) if slot.startswith(unchanged.url) and made(slot).slot == slot]
    assert own == [unchanged.slots.report]


def test_a_higher_limit_of_drift_goes_on_with_the_same_run(origin: Run) -> None:
    settings = Settings("", origin.store_url, overrides=("train.optm_lr=2e-3",))
    low, high = (plan_of_what_if("hand", settings, StoredRollouts(max_drift=at), controls=0)[1][1] for at in (0.1, 2.0))
    assert low.member == high.member
    freeze(low.plan, origin.store_url)
    frozen = freeze(high.plan, origin.store_url)
    assert frozen.origin is not None
    assert frozen.origin.stored is not None
    assert frozen.origin.stored.max_drift == 2.0


def test_a_run_without_held_out_data_is_refused(recipe: Any, tmp_path: Path) -> None:
    run = planned(recipe(), tmp_path, run_id="bare")
    make_all(run)
    with pytest.raises(ConfigError, match=r"bare has no \[validation\], so nothing would be compared"):
        what_if(run)


def test_a_seed_in_a_sweep_is_refused(recipe: Any, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"--sweep train\.seed: name the seeds by --seeds"):
        over_seeds(recipe, tmp_path, sweeps=["train.seed=1,2"])


def test_the_cost_covers_training_and_evaluations(origin: Run) -> None:
    study, planned = what_if(origin, "train.optm_lr=2e-3", controls=1)
    cost = planned_study(study, planned, origin.store_url)
    assert cost.work.generated == 0
    assert [work.trained for _, work in cost.runs] == [0, 16, 16]
    assert cost.work.held_out == 2 * 2 * planned[1].plan.recipe.validation.n_generation
    assert any("of hand" in line for line in cost.lines())


@pytest.mark.parametrize("iterations", ["0,2", "5-3", "x"])
def test_iterations_with_gaps_are_refused(origin: Run, iterations: str) -> None:
    with pytest.raises(ConfigError, match="--iterations"):
        what_if(origin, iterations=iterations)


def test_all_mistakes_of_all_settings_are_named_at_once(origin: Run) -> None:
    with pytest.raises(ConfigError) as refused:
        what_if(origin, sweeps=["train.train_policy.type=nft,grpo,unknown"], controls=0)
    assert "grpo" in str(refused.value)
    assert "unknown" in str(refused.value)


def test_an_algorithm_on_media_is_refused_with_its_counterpart(origin: Run) -> None:
    with pytest.raises(ConfigError, match="such as rft, which takes supervised steps on the best of them"):
        what_if(origin, algorithm="sft")


def test_an_algorithm_takes_its_own_options(origin: Run) -> None:
    study, planned = what_if(origin, "train.train_policy.keep=0.5", algorithm="rft", controls=1)
    assert [one.setting for one in study.members][1:] == ["type=rft, keep=0.5"] * 2
    assert planned[1].plan.recipe.train.train_policy.model_dump()["keep"] == 0.5


def test_a_run_without_a_rollout_is_refused(recipe: Any, tmp_path: Path) -> None:
    run = planned_run(recipe, tmp_path)
    with pytest.raises(ConfigError, match="has no rollout yet"):
        what_if(run)


def test_the_report_compares_with_the_run_and_with_controls(origin: Run) -> None:
    study, planned = what_if(origin, "train.optm_lr=2e-3", controls=1)
    study.write(origin.store_url)
    assert read(origin.store_url, study.name) == study
    assert not report_of(study, origin.store_url).rows
    ended = {planned[1].member.run: "ended at policy 1: far"}
    report = write_report(study, origin.store_url, ended)
    page = store.read(report.page).decode()
    assert "No training sample was generated" in page
    numbers = json.loads(store.read(store.join(study.url(origin.store_url), NUMBERS)))
    assert numbers["study"] == study.name


def test_another_record_under_the_same_name_is_refused(origin: Run) -> None:
    what_if(origin, "train.optm_lr=2e-3", controls=0, name="mine")[0].write(origin.store_url)
    with pytest.raises(ConfigError, match="another --name"):
        what_if(origin, "train.optm_lr=3e-3", controls=0, name="mine")[0].write(origin.store_url)


def test_a_damaged_record_of_a_study_is_reported(origin: Run) -> None:
    study, _ = what_if(origin, controls=0, name="mine")
    study.write(origin.store_url)
    url = store.join(study.url(origin.store_url), "study.json")
    store.write(url, store.read(url).replace(b'"what-if"', b'"seeds"'))
    with pytest.raises(ArtifactError):
        read(origin.store_url, "mine")


def test_an_unknown_study_is_refused_with_the_names_of_known_ones(origin: Run) -> None:
    what_if(origin, controls=0, name="mine")[0].write(origin.store_url)
    with pytest.raises(ConfigError, match=r"no study 'other' here; known: mine"):
        read(origin.store_url, "other")


def over_seeds(recipe: Any, tmp_path: Path, **chosen: Any) -> tuple[Study, Any]:
    settings = Settings(validated(recipe, tmp_path), str(tmp_path / "store"))
    return plan_of_study(settings, **{"seeds": "0-1", "sweeps": [LR]} | chosen)


def test_every_seed_has_every_setting(recipe: Any, tmp_path: Path) -> None:
    study, planned = over_seeds(recipe, tmp_path)
    found = [(one.seed, one.setting) for one in study.members]
    assert found == [(seed, f"optm_lr={lr}") for seed in (0, 1) for lr in ("1e-3", "2e-3")]
    assert [one.plan.recipe.train.seed for one in planned] == [0, 0, 1, 1]
    assert [one.begins for one in planned] == [None, planned[0].plan, None, planned[2].plan]
    cost = planned_study(study, planned, str(tmp_path / "store"))
    assert [work.generated for _, work in cost.runs] == [16, 8, 16, 8]


@pytest.mark.parametrize(
    ("sweep", "generated", "scored"),
    [
        ("rollout.n_generation=4,2", [16, 16], [16 + 2 * 64, 16 + 64]),
        ('rewards=[{ fn = { name = "ocr" } }],[{ fn = { name = "jpeg" } }]', [16, 8], [16 + 2 * 64, 16 + 2 * 64]),
        (LR, [16, 8], [16 + 2 * 64, 8 + 64]),
    ],
)
def test_artifacts_that_a_setting_changes_are_not_shared(
    recipe: Any, tmp_path: Path, sweep: str, generated: list[int], scored: list[int]
) -> None:
    study, planned = over_seeds(recipe, tmp_path, seeds="0", sweeps=[sweep])
    cost = planned_study(study, planned, str(tmp_path / "store"))
    assert [work.generated for _, work in cost.runs] == generated
    per_sample = planned[0].plan.recipe.validation.n_generation * 2
    assert [work.scored for _, work in cost.runs] == [n // 64 * per_sample + n % 64 for n in scored]


def test_a_later_setting_of_a_seed_begins_as_a_fork_of_the_first(recipe: Any, tmp_path: Path) -> None:
    _, (first, second, *_) = over_seeds(recipe, tmp_path, seeds="3")
    run = Run(freeze(plan_of(first.settings), first.settings.store), first.settings.store)
    make_all(run)
    settings = as_begun(second)
    assert settings.fork is not None
    plan = plan_of_fork(settings.fork, settings)
    assert plan.run_id == second.member.run
    assert plan.origin is not None
    assert (plan.origin.run, plan.origin.at, plan.origin.stored) == (first.member.run, 0, None)
    assert plan.recipe.train.optm_lr == 2e-3
    assert plan.recipe.train.seed == 3


def test_a_setting_of_the_policy_begins_anew(recipe: Any, tmp_path: Path) -> None:
    _, planned = over_seeds(recipe, tmp_path, sweeps=["policy.lora.r=2,4"])
    assert [one.begins for one in planned] == [None] * 4


def test_the_digest_of_how_runs_are_judged_leaves_out_the_number_of_evaluations(origin: Run) -> None:
    _, planned = what_if(origin, "train.optm_lr=2e-3", controls=0)
    one, other = (digest(judged_by(each.plan)) for each in planned)
    assert one == other == digest(judged_by(origin.plan))
    jpeg = what_if(origin, 'rewards=[{ fn = { name = "jpeg" } }]', controls=0)[1][1].plan
    assert digest(judged_by(jpeg)) != one
