"""The numbers of runs whose artifacts are made by hand, and what loggers hear of them."""

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from cosmos_rl_core.algorithms import grpo, nft
from cosmos_rl_core.algorithms._advantages import decoupled
from cosmos_rl_core.algorithms._base import algorithm_of
from cosmos_rl_core.config.train import Gate
from cosmos_rl_core.errors import ConfigError
from cosmos_rl_core.recipes.reading import check, read_values
from cosmos_rl_core.storage import store
from flows.planning import requests
from flows.planning.plan import METRICS_FILE
from flows.session import loop
from flows.watching.metrics import MetricsFile, lines_of
from flows.watching.tracking import Tracker
from stages import contracts
from stages.artifacts.generations import invalidate
from stages.artifacts.manifest import Manifest
from stages.artifacts.request import Request
from stages.artifacts.slots import current_manifest
from stages.formats.tables import to_parquet
from stages.scoring.rewards import gated, placed
from tests.flows.by_hand import MONITORED, SFT, SMALL_SFT, validated
from tests.flows.tracked import Waves, go, go_until, logging_to, make_with_numbers, rows, stored
from tests.hand_made import make, make_run, planned, rewards


def test_the_file_has_every_number_in_the_order_of_the_loop(recipe, tmp_path):
    run = planned(validated(recipe, tmp_path), tmp_path, run_id="hand", iterations=1)
    go(run)
    scores = {"_mean": 0.5, "_standard_error": 0.125, "_scored": 7, "_failed": 1, "_seconds": 3.0}
    val = {f"val/ocr{key}": value for key, value in scores.items()} | {"val/reward_avg": 0.5, "val/rollout_count": 7}
    here = {"iteration": 0, "step": 0}
    step = {"train/grad_norm": 1.0, "train/learning_rate": pytest.approx(1e-3)}
    advantages = {"mean": 0.0, "std": 1.0, "max": 1.0, "min": -1.0}
    assert rows(run) == [
        {"stage": "evaluate-ocr", "policy_version": 0, "step": 0, **val},
        {"stage": "rollout", **here, "rollout/samples": 8, "rollout/seconds": 10.0},
        {"stage": "reward-ocr", **here, **{f"reward/ocr{key}": value for key, value in scores.items()}},
        {"stage": "update", "iteration": 0, "step": 1, **step, "train/loss_avg": 0.5},
        {"stage": "update", "iteration": 0, "step": 2, **step, "train/loss_avg": 0.25},
        {
            **{"stage": "update", "iteration": 0, "step": 2, "train/excluded": 1, "train/iteration_time": 30.0},
            **{"train/reward_mean": 0.5, "train/reward_std": 0.5, "train/reward_max": 1.0, "train/reward_min": 0.0},
            **{f"rollout/advantage_{key}": value for key, value in advantages.items()},
        },
        {"stage": "evaluate-ocr", "policy_version": 1, "step": 2, **val},
    ]


def test_the_steps_of_a_supervised_run_are_lines_too(tmp_path):
    run = planned(SFT, tmp_path, overrides=SMALL_SFT)
    go(run)
    lines = [row for row in rows(run) if row["stage"] == "finetune"]
    assert [(row["iteration"], row["step"]) for row in lines if "train/loss_avg" in row] == [
        (0, 1), (0, 2), (1, 3), (1, 4),
    ]  # fmt: skip
    assert not any("train/reward_mean" in row for row in lines)


def test_policy_gradients_have_the_names_that_cosmos_rl_gives_them(recipe, tmp_path):
    steps = 'type = "grpo"\nkl_beta = 0.01\ntrain_on = [0, 1]'
    settings = (('type = "nft"', steps), ("timesteps_fraction = 1.0\n", ""))
    sampler = ("diffusers = { inference_size = [32, 64] }",)
    stochastic = "diffusers = { inference_size = [32, 64], sample = { solver = 'flow_sde' } }"
    weight = ("fn = { name", "weight = 2.0\nfn = { name")
    run = planned(recipe(*settings, (*sampler, stochastic), weight), tmp_path, run_id="hand", iterations=1)
    go(run)
    first, _, last = [row for row in rows(run) if row["stage"] == "update"]
    numbers = {name: value for name, value in first.items() if name.startswith("GRPO/")}
    assert numbers == {"GRPO/policy_loss": 0.5, "GRPO/kl_loss": 0.25, "GRPO/log_prob_ratio": 1.0}
    assert {"train/loss_avg", "train/clipped"} <= first.keys()
    assert not {"train/policy_loss_avg", "train/kl_loss_avg", "train/ratio"} & first.keys()
    assert last["GRPO/reward_mean"] == last["train/reward_mean"] == 0.5
    # The table has the weighted scores 0 and 1, and one sample without.
    assert (last["GRPO/ocr"], last["GRPO/ocr_std"], last["GRPO/ocr_valid_rate"]) == (0.25, 0.25, pytest.approx(2 / 3))


