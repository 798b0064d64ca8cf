"""What `plan` prints of memory and files."""

import json
import shutil

import pytest
from typer.testing import CliRunner

from cosmos_rl_core.errors import ArtifactError
from cosmos_rl_core.pipelines import directories
from cosmos_rl_core.recipes.reading import check, read_values
from flows.cli import app as cli
from flows.planning.plan import Settings, plan_of
from flows.sizes import memory
from flows.sizes.basis import Basis

FULL = ("lora = { r = 2 }\n", "")


def printed(path: str, *overrides: str) -> list[str]:
    argv = ["plan", path, *(word for override in overrides for word in ("--set", override))]
    ended = CliRunner().invoke(cli.app, argv)
    assert ended.exit_code == 0, ended.stderr
    return ended.stdout.splitlines()


def table_of(lines: list[str]) -> dict[str, list[str]]:
    """The cells of each row that are not empty."""
    (start,) = (index for index, line in enumerate(lines) if line.startswith("a rank's memory"))
    rows = lines[start : lines.index("", start)]
    assert len({len(row) for row in rows}) == 1
    assert len(rows[0]) <= 80
    names = (
        "a rank's memory, MiB",
        "on the device",
        "meanwhile on the CPU",
        "largest tensor twice",
        "other components",
        "weights of the scorer",
        "transformer in float32",
        "most is held in",
    )
    cut = {row: next((n for n in names if row.startswith(n)), row.split()[0]) for row in rows}
    return {name: row.removeprefix(name).split() for row, name in cut.items()}


def test_ranks_that_share_the_weights_hold_a_part_of_them(recipe):
    path = recipe(FULL)
    alone, shared = (table_of(printed(path, *more)) for more in ((), ("launch.processes=8", "launch.dp_shard_size=8")))
    assert shared["ranks"] == ["8", "1", "8", "8"]
    for row in ("transformer", "old", "gradients", "optimizer"):
        assert 1 / 8 < float(shared[row][-1]) / float(alone[row][-1]) < 1.3 / 8


@pytest.mark.parametrize(
    ("stage", "tensors", "guided_tensors"),
    [
        # In units of one sample's latents and of one text: state, noise, estimate, velocity, and the stored result.
        ("rollout", (4 + 1, 1), (5 + 1, 2)),
        # Latents, noise, state, target, and the velocities of the policy, its old copy and the base.
        ("update", (7, 1), (7, 2)),
        ("validate", (4, 1), (4, 1)),
        # The stock pipeline doubles its batch.
        ("evaluate", (4, 1), (8, 2)),
    ],
)
def test_guidance_takes_a_second_prediction_and_a_second_text(
    recipe, stage: str, tensors: tuple[int, int], guided_tensors: tuple[int, int]
):
    sizes = ("rollout.n_generation_mini_batch=3", "rollout.samples_per_shard=3", "train.train_policy.mini_batch=3")
    judged = ("validation.batch_size=3", "validation.dataset.name=ocr")
    # Float32: 4 channels of 16 x 32, and 2 x 12 tokens and a pooled vector of 128 numbers each.
    latents, text = 4 * 4 * 16 * 32, 4 * 25 * 128
    for scale, (num_latents, num_texts) in ((1.0, tensors), (4.5, guided_tensors)):
        guidance = f"policy.diffusers.sample.guidance_scale={scale}"
        path, length = recipe(), "policy.diffusers.max_prompt_length=12"
        values = read_values(path, (*sizes, *judged, guidance, length))
        (found,) = memory.stages(check(values, path), [stage])
        assert found.rows[memory.BATCH].device == 3 * (num_latents * latents + num_texts * text)


def test_without_the_model_a_plan_says_that_there_are_no_sizes(recipe):
    ended = CliRunner().invoke(cli.app, ["plan", recipe(('"package:tiny-sd3"', '"no/such"'))])
    assert ended.exit_code == 64
    assert ": hf download no/such\n" in ended.stderr
    hint = "config files are enough for a plan: hf download no/such --include '*.json'"
    assert f"\n  the model is not here, so sizes and memory cannot be planned; {hint}\n" in ended.stderr


