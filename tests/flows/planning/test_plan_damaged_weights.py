"""Plans find files of the base model that are cut short, missing or damaged, of every component, and name them all."""

import json
import os
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from cosmos_rl_core import plugins
from cosmos_rl_core.conformance.models import tiny_pipelines
from cosmos_rl_core.conformance.models.adapters import load_model
from cosmos_rl_core.errors import ArtifactError, ConfigError
from cosmos_rl_core.models import _loading
from cosmos_rl_core.pipelines import directories
from cosmos_rl_core.pipelines.weight_files import damages
from flows.cli import app as cli
from flows.planning.plan import Settings, plan_of
from stages.contracts import ModelRef
from stages.training.loading import load_stock
from tests.core.pipelines.test_weight_files import WEIGHTS


@pytest.fixture
def base(tmp_path: Path) -> Path:
    return Path(shutil.copytree(directories.resolve_path("package:tiny-sd3"), tmp_path / "base"))


@pytest.mark.parametrize("file", WEIGHTS)
def test_truncated_weights_end_a_plan_with_65_and_the_number_of_missing_bytes(file: str, base: Path, recipe):
    size = (base / file).stat().st_size
    os.truncate(base / file, size - 1000)
    said = CliRunner().invoke(cli.app, ["plan", recipe(), "--set", f"policy.model_name_or_path={base}"])
    assert said.exit_code == 65
    assert f"{base / file} is cut short: 1000 of {size} bytes are missing" in said.stderr
    assert "fetch the model again" in said.stderr


@pytest.mark.parametrize("name", ["transformer", "vae", "scheduler", "text_encoder", "tokenizer", "tokenizer_3"])
@pytest.mark.parametrize("null", [True, False])
def test_a_pipeline_lists_every_component_that_it_needs(name: str, null: bool, base: Path, recipe):
    file = base / directories.INDEX
    index = json.loads(file.read_text(encoding="utf-8"))
    del index[name]
    file.write_text(json.dumps(index | ({name: [None, None]} if null else {})), encoding="utf-8")
    assert damages(str(base)) == [f"{file} is damaged: it lists no {name}"]
    with pytest.raises(ArtifactError, match=f"it lists no {name}"):
        plan_of(Settings(recipe(), overrides=(f"policy.model_name_or_path={base}",)))


@pytest.mark.parametrize(
    ("text", "what"), [("{", "it is not JSON"), ("[]", "expected a JSON object"), ('{"a": 1}', "it has no _class_name")]
)
def test_a_damaged_list_of_components_ends_a_plan_with_65(text: str, what: str, base: Path, recipe):
    (base / directories.INDEX).write_text(text, encoding="utf-8")
    said = CliRunner().invoke(cli.app, ["plan", recipe(), "--set", f"policy.model_name_or_path={base}"])
    assert said.exit_code == 65
    assert f"{base / directories.INDEX} is damaged: {what}" in said.stderr


@pytest.mark.parametrize(
    "file", [*(f"{Path(weights).parent}/config.json" for weights in WEIGHTS), "scheduler/scheduler_config.json"]
)
def test_damaged_settings_of_a_component_end_a_plan_with_65(file: str, base: Path, recipe):
    os.truncate(base / file, 20)
    said = CliRunner().invoke(cli.app, ["plan", recipe(), "--set", f"policy.model_name_or_path={base}"])
    assert said.exit_code == 65
    assert f"{base / file} is damaged: it is not JSON" in said.stderr


def test_weights_of_another_format_are_named(base: Path, recipe):
    (base / WEIGHTS[1]).rename(base / "vae" / "diffusion_pytorch_model.bin")
    with pytest.raises(ArtifactError, match=r"vae/diffusion_pytorch_model\.safetensors is missing; there is") as error:
        plan_of(Settings(recipe(), overrides=(f"policy.model_name_or_path={base}",)))
    assert "there is diffusion_pytorch_model.bin, which is not read" in str(error.value)


def test_damage_is_reported_with_mistakes_in_the_recipe(base: Path, recipe):
    os.truncate(base / WEIGHTS[0], (base / WEIGHTS[0]).stat().st_size - 1)
    with pytest.raises(ConfigError) as error:
        plan_of(
            Settings(recipe(), overrides=(f"policy.model_name_or_path={base}", "train.train_batch_per_replica=4000"))
        )
    assert "one iteration needs 1000 prompts, the dataset 'ocr' has 4; add prompts" in str(error.value)
    assert f"{base / WEIGHTS[0]} is cut short" in str(error.value)


def change_weights(file: Path, change) -> None:
    weights = load_file(file)
    change(weights)
    save_file(weights, file, metadata={"format": "pt"})


def load_all(base: Path) -> None:
    load_model(base, ("transformer", "vae", "text"), torch.device("cpu"))


def load_whole_stock(base: Path) -> None:
    ref = ModelRef(path=str(base), adapter=directories.adapter_name(base), digest="")
    load_stock(ref, str(base), "float32", torch.device("cpu"))


@pytest.mark.parametrize("name", plugins.known("models"))
def test_weights_that_an_intact_file_lacks_are_an_error_and_never_made_up(name: str, tmp_path: Path):
    base = tiny_pipelines.save(name, tmp_path / "base")
    for load in (load_all, load_whole_stock):
        load(base)
        for file in sorted(base.rglob("*.safetensors")):
            whole = file.read_bytes()
            lost = min(load_file(file))
            change_weights(file, lambda weights, lost=lost: weights.pop(lost))
            with pytest.raises(ArtifactError, match=rf"files of '{file.parent.name}' in the pipeline .* lack") as error:
                load(base)
            assert error.value.exit_code == 65
            assert f"lack 1 weight: {lost};" in str(error.value)
            file.write_bytes(whole)


def test_weights_of_another_shape_are_named_with_both_shapes(base: Path):
    name = "text_model.embeddings.position_embedding.weight"
    change_weights(base / WEIGHTS[2], lambda weights: weights.update({name: torch.zeros(5, 16)}))
    with pytest.raises(ArtifactError) as error:
        load_all(base)
    assert str(error.value) == (
        f"the files of 'text_encoder' in the pipeline {str(base)!r} do not fit its config.json: 1 weight: {name} is "
        "[5, 16], expected [12, 64]; fetch them again"
    )


@pytest.mark.parametrize("kept", [("shared.weight",), ("encoder.embed_tokens.weight",), None])
@pytest.mark.parametrize("name", ["sd3", "wan"])
def test_shared_weights_may_have_either_name_or_both(name: str, kept: tuple[str, ...] | None, tmp_path: Path):
    base = tiny_pipelines.save(name, tmp_path / "base")
    file = max(base.glob("text_encoder*/model.safetensors"))
    table = load_file(file)["shared.weight"]

    def rename(weights: dict[str, torch.Tensor]) -> None:
        del weights["shared.weight"]
        weights |= {name: table.clone() for name in kept or ("shared.weight", "encoder.embed_tokens.weight")}

    change_weights(file, rename)
    state = _loading.read_part(str(base), file.parent.name).state_dict()
    assert torch.equal(state["encoder.embed_tokens.weight"], table)