def test_only_the_reward_that_judges_the_run_has_cosmos_rls_name(recipe, tmp_path):
    run = planned(validated(recipe, tmp_path, MONITORED), tmp_path, run_id="hand")
    go(run)
    evaluations = [row for row in rows(run) if row["stage"].startswith("evaluate-")]
    assert [(row["policy_version"], row["step"], row["stage"]) for row in evaluations] == [
        (version, step, f"evaluate-{name}") for version, step in ((0, 0), (2, 4)) for name in ("jpeg", "ocr")
    ]
    assert ["val/reward_avg" in row for row in evaluations] == [False, True] * 2


def test_rewards_that_were_normalised_are_published_as_they_were_scored(recipe, tmp_path):
    """``mixing = "gdpo"`` stores normalised rewards, whose mean is 0 whatever the policy does."""
    weighed = "[[rewards]]\nweight = 0.5\n"
    nft = 'type = "nft"\nmixing = "gdpo"\nglobal_std = false'
    run = make_run(recipe(("[[rewards]]\n", weighed), ('type = "nft"', nft)), tmp_path, iterations=1)
    table = pd.DataFrame(
        {"score.ocr": [0.25, 0.75, 1.0], "reward": [-0.5, 0.5, None], "reward.ocr": [-0.5, 0.5, None],
         "advantage": [-1.0, 1.0, None], "used": [True, True, False]}
    )  # fmt: skip
    update = requests.update(run, 0).model_copy(update={"slot": str(tmp_path / "update")})
    steps = to_parquet(pd.DataFrame({"step": [0, 1], "loss": [0.5, 0.25]}))
    made = make(update, {"current/w": b"w", contracts.METRICS: steps, contracts.Update.ADVANTAGES: to_parquet(table)})
    *_, line = lines_of(update, made, 0, "ocr")
    # Half of 0.25 and of 0.75; the third sample does not count.
    means = {"mean": 0.25, "std": 0.125, "max": 0.375, "min": 0.125}
    assert line.values.items() >= {f"train/reward_{key}": value for key, value in means.items()}.items()
    normalized = {key: value for key, value in line.values.items() if "normalized" in key}
    assert normalized == {f"train/normalized_reward_{key}": value for key, value in
                          {"std": 0.5, "max": 0.5, "min": -0.5}.items()}  # fmt: skip


def published(recipe, tmp_path: Path, type_: str, table: pd.DataFrame, **settings: Any) -> dict[str, Any]:
    """The last line of an update that trained on these advantages."""
    run = make_run(recipe(), tmp_path, iterations=1)
    update = requests.update(run, 0).model_copy(update={"slot": str(tmp_path / "update")})
    config = update.settings(contracts.Update)
    options = {"nft": nft, "grpo": grpo}[type_].Options.model_validate(
        {"type": type_, "dataset": {"name": "mock"}, **settings}
    )
    weights = {name.removeprefix("reward."): 1.0 for name in table.columns if name.startswith("reward.")}
    config = config.model_copy(update={"algorithm": options, "reward_weights": weights})
    update = update.model_copy(update={"config": config})
    table = algorithm_of(options).advantages(table).assign(rollout="r")
    steps = to_parquet(pd.DataFrame({"step": [0], "loss": [0.5]}))
    made = make(update, {"current/w": b"w", contracts.METRICS: steps, contracts.Update.ADVANTAGES: to_parquet(table)})
    *_, line = lines_of(update, made, 0, "a")
    return line.values


def scored(**scores: list[float]) -> pd.DataFrame:
    """Samples of one prompt, each of whose rewards has weight 1."""
    count = len(next(iter(scores.values())))
    table = pd.DataFrame({"sample_id": [*map(str, range(count))], "prompt_id": "p", "valid": True})
    table = table.assign(**{f"reward.{name}": values for name, values in scores.items()})
    return table.assign(reward=table.filter(like="reward.").sum(axis=1))


