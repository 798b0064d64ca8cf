"""Weights as cosmos's own code names them, into a diffusers pipeline."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from cosmos_rl_core.canonical import sha256
from cosmos_rl_core.conformance.models import tiny_pipelines
from cosmos_rl_core.errors import ConfigError
from cosmos_rl_core.importers import native_weights
from cosmos_rl_core.models.cosmos_predict2_5 import model as cosmos_predict2_5
from cosmos_rl_core.pipelines import directories
from flows.cli.app import app

NATIVE = {
    "x_embedder.proj.1.weight": "patch_embed.proj.weight",
    "t_embedder.1.linear_1.weight": "time_embed.t_embedder.linear_1.weight",
    "t_embedder.1.linear_2.weight": "time_embed.t_embedder.linear_2.weight",
    "t_embedding_norm.weight": "time_embed.norm.weight",
    "crossattn_proj.0.weight": "crossattn_proj.0.weight",
    "crossattn_proj.0.bias": "crossattn_proj.0.bias",
    "final_layer.linear.weight": "proj_out.weight",
    "final_layer.adaln_modulation.1.weight": "norm_out.linear_1.weight",
    "final_layer.adaln_modulation.2.weight": "norm_out.linear_2.weight",
}
"""Names in cosmos's code and in diffusers, written by hand."""
BLOCK = {
    **{
        f"{theirs}.{a}.weight": f"{ours}.{b}.weight"
        for theirs, ours in (("self_attn", "attn1"), ("cross_attn", "attn2"))
        for a, b in (
            ("q_proj", "to_q"), ("k_proj", "to_k"), ("v_proj", "to_v"), ("output_proj", "to_out.0"),
            ("q_norm", "norm_q"), ("k_norm", "norm_k"),
        )
    },
    **{
        f"adaln_modulation_{part}.{i}.weight": f"norm{number}.linear_{i}.weight"
        for number, part in enumerate(("self_attn", "cross_attn", "mlp"), 1)
        for i in (1, 2)
    },
    "mlp.layer1.weight": "ff.net.0.proj.weight",
    "mlp.layer2.weight": "ff.net.2.weight",
}  # fmt: skip


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_pipelines.save("cosmos_predict2_5", tmp_path_factory.mktemp("base") / "cosmos")


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> dict[str, torch.Tensor]:
    """The transformer's tensors of another pipeline of the same shape, by diffusers' names."""
    folder = tiny_pipelines.save("cosmos_predict2_5", tmp_path_factory.mktemp("other") / "cosmos", seed=1)
    return transformer_of(folder)


def transformer_of(folder: Path) -> dict[str, torch.Tensor]:
    return cosmos_predict2_5.load(str(folder), ("transformer",), torch.device("cpu")).transformer.state_dict()


def native(tensors: dict[str, torch.Tensor]) -> dict[str, Any]:
    """As a checkpoint of cosmos's code has them, with what it holds besides."""
    names = NATIVE | {
        f"blocks.{i}.{theirs}": f"transformer_blocks.{i}.{ours}" for i in (0, 1) for theirs, ours in BLOCK.items()
    }
    assert sorted(names.values()) == sorted(tensors)
    besides = {
        "net.pos_embedder.seq": torch.zeros(3, device="cpu"),
        "net.accum_iteration": torch.ones((), device="cpu"),
    }
    return {f"net.{theirs}": tensors[ours] for theirs, ours in names.items()} | besides | {"step": 3}


def test_the_pipeline_has_the_files_weights_and_the_bases_other_parts(
    base: Path, other: dict[str, torch.Tensor], tmp_path: Path
):
    torch.save(native(other), tmp_path / "model.pt")
    digest = native_weights.import_weights(tmp_path / "model.pt", str(base), tmp_path / "new")
    found = transformer_of(tmp_path / "new")
    assert found.keys() == other.keys()
    assert all(torch.equal(found[name], other[name]) for name in other)
    before = transformer_of(base)
    assert not any(torch.equal(found[name], before[name]) for name in NATIVE.values() if "norm.weight" not in name)
    origin = json.loads((tmp_path / "new" / directories.ORIGIN).read_text(encoding="utf-8"))
    assert origin == {"file": "model.pt", "sha256": digest}
    names = {name for name in directories.pipeline_files(base) if not name.startswith("transformer/")}
    assert all((tmp_path / "new" / name).read_bytes() == (base / name).read_bytes() for name in names)
    assert directories.pipeline_class(tmp_path / "new") == directories.pipeline_class(base)
    with pytest.raises(ConfigError, match="exists already"):
        native_weights.import_weights(tmp_path / "model.pt", str(base), tmp_path / "new")


