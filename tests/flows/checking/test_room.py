"""Recipes that do not fit the devices of a profile, and the settings that make them fit."""

import json
import shutil
from pathlib import Path

import pytest
from typer.testing import CliRunner

from cosmos_rl_core.errors import ConfigError
from cosmos_rl_core.pipelines import directories, sizes
from cosmos_rl_core.recipes.reading import check, read_values
from flows.checking import room
from flows.cli import app as cli
from flows.planning.plan import Plan, Settings, freeze, plan_of
from flows.planning.run import Run
from flows.sizes import activations, costs, memory
from stages import contracts
from tests.flows.by_hand import make_all

GIB = 2**30
WIDE = {
    "num_layers": 4,
    "num_attention_heads": 16,
    "attention_head_dim": 64,
    "caption_projection_dim": 1024,
    "pos_embed_max_size": 64,
}
BATCH = ("train.train_policy.mini_batch=4", "policy.diffusers.inference_size=[256,256]", "launch.device=cuda")


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The tiny pipeline's configs with a transformer of 10^8 parameters, without weights."""
    folder = tmp_path_factory.mktemp("wide") / "model"
    shutil.copytree(
        directories.resolve_path("package:tiny-sd3"), folder, ignore=shutil.ignore_patterns("*.safetensors")
    )
    config = folder / "transformer/config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | WIDE), encoding="utf-8")
    return str(folder)


def on(wide: str, overrides: tuple[str, ...]) -> tuple[str, ...]:
    """The wide model on GPUs, with a batch of 4 unless forwards are filled by tokens."""
    by_tokens = any("tokens_per_forward" in one for one in overrides)
    return (f"policy.model_name_or_path={wide}", *BATCH[by_tokens:], *overrides)


def planned(path: str, wide: str, *overrides: str) -> Plan:
    overrides = on(wide, overrides)
    found = plan_of(Settings(path, overrides=overrides), without_weights=True)
    assert isinstance(found, Plan)
    return found


def needs(path: str, wide: str, *overrides: str) -> float:
    """What a rank of the update takes, in GiB."""
    values = read_values(path, on(wide, overrides))
    (found,) = memory.stages(check(values, path), ["update"], activations=True)
    return found.peak.device / GIB


def test_checkpointing_is_decided_by_the_memory_of_the_device(recipe, wide: str, tmp_path: Path):
    path, auto = recipe(), "policy.model_gradient_checkpointing=auto"
    assert costs.is_large(planned(path, wide).recipe)
    kept, again = (needs(path, wide, f"policy.model_gradient_checkpointing={on}") for on in ("false", "true"))
    assert again < kept
    memories = {None: True, kept + 0.01: False, kept - 0.01: True, again + 0.01: True}
    for size, expected in memories.items():
        known = () if size is None else (f"launch.device_memory_gb={size}",)
        plan = planned(path, wide, auto, *known)
        assert plan.checkpointing is expected
        assert plan.settled.policy.model_gradient_checkpointing is expected
        # What was decided changes no name of a run.
        assert plan.identity() == planned(path, wide, auto).identity()


def test_a_stage_that_does_not_fit_is_refused_with_a_setting_that_makes_it_fit(recipe, wide: str):
    path = recipe()
    kept, again = (needs(path, wide, f"policy.model_gradient_checkpointing={on}") for on in ("false", "true"))
    half = needs(path, wide, "train.train_policy.mini_batch=2", "policy.model_gradient_checkpointing=true")
    assert half < again < kept
    between = (again + kept) / 2
    with pytest.raises(ConfigError, match=rf"update needs {kept:.1f} GiB on a device of {between:g} GiB") as refused:
        planned(path, wide, f"launch.device_memory_gb={between}")
    assert "it fits with policy.model_gradient_checkpointing = true" in str(refused.value)
    below = (half + again) / 2
    with pytest.raises(ConfigError) as refused:
        planned(path, wide, f"launch.device_memory_gb={below}", "policy.model_gradient_checkpointing=true")
    assert "it fits with train.train_policy.mini_batch = 2" in str(refused.value)
    with pytest.raises(ConfigError, match="no setting here makes it fit"):
        planned(path, wide, "launch.stage_device_memory_gb={ update = 0.1 }")