@pytest.mark.parametrize("mixing", ["sum", "gdpo"])
@pytest.mark.parametrize("broken", [False, True])
def test_the_own_scores_of_a_gated_sample_are_published_nowhere(recipe, tmp_path, mixing: str, broken: bool):
    table = scored(a=[99.0, 1.0, 7.0, 2.0]).assign(**{"gate.g": [0.0, 1.0, 1.0, 1.0]})
    table = table.assign(**{"score.a": table["reward.a"]}) if mixing == "gdpo" else table
    table = gated(table, {"g": Gate(min=0.5, max=None, on_fail="worst")})
    table = placed(decoupled(table, {"a": 1.0}) if mixing == "gdpo" else table)
    if broken:
        # A sample that is not finite has a row without rewards and marks.
        table = pd.concat([table, pd.DataFrame({"sample_id": ["4"], "prompt_id": ["p"], "valid": [False]})])
    found = published(recipe, tmp_path, "nft", table, mixing=mixing, global_std=False)
    assert {name: found[f"train/reward_{name}"] for name in ("mean", "min", "max")} == {
        "mean": 2.75, "min": 1.0, "max": 7.0,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("type_", "settings"),
    [
        ("grpo", {}),
        ("grpo", {"global_std": True}),
        ("nft", {"mixing": "gdpo", "global_std": False}),
    ],
)
def test_a_reward_whose_advantages_are_lost_to_the_floor_is_named(recipe, tmp_path, type_: str, settings):
    large, small = [0.0, 1.0, 2.0, 3.0], [0.0, 1e-4, 2e-4, 3e-4]
    deviation = 1.25**0.5 * 1e-4
    table = scored(a=large, b=small)
    if type_ == "nft":
        table = decoupled(table.assign(**{"score.a": large, "score.b": small}), {"a": 1.0, "b": 1.0})
    found = published(recipe, tmp_path, type_, table, **settings)
    assert found["train/lost_to_floor"] == pytest.approx(1e-4 / (deviation + 1e-4))


def test_one_sum_of_rewards_hides_the_small_one_from_the_floor(recipe, tmp_path):
    table = scored(a=[0.0, 1.0, 2.0, 3.0], b=[0.0, 1e-4, 2e-4, 3e-4])
    assert "train/lost_to_floor" not in published(recipe, tmp_path, "grpo", table, reward_average=False)


def test_a_missing_number_is_null(recipe, tmp_path):
    run = make_run(recipe(), tmp_path, iterations=1)
    (reward,) = rewards(run, run.slots.iteration(0, "rollout"), 0)
    manifest = current_manifest(reward)
    assert manifest is not None
    manifest = manifest.model_copy(update={"summary": {"ocr": float("nan"), "standard_error": None, "scored": 1}})
    (line,) = lines_of(reward, manifest, 0, "ocr")
    assert json.loads(line.encode()) == line.values
    assert (line.values["reward/ocr_mean"], line.values["reward/ocr_standard_error"]) == (None, None)
    assert (line.values["reward/ocr_scored"], line.values["reward/ocr_failed"]) == (1, 0)


def test_a_run_that_was_killed_at_every_wave_ends_with_the_same_file(recipe, tmp_path):
    path = validated(recipe, tmp_path, MONITORED, freq=1)
    whole, run = (planned(path, tmp_path, run_id=name) for name in ("whole", "killed"))
    lengths = []
    for wave in go(whole):
        go_until(run, wave)
        found = store.read_if_exists(store.join(run.url, METRICS_FILE)) or b""
        assert stored(whole).startswith(found)
        lengths.append(len(found))
    assert lengths == sorted(lengths)
    go(run)
    assert stored(run) == stored(whole)


def test_the_file_is_written_once_an_update_and_once_an_evaluation(recipe, tmp_path):
    run = planned(validated(recipe, tmp_path), tmp_path, run_id="hand")
    lengths = []
    with Tracker(run, [].append) as tracker:
        waves = Waves(tracker)

        def launch(name: str, *requests: Request) -> list[Manifest]:
            manifests = waves.launch(name, *requests)
            lengths.append(
                (name.rpartition("/")[2], len(store.read_if_exists(store.join(run.url, METRICS_FILE)) or b""))
            )
            return manifests

        loop.make(run, launch)
    grew = [name for (_, before), (name, after) in pairwise(lengths) if after != before]
    assert grew == ["evaluate-ocr", "update+fragment", "update+fragment", "evaluate-ocr"]


