"""The best policy version of a run, and exports of chosen versions: known losses and scores, no processes."""

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from cosmos_rl_core.errors import ArtifactError, ConfigError
from cosmos_rl_core.storage import store
from flows import post_train
from flows.cli import app as cli
from flows.library import open_run
from flows.library.best import best_of
from flows.library.exports import export
from flows.library.lines import all_runs
from flows.library.states import states
from flows.operations.rerun import rerun
from flows.planning.run import Run
from flows.planning.steps import read_run
from tests.flows.by_hand import HELD_OUT_MEDIA
from tests.flows.judged_runs import (
    HELD_OUT,
    NO_REWARD,
    SECOND_REWARD,
    best,
    judged_by,
    make_with,
    run_of,
)

LOSSES: list[tuple[dict[int, float | None], Any]] = [
    ({0: 0.5, 1: 0.3, 2: 0.1, 3: 0.2, 4: 0.4}, (2, "held-out loss", 0.1)),
    ({0: 0.5, 1: 0.1, 2: 0.3, 3: 0.1, 4: 0.1}, (1, "held-out loss", 0.1)),
    ({0: 0.5, 1: None, 2: 0.6, 3: 0.7, 4: 0.8}, (0, "held-out loss", 0.5)),
    (dict.fromkeys(range(5)), None),
]


@pytest.mark.parametrize(("losses", "expected"), LOSSES)
def test_the_lowest_finite_held_out_loss_is_best_and_the_earliest_of_equals(
    tmp_path: Path, losses: dict[int, float | None], expected: Any
):
    run = run_of(tmp_path, "validation.freq=1", HELD_OUT_MEDIA)
    make_with(run, losses)
    assert best(run) == expected
    overview = open_run("hand", run.store_url).now()
    shown = overview.as_json()["best"]
    others = expected and {"standard_error": None, "rewards": {"ocr": losses[expected[0]]}, "passed": None}
    assert shown == (expected and dict(zip(("k", "by", "figure"), expected, strict=True)) | others)
    by_version = {state.step.k: state.loss for state in overview.states if state.step.stage == "validate"}
    assert by_version == losses


def test_without_a_held_out_loss_the_highest_reward_is_best_and_without_both_nothing_is(tmp_path: Path):
    scores: dict[int, float | None] = {0: 0.1, 1: 0.4, 2: 0.4, 3: None, 4: 0.3}
    run = run_of(tmp_path / "rewarded", "validation.freq=1", SECOND_REWARD)
    make_with(run, scores)
    assert best(run) == (1, "held-out jpeg", 0.4)
    unjudged = run_of(tmp_path / "unjudged", "validation.freq=1", NO_REWARD)
    make_with(unjudged, scores)
    assert best(unjudged) is None
    with pytest.raises(ConfigError, match="nothing ranks the policies of hand"):
        export(unjudged.store_url, "hand", str(tmp_path / "out"), "best")


@pytest.mark.parametrize(
    ("best_by", "expected"),
    [
        # Of version 2 the third sample fails the gate, and the fourth has no score. Version 1 has the highest ocr.
        ("", (2, "held-out weighted reward", pytest.approx(0.6))),
        ("reward", (2, "held-out weighted reward", pytest.approx(0.6))),
        ("ocr", (1, "held-out ocr", pytest.approx(0.9))),
        ("jpeg", (0, "held-out jpeg", 0.0)),
    ],
)
def test_several_rewards_rank_policies_by_their_sum_over_samples_that_pass_every_gate(
    recipe: Any, tmp_path: Path, best_by: str, expected: Any
):
    run = judged_by(recipe, tmp_path, best_by)
    assert best(run) == expected
    found = best_of(run, states(run))
    assert found is not None
    assert found.rewards.keys() == HELD_OUT.keys()
    assert found.passed == ((2, 4) if "weighted" in found.by else None)
    (said, *_) = export(run.store_url, run.plan.run_id, str(tmp_path / "out"), "best").lines()
    assert said == f"best of 0, 1, 2: {found}"
    if best_by == "":
        assert str(found) == (
            "policy 2, held-out weighted reward 0.6 (ocr 0.7333, jpeg 0, pixel_statistics 0.75, 2 of 4 samples count)"
        )
        changes = [str(one) for one in (open_run(run.plan.run_id, run.store_url).now().outlook.others)]
        assert changes[0] == "held-out jpeg: 0.000 (policy 0) -> 0.000 (policy 2)"