@pytest.mark.processes
def test_the_command_tells_as_json_what_it_made(base: Path, other: dict[str, torch.Tensor], tmp_path: Path):
    torch.save(native(other), tmp_path / "model.pt")
    words = ["import-weights", str(tmp_path / "model.pt"), str(base), str(tmp_path / "new"), "--json"]
    ended = CliRunner().invoke(app, words)
    digest = sha256((tmp_path / "model.pt").read_bytes())
    told = {"directory": f"{tmp_path}/new", "base": str(base), "file": "model.pt", "sha256": digest}
    assert json.loads(ended.stdout) == told
    again = CliRunner().invoke(app, words)
    assert (again.exit_code, again.stdout) == (64, "")


def test_only_the_bases_own_transformer_folder_is_left_out(base: Path, other: dict[str, torch.Tensor], tmp_path: Path):
    named = tmp_path / "transformer"
    shutil.copytree(base, named)
    (named / "tokenizer" / "transformer").mkdir()
    (named / "tokenizer" / "transformer" / "notes.txt").write_text("kept", encoding="utf-8")
    torch.save(native(other), tmp_path / "model.pt")
    native_weights.import_weights(tmp_path / "model.pt", str(named), tmp_path / "new")
    written = {*directories.pipeline_files(named), directories.ORIGIN}
    assert set(directories.pipeline_files(tmp_path / "new")) == written
    found = transformer_of(tmp_path / "new")
    assert all(torch.equal(found[name], other[name]) for name in other)


def test_tensors_that_are_not_the_bases_are_named_and_nothing_is_written(
    base: Path, other: dict[str, torch.Tensor], tmp_path: Path
):
    values = native(other)
    values["net.blocks.2.mlp.layer1.weight"] = values["net.blocks.1.mlp.layer1.weight"]
    values["net.crossattn_proj.0.bias"] = torch.zeros(3, device="cpu")
    del values["net.x_embedder.proj.1.weight"]
    torch.save(values, tmp_path / "model.pt")
    with pytest.raises(ConfigError, match="not of the base's architecture") as caught:
        native_weights.import_weights(tmp_path / "model.pt", str(base), tmp_path / "new")
    for name in ("crossattn_proj.0.bias", "patch_embed.proj.weight", "transformer_blocks.2.ff.net.0.proj.weight"):
        assert name in str(caught.value)
    assert not (tmp_path / "new").exists()


class Runs:
    """Would write a file when it is unpickled."""

    def __init__(self, path: Path):
        self.path = path

    def __reduce__(self) -> Any:
        return Path.touch, (self.path,)


def test_a_file_that_runs_something_is_refused(base: Path, tmp_path: Path):
    torch.save({"net.x": Runs(tmp_path / "ran")}, tmp_path / "model.pt")
    with pytest.raises(ConfigError, match="is not a file of tensors only"):
        native_weights.import_weights(tmp_path / "model.pt", str(base), tmp_path / "new")
    assert not (tmp_path / "ran").exists()


def test_a_wrong_file_and_a_wrong_base_are_named(base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    assert native_weights.main([str(tmp_path / "no.pt"), str(base), str(tmp_path / "new")]) == 64
    assert "no file at" in capsys.readouterr().err
    with pytest.raises(ConfigError, match="package:tiny-sd3 is a StableDiffusion3Pipeline"):
        native_weights.import_weights(tmp_path / "no.pt", "package:tiny-sd3", tmp_path / "new")