def test_weights_that_a_process_keeps_count_and_are_the_first_to_give_up(recipe, wide: str):
    path, stays = recipe(), ("launch.mode=warm", "launch.resident_gb=1")
    alone, together = needs(path, wide), needs(path, wide, *stays)
    # The allowance for fragments is a share of the rest.
    assert together - alone == pytest.approx(1 + memory.FRAGMENTED, abs=1e-6)
    with pytest.raises(ConfigError, match=r"kept between stages 1\.0") as refused:
        planned(path, wide, *stays, f"launch.device_memory_gb={alone + 0.5}")
    assert "it fits with launch.resident_gb = 0" in str(refused.value)


def test_memory_of_forwards_at_several_noise_levels_counts_and_can_be_reduced(recipe, wide: str):
    path, again = recipe(), "policy.model_gradient_checkpointing=true"
    tokens = sizes.num_tokens(wide, (256, 256), 1)
    found = [needs(path, wide, again, f"train.train_policy.tokens_per_forward={n * tokens}") for n in (1, 2, 4, 8)]
    assert found == sorted(set(found))
    assert found[0] == needs(path, wide, again, "train.train_policy.mini_batch=1")
    assert found[2] == needs(path, wide, again)
    eight = f"train.train_policy.tokens_per_forward={8 * tokens}"
    with pytest.raises(ConfigError) as refused:
        planned(path, wide, again, eight, f"launch.device_memory_gb={(found[1] + found[2]) / 2}")
    assert f"it fits with train.train_policy.tokens_per_forward = {2 * tokens}" in str(refused.value)


@pytest.mark.parametrize(("ranks", "fits"), [(6, 3), (4, 4)])
def test_weights_are_cut_into_the_fewest_parts_that_fit(recipe, wide: str, ranks: int, fits: int):
    """Over two, three or six of six ranks, and over two or four of four."""
    least = ("policy.model_gradient_checkpointing=true", "train.train_policy.mini_batch=1")
    path, options = recipe(), (*least, "train.param_dtype=bfloat16", f"launch.processes={ranks}")
    more, less = (needs(path, wide, *options, f"launch.dp_shard_size={n}") for n in (2, fits))
    assert less < more < needs(path, wide, *options)
    with pytest.raises(ConfigError) as refused:
        planned(path, wide, *options, f"launch.stage_device_memory_gb={{ update = {(more + less) / 2} }}")
    assert str(refused.value).endswith(f"it fits with launch.dp_shard_size = {fits}")


def test_a_forward_has_at_most_all_noise_levels_of_the_samples_of_a_step(recipe):
    path = recipe()

    def rows(**options: float) -> int:
        given = [f"train.train_policy.{name}={value}" for name, value in options.items()]
        return activations.micro_batch(check(read_values(path, given), "tiny"), ())

    tokens = sizes.num_tokens(directories.resolve_path("package:tiny-sd3"), (32, 64), 1)
    assert rows(mini_batch=2) == 2
    assert rows(tokens_per_forward=3 * tokens) == 3
    # At all ten noise levels, and at half of them.
    many = {"tokens_per_forward": 1000 * tokens, "batch_size_per_optimize": 4}
    assert rows(**many) == 4 * 10
    assert rows(**many, timesteps_fraction=0.5) == 4 * 5


def test_a_run_keeps_its_decision_on_checkpointing(recipe, tmp_path: Path):
    """The tiny model always fits; a plan that was written otherwise is what a retry takes."""
    store = str(tmp_path / "store")
    settings = Settings(recipe(), store, "kept", overrides=("policy.model_gradient_checkpointing=auto",))
    plan = plan_of(settings)
    assert plan.checkpointing is False
    freeze(plan.model_copy(update={"checkpointing": True}), store)
    again = freeze(plan_of(settings), store)
    asked = make_all(Run(again, store))
    updates = [request.settings(contracts.Update) for request in asked.values() if request.stage == "update"]
    assert [update.gradient_checkpointing for update in updates] == [True, True]


def test_settings_change_one_at_a_time(recipe):
    found = check(read_values(recipe(), ()), "tiny")
    other = room.changed(found, ("train.train_policy.mini_batch", 3), ("launch.cp_size", 2))
    assert (other.train.train_policy.mini_batch, other.launch.cp_size) == (3, 2)
    assert room.changed(other, ("train.train_policy.mini_batch", 1), ("launch.cp_size", 1)) == found


def test_a_plan_prints_the_refusal_of_an_unknown_stage(recipe):
    argv = ["plan", recipe(), "--set", "launch.stage_device_memory_gb={ sampling = 8 }"]
    ended = CliRunner().invoke(cli.app, argv)
    assert ended.exit_code == 64
    assert "launch.stage_device_memory_gb.sampling: unknown distributed stage" in ended.stderr