@pytest.mark.parametrize(
    ("best_by", "name", "first", "newest"),
    [
        ("", "held-out weighted reward", 0.2, 0.6),
        ("ocr", "held-out ocr", 0.2, 2.2 / 3),
        ("jpeg", "held-out jpeg", 0.0, 0.0),
    ],
)
def test_the_list_of_runs_shows_the_number_that_ranks_policies_and_every_reward(
    recipe: Any, tmp_path: Path, best_by: str, name: str, first: float, newest: float
):
    run = judged_by(recipe, tmp_path, best_by)
    (line,) = all_runs(run.store_url)
    assert (line.reward_name, line.first_reward, line.reward) == (name, pytest.approx(first), pytest.approx(newest))
    assert line.rewards == {"ocr": [0.2, pytest.approx(2.2 / 3)], "jpeg": [0.0, 0.0], "pixel_statistics": [1.0, 0.75]}
    shown = CliRunner().invoke(cli.app, ["runs", "--store", run.store_url]).stdout
    assert f"{name} {first:.3f} -> {newest:.3f}" in shown
    assert ("jpeg 0.000 -> 0.000" in shown, "pixel_statistics 1.000 -> 0.750" in shown) == (True, True)


def test_the_list_of_runs_shows_the_loss_of_a_run_that_a_loss_ranks(tmp_path: Path):
    run = run_of(tmp_path, "validation.freq=2", HELD_OUT_MEDIA, NO_REWARD)
    make_with(run, {0: 0.5, 2: 0.125, 4: 0.25})
    (line,) = all_runs(run.store_url)
    assert (line.reward_name, line.first_reward, line.reward) == ("held-out loss", 0.5, 0.25)


def test_held_out_samples_need_no_reward(tmp_path: Path):
    run = run_of(tmp_path, "validation.freq=2", NO_REWARD)
    names = make_with(run, {})
    assert [name for name in names if name.startswith("policy-")] == [
        f"policy-{k:04d}/{stage}" for k in (0, 2, 4) for stage in ("export", "evaluate", "fragment")
    ]
    report = open_run("hand", run.store_url).now().states[-1].step.request()
    assert {role: len(some) for role, some in report.inputs.items() if some} == {"updates": 4, "judged": 3}


def test_validation_of_media_alone_makes_no_samples(tmp_path: Path):
    run = run_of(tmp_path, NO_REWARD, "rollout={}", f"validation={{ {HELD_OUT_MEDIA.removeprefix('validation.')} }}")
    names = make_with(run, {0: 0.5, 4: 0.25})
    assert [name for name in names if name.startswith("policy-")] == [
        f"policy-{k:04d}/{stage}" for k in (0, 4) for stage in ("export", "validate", "fragment")
    ]
    assert best(run) == (4, "held-out loss", 0.25)
    with pytest.raises(ConfigError, match="needs `dataset`, prompts for samples, or `data`"):
        run_of(tmp_path / "neither", NO_REWARD, "rollout={}", "validation={ freq = 1 }")


@pytest.mark.parametrize(
    ("every", "freq", "exported"),
    [(None, 0, [0, 4]), (1, 0, [0, 1, 2, 3, 4]), (2, 0, [0, 2, 4]), (3, 2, [0, 2, 3, 4]), (9, 0, [0, 4])],
)
def test_every_nth_version_is_exported_and_only_due_ones_are_judged(
    tmp_path: Path, every: int | None, freq: int, exported: list[int]
):
    asked = [] if every is None else [f"train.ckpt.export_every={every}"]
    run = run_of(tmp_path, f"validation.freq={freq}", HELD_OUT_MEDIA, NO_REWARD, *asked)
    names = make_with(run, dict.fromkeys(range(5), 0.5))
    assert [name for name in names if name.endswith("/export")] == [f"policy-{k:04d}/export" for k in exported]
    judged = [k for k in range(5) if f"policy-{k:04d}/validate" in names]
    assert judged == [k for k in range(5) if k in (0, 4) or (freq and k % freq == 0)]
    steps = [step.name for step in post_train.steps(read_run(run.store_url, "hand"))]
    assert [f"policy-{k:04d}/{stage}" in steps for k in range(5) for stage in ("export", "validate")] == [
        k in some for k in range(5) for some in (exported, judged)
    ]