@pytest.fixture
def lean(tmp_path) -> str:
    """The tiny pipeline without its weights."""
    weights = shutil.ignore_patterns("*.safetensors")
    return str(shutil.copytree(directories.resolve_path("package:tiny-sd3"), tmp_path / "lean", ignore=weights))


@pytest.mark.processes
def test_configs_without_weights_give_the_same_sizes_memory_and_time(recipe, lean):
    found = printed(recipe(), f"policy.model_name_or_path={lean}")
    expected = printed(recipe())
    missing = [line for line in found if " is missing; weights are read from that file" in line]
    assert len(missing) == 5
    own = ("run ", "store ", "model ", *missing)
    assert [line for line in found if not line.startswith(own)] == [x for x in expected if not x.startswith(own)]
    assert f"model      {lean} (sd3, not all files are here), LoRA of rank 2" in found
    assert found[0] == "run        tiny-unknown"


def test_a_run_needs_the_weights(recipe, lean):
    with pytest.raises(ArtifactError, match="is missing; weights are read from that file"):
        plan_of(Settings(recipe(), overrides=(f"policy.model_name_or_path={lean}",)))


def test_a_transformer_of_another_class_is_refused(recipe, tmp_path):
    base = tmp_path / "base"
    shutil.copytree(directories.resolve_path("package:tiny-sd3"), base)
    settings = directories.read_json(base, "transformer", "config.json") | {"_class_name": "UnheardOf"}
    (base / "transformer/config.json").write_text(json.dumps(settings), encoding="utf-8")
    ended = CliRunner().invoke(cli.app, ["plan", recipe(), "--set", f"policy.model_name_or_path={base}"])
    assert ended.exit_code == 64
    assert "has the transformer UnheardOf; supported here: SD3Transformer2DModel" in ended.stderr


def test_the_moment_that_holds_the_most_decides_and_is_named(recipe):
    path, half = recipe(), ("train.param_dtype=bfloat16",)
    (whole,), (cast,) = (memory.stages(check(read_values(path, more), path), ["update"]) for more in ((), half))
    base, rests = whole.rows[memory.TRANSFORMER].device, cast.rows[memory.TRANSFORMER].device
    # Nearly all of it are matrices; it is read in float32 first.
    assert base / 2 < rests < 0.6 * base
    assert cast.rows[memory.AS_READ].device == base
    assert memory.AS_READ not in whole.rows
    reading = {name: held.device for name, held in cast.rows_at("reading").items() if held.device}
    assert reading == {memory.AS_READ: base}
    assert cast.moments["reading"].device == base
    working = sum(held.device for held in cast.rows_at("pass").values())
    assert cast.moments["pass"].device == working < base
    assert (cast.peak.device, cast.moment) == (base, "reading")
    assert whole.moment in ("pass", "step")
    assert whole.peak.device == whole.moments[whole.moment].device > base
    # Ranks that share the base read their rows into the half type.
    shared = ("launch.processes=2", "launch.dp_shard_size=2")
    (cut,) = memory.stages(check(read_values(path, (*half, *shared)), path), ["update"])
    assert memory.AS_READ not in cut.rows
    assert cut.rows[memory.TRANSFORMER].device < 0.6 * rests
    table = table_of(printed(path, *half))
    assert table["transformer in float32"][-1] == f"{base / 2**20:.2f}"
    assert table["most is held in"] == ["reading", "reading", "reading"]


def test_an_update_on_stored_rollouts_holds_the_policy_that_made_them_too(recipe):
    wanted = check(read_values(recipe(), ()), "recipe")
    own, stored = (memory.stages(wanted, ["update"], Basis(generates=generates))[0].rows for generates in (True, False))
    assert memory.BEHAVIOUR not in own
    assert stored[memory.BEHAVIOUR] == own[memory.OLD]
    assert stored[memory.BATCH].device > own[memory.BATCH].device
