"""Directories of pipelines: how plugins find them, what is refused by name, and what their digest covers."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from cosmos_rl_core.conformance.models import tiny_pipelines
from cosmos_rl_core.errors import ConfigError
from cosmos_rl_core.pipelines import directories
from cosmos_rl_core.weights.shapes import weight_shapes


@pytest.fixture(scope="session")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("models")
    return {"sd3": str(tiny_pipelines.save("sd3", root / "sd3")), "wan": str(tiny_pipelines.save("wan", root / "wan"))}


def test_adapters_are_found_by_the_pipeline_class(folders):
    assert directories.adapter_name(folders["sd3"]) == "sd3"
    assert directories.claimant("WanPipeline")[0] == "wan"
    known = r"StableDiffusion3Pipeline \(sd3\), WanImageToVideoPipeline \(wan_i2v\), WanPipeline \(wan\)"
    with pytest.raises(ConfigError, match=f"'KolorsPipeline'; known: .*{known}"):
        directories.claimant("KolorsPipeline")


def test_pipelines_module_does_not_import_torch():
    code = "import sys; from cosmos_rl_core.pipelines.directories import claimant; claimant('WanPipeline');"
    code += "sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=Path(__file__).parents[3], check=False).returncode == 0


def test_paths_that_are_no_pipelines_are_config_errors(tmp_path, folders):
    with pytest.raises(ConfigError, match="and is not downloaded"):
        directories.resolve_path("stabilityai/stable-diffusion-3.5-medium")
    with pytest.raises(ConfigError, match=r"no model_index\.json"):
        directories.resolve_path(str(tmp_path))
    with pytest.raises(ConfigError, match="no pipeline 'giant' ships with this project"):
        directories.resolve_path("package:giant")
    assert directories.resolve_path(folders["wan"]) == str(Path(folders["wan"]).resolve())


def test_weights_of_cosmos_own_code_are_refused_with_the_command_that_converts_them(folders, tmp_path):
    snapshot = tmp_path / "Cosmos-Predict2.5-2B"
    (snapshot / "base/post-trained").mkdir(parents=True)
    weights = snapshot / "base/post-trained/81edfebe_ema_bf16.pt"
    weights.write_bytes(b"")
    for given in (weights, snapshot):
        with pytest.raises(ConfigError, match=rf"cosmos-flows import-weights {weights} BASE DIRECTORY.*convert_cos"):
            directories.resolve_path(str(given))
    # A pipeline may hold whatever it likes besides.
    shutil.copytree(folders["wan"], tmp_path / "wan")
    (tmp_path / "wan/old.pt").write_bytes(b"")
    assert directories.resolve_path(str(tmp_path / "wan")) == str(tmp_path / "wan")


def test_weights_that_did_not_arrive_whole_are_named(tmp_path):
    file = Path(tiny_pipelines.save("sd3", tmp_path)) / "transformer" / directories.WEIGHTS
    file.write_bytes(file.read_bytes()[:100])
    with pytest.raises(ConfigError, match=rf"{directories.WEIGHTS}: not a safetensors file.*; fetch it again"):
        weight_shapes(str(tmp_path))


def test_a_pipelines_digest_is_its_paths_and_bytes(tmp_path):
    (tmp_path / "a").mkdir()
    (tmp_path / "a/x.json").write_text("1")
    (tmp_path / "b.txt").write_text("2")
    first = directories.pipeline_digest(tmp_path)
    (tmp_path / ".cache").mkdir()
    (tmp_path / ".cache/lock").write_text("3")
    assert directories.pipeline_digest(tmp_path) == first
    (tmp_path / "b.txt").write_text("22")
    second = directories.pipeline_digest(tmp_path)
    (tmp_path / "b.txt").rename(tmp_path / "c.txt")
    assert len({first, second, directories.pipeline_digest(tmp_path)}) == 3