def test_a_finished_run_exports_other_versions_when_it_is_asked_to_and_remakes_nothing(tmp_path: Path):
    make_with(run_of(tmp_path), {})
    with pytest.raises(ConfigError, match=r"no export of policy 3; exported: 0, 4\. To export others, run the recipe"):
        export(str(tmp_path / "store"), "hand", str(tmp_path / "out"), 3)
    again = run_of(tmp_path, "train.ckpt.export_every=3")
    before = {state.step.name for state in states(again) if state.word == "stands"}
    make_with(again, {})
    assert {state.step.name for state in states(again)} - before == {"policy-0003/export"}
    (said,) = export(again.store_url, "hand", str(tmp_path / "out"), 3).lines()
    assert said == f"policy 3 of hand: 2 files in {tmp_path}/out/safetensors/step_6"


def exported(out: Path) -> list[str]:
    return sorted(str(path.relative_to(out)) for path in out.rglob("*.safetensors"))


def command(run: Run, out: Path, *options: str) -> Any:
    return CliRunner().invoke(cli.app, ["export", "hand", str(out), "--store", run.store_url, *options])


def test_best_names_its_figure_and_all_gives_every_version_by_optimizer_steps(tmp_path: Path):
    run = run_of(tmp_path, "validation.freq=2", "train.ckpt.export_every=1", HELD_OUT_MEDIA)
    make_with(run, {0: 0.5, 2: 0.125, 4: 0.25})
    ended = command(run, tmp_path / "best", "--best")
    assert ended.stdout.splitlines() == [
        "best of 0, 2, 4: policy 2, held-out loss 0.125",
        f"policy 2 of hand: 2 files in {tmp_path}/best/safetensors/step_4",
    ]
    assert exported(tmp_path / "best") == ["safetensors/step_4/lora/model.safetensors"]
    assert command(run, tmp_path / "all", "--all").exit_code == 0
    assert exported(tmp_path / "all") == [f"safetensors/step_{n}/lora/model.safetensors" for n in (0, 2, 4, 6, 8)]
    assert command(run, tmp_path / "one", "--policy", "0").exit_code == 0
    assert exported(tmp_path / "one") == ["safetensors/step_0/lora/model.safetensors"]


@pytest.mark.parametrize(
    "options", [("--best", "--all"), ("--policy", "0", "--best"), ("--policy", "4", "--all"), ("--policy", "-1")]
)
def test_choices_of_a_version_exclude_each_other(tmp_path: Path, options: tuple[str, ...]):
    run = run_of(tmp_path)
    make_with(run, {})
    assert command(run, tmp_path / "out", *options).exit_code in (2, 64)
    assert not (tmp_path / "out").exists()


def test_a_version_whose_number_is_not_current_could_be_the_best_so_none_is_given(tmp_path: Path):
    run = run_of(tmp_path, "validation.freq=2", HELD_OUT_MEDIA)
    make_with(run, {0: 0.5, 2: 0.125, 4: 0.25})
    rerun(run.store_url, "hand", "validate", 2)
    with pytest.raises(ConfigError, match="policy-0002/validate is invalidated; run the recipe again"):
        export(run.store_url, "hand", str(tmp_path / "out"), "best")
    url = store.join(run.slots.version(0, "validate"), "manifest.1.json")
    store.write(url, json.dumps({"loss": 0.0}).encode())
    with pytest.raises(ArtifactError, match="policy-0000/validate cannot be used: "):
        export(run.store_url, "hand", str(tmp_path / "out"), "best")
    assert best(run) == (4, "held-out loss", 0.25)
    assert not (tmp_path / "out").exists()


def test_a_run_at_work_gives_the_best_so_far_and_names_the_stages_to_come(tmp_path: Path):
    run = run_of(tmp_path, "validation.freq=2", HELD_OUT_MEDIA)
    with pytest.raises(KeyboardInterrupt):
        make_with(run, {0: 0.5, 2: 0.125}, until="iteration-0002/finetune")
    best_line, copied, to_come = export(run.store_url, "hand", str(tmp_path / "out"), "best").lines()
    assert best_line == "best of 0, 2: policy 2, held-out loss 0.125"
    assert copied.startswith("policy 2 of hand: 2 files in ")
    assert to_come == "policy-0004/validate was not made yet"