def test_a_finished_run_leaves_its_file_alone_and_a_resumed_one_never_cuts_it(recipe, tmp_path):
    run = planned(validated(recipe, tmp_path), tmp_path, run_id="hand")
    go(run)
    before = Path(run.url, METRICS_FILE).stat()
    go_until(run, "iteration-0001/update+fragment")
    go(run)
    after = Path(run.url, METRICS_FILE).stat()
    assert (after.st_ino, after.st_mtime_ns) == (before.st_ino, before.st_mtime_ns)


def test_a_line_is_replaced_when_its_artifact_is_made_again(recipe, tmp_path):
    run = planned(recipe(), tmp_path, run_id="hand")
    go(run)
    (reward,) = rewards(run, run.slots.iteration(1, "rollout"), 1)
    invalidate(reward.slot, 1, "the scorer was broken")
    make_with_numbers(reward, raised_by=0.25)
    before = rows(run)
    go(run)
    changed = [(old["stage"], old["iteration"]) for old, new in zip(before, rows(run), strict=True) if old != new]
    assert changed == [("reward-ocr", 1)]


def test_a_run_that_goes_further_adds_to_the_file(recipe, tmp_path):
    path = recipe()
    run = planned(path, tmp_path, run_id="hand")
    go(run)
    before = stored(run)
    go(planned(path, tmp_path, run_id="hand", iterations=3))
    assert stored(run).startswith(before)
    assert [row["step"] for row in rows(run) if "train/loss_avg" in row] == [1, 2, 3, 4, 5, 6]


def test_the_file_is_one_object_on_any_store(store_url):
    url = store.join(store_url, METRICS_FILE)
    file = MetricsFile(url)
    assert [file.add(b"1\n"), file.add(b"2\n")] == [True, True]
    file.write()
    assert store.read(url) == b"1\n2\n"
    again = MetricsFile(url, store.read(url))
    assert [again.add(line) for line in (b"1\n", b"2\n", b"3\n")] == [False, False, True]
    again.write(whole=True)
    assert store.read(url) == b"1\n2\n3\n"
    shorter = MetricsFile(url, store.read(url))
    shorter.add(b"1\n")
    shorter.write()
    assert store.read(url) == b"1\n2\n3\n"
    shorter.write(whole=True)
    assert store.read(url) == b"1\n"


def test_a_store_that_does_not_take_the_file_is_a_warning(recipe, tmp_path):
    run = planned(recipe(), tmp_path, run_id="hand")
    Path(run.url, METRICS_FILE).mkdir()
    notes: list[str] = []
    go(run, notes)
    assert notes
    assert all(note.startswith(f"warning: {METRICS_FILE} is not complete") for note in notes)


def test_the_console_prints_only_new_lines(recipe, tmp_path):
    run = planned(logging_to(recipe, "console"), tmp_path, run_id="hand")
    go_until(run, "iteration-0001/rollout")
    notes: list[str] = []
    go(run, notes)
    assert len(notes) == sum(row["iteration"] == 1 for row in rows(run))
    assert (
        notes[2]
        == "  stage update  iteration 1  step 3  train/grad_norm 1  train/learning_rate 0.001  train/loss_avg 0.5"
    )


def mistakes_of(path: str, *overrides: str) -> str:
    """What is wrong with a recipe."""
    with pytest.raises(ConfigError) as error:
        check(read_values(path, list(overrides)), path)
    return str(error.value)


def test_loggers_are_checked(recipe):
    path = recipe()
    assert check(read_values(path, ['logging.logger=["console", "wandb"]']), path).logging.project_name == "cosmos_rl"
    assert "logging.logger.0: Input should be 'console' or 'wandb'" in mistakes_of(
        path, 'logging.logger=["tensorboard"]'
    )
    assert "did you mean 'project_name'?" in mistakes_of(path, "logging.projekt_name=x")
    assert "logging.project_name" in mistakes_of(path, "logging.project_name=''")


def test_a_run_goes_on_with_another_logger(recipe, tmp_path):
    path = recipe()
    run = make_run(path, tmp_path, iterations=1)
    other = planned(path, tmp_path, run_id="hand", overrides=('logging.logger=["console"]',))
    assert other.recipe.logging.logger == ("console",)
    assert other.recipe.identity() == run.recipe.identity()
    assert [
        current_manifest(r) is not None
        for r in (requests.policy(other), requests.rollout(other, 0), requests.update(other, 0))
    ] == [True] * 3
