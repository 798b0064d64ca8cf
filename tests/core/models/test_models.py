"""What single model plugins refuse and what only some checkpoints have; how plugins and pipeline directories are found.

What every model plugin has to do is tested in test_every_model_conforms.py.
"""

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from diffusers import DiffusionPipeline

from cosmos_rl_core.conformance.models import tiny_pipelines
from cosmos_rl_core.conformance.models.adapters import load_model
from cosmos_rl_core.conformance.models.families import CPU, LENGTH, PROMPTS, SCHEDULERS, load_family, run_stock
from cosmos_rl_core.errors import ConfigError
from cosmos_rl_core.models.sana_video.tiny import save_ltx2_vae
from cosmos_rl_core.pipelines import checkpoints, directories, sizes
from cosmos_rl_core.sampling.flow import euler
from cosmos_rl_core.sampling.rollout import sample
from cosmos_rl_core.sampling.schedule import schedule_of
from cosmos_rl_core.weights.shapes import weight_shapes


@pytest.fixture(scope="session")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("models")
    return {"sd3": str(tiny_pipelines.save("sd3", root / "sd3")), "wan": str(tiny_pipelines.save("wan", root / "wan"))}


def change(file: Path, **values: Any) -> None:
    file.write_text(json.dumps(json.loads(file.read_text()) | values))


def load(folder: Path | str, *components: str) -> Any:
    return load_model(folder, components, CPU)


def test_impossible_sizes_and_frames_are_refused_by_name(folders):
    image, video = load(folders["sd3"]), load(folders["wan"])
    for model, multiple in ((image, 8), (video, 16)):
        with pytest.raises(ConfigError, match=rf"multiples of {multiple} pixels for this model"):
            model.latent_shape((36, 33), 1)
    with pytest.raises(ConfigError, match="train_frames = 3: this model makes images"):
        image.latent_shape((32, 32), 3)
    with pytest.raises(ConfigError, match="train_frames = 3 must be 1 plus a multiple of 4"):
        video.latent_shape((32, 32), 3)
    with pytest.raises(ConfigError, match=r"are \[1, 16, 4\] tokens .* at most \[1, 8, 8\]"):
        image.latent_shape((128, 32), 1)


def test_a_vae_with_an_old_checkpoints_settings_is_read_as_by_the_stock_pipeline(tmp_path: Path):
    """Wan 2.1's own do not say by how much it compresses."""
    folder = Path(tiny_pipelines.save("wan", tmp_path))
    file = folder / "vae/config.json"
    late = ("scale_factor_spatial", "scale_factor_temporal", "patch_size", "in_channels", "out_channels")
    file.write_text(json.dumps({k: v for k, v in json.loads(file.read_text()).items() if k not in late}))
    assert load(folder).latent_shape((32, 64), 9) == (4, 3, 4, 8)
    assert sizes.latent_shape(str(folder), (32, 64), 9) == (4, 3, 4, 8)


def test_cosmos_compression_is_reckoned_as_the_stock_pipeline_does(tmp_path: Path):
    """By how often the VAE halves, not by the factors that its settings name."""
    folder = Path(tiny_pipelines.save("cosmos_predict2_5", tmp_path))
    change(folder / "vae/config.json", temperal_downsample=[False, True], dim_mult=[1, 1, 1])
    stock = load(folder).pipeline
    assert (stock.vae_scale_factor_spatial, stock.vae_scale_factor_temporal) == (4, 2)
    assert sizes.latent_shape(str(folder), (32, 64), 5) == (4, 3, 8, 16)


def test_sd3_refuses_prompts_that_the_stock_pipeline_refuses(folders):
    with pytest.raises(ConfigError, match="at most 512"):
        sizes.check_prompt_length(folders["sd3"], 513)


def test_sd3_without_t5_gives_zeros_in_its_place_as_the_stock_pipeline_does(tmp_path: Path):
    folder = Path(tiny_pipelines.save("sd3", tmp_path))
    change(folder / directories.INDEX, text_encoder_3=[None, None], tokenizer_3=[None, None])
    for part in ("text_encoder_3", "tokenizer_3"):
        shutil.rmtree(folder / part)
    family = load_family("sd3", str(folder))
    text = family.load("text")
    (alone,) = text.encode_prompts(PROMPTS[:1], LENGTH)
    assert all(torch.equal(alone[name], family.conditioning[name][0]) for name in alone)
    assert alone["prompt_embeds"].shape == (sizes.text_tokens(str(folder), LENGTH), 32)
    assert not alone["prompt_embeds"][-LENGTH:].any()
    assert text.transformer is None
    expected = run_stock(family.stock, family.noise, guidance_scale=3.0)
    ours = sample(family.velocity(3.0), family.noise, euler(schedule_of(family.stock.scheduler, 5))).latents
    assert (ours - expected).abs().max() < 1e-4


# Of SANA's checkpoints some predict a variance besides, some scale the time, and large ones have positions.
@pytest.mark.parametrize(
    ("name", "transformer"),
    [
        ("sana", {"out_channels": 8}),
        ("sana", {"timestep_scale": 0.001}),
        ("sana", {"interpolation_scale": 1}),
        ("sana", {"qk_norm": None}),
        ("sana_video", {"out_channels": 8}),
    ],
)
def test_every_kind_of_sana_checkpoint_samples_as_the_stock_pipeline(
    name: str, transformer: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    family = load_family(name, str(tiny_pipelines.save(name, tmp_path, **transformer)))
    monkeypatch.setattr(family.stock, "scheduler", SCHEDULERS["euler"]())
    expected = run_stock(family.stock, family.noise, guidance_scale=3.0)
    ours = sample(family.velocity(3.0), family.noise, euler(schedule_of(family.stock.scheduler, 5))).latents
    assert (ours - expected).abs().max() < 1e-4
    assert (ours - family.noise).abs().max() > 0.1


def test_sana_puts_the_stock_instruction_before_prompts_and_keeps_the_prompts_end(tmp_path: Path):
    """The first and the last of the instruction's embeddings are kept, so that it takes no room from the prompt."""
    model = load(tiny_pipelines.save("sana", tmp_path), "text")
    short, cut = model.encode_prompts(["ab", "a" * 50], 10)
    empty = model.encode_negative("", 10)
    assert [int(c["prompt_attention_mask"].sum()) for c in (short, cut, empty)] == [4, 10, 1]
    assert {tuple(c["prompt_embeds"].shape) for c in (short, cut, empty)} == {(10, 16)}
    assert torch.equal(short["prompt_embeds"][0], cut["prompt_embeds"][0])


@pytest.mark.parametrize("name", ["sana", "sana_video"])
def test_another_instruction_of_sana_is_the_stock_pipelines_argument(name: str, tmp_path: Path):
    folder = tiny_pipelines.save(name, tmp_path)
    model, stock = load(folder, "text"), DiffusionPipeline.from_pretrained(folder, use_safetensors=True)
    (default,) = model.encode_prompts(["ab"], 10)
    for instruction in (["Make it bright.", "Prompt: "], []):
        model.complex_human_instruction = instruction
        own, empty = model.encode_prompts(["ab", ""], 10)
        for ours, text in ((own, "ab"), (empty, "")):
            embeds, mask, negative, negative_mask = stock.encode_prompt(
                text, negative_prompt="no", max_sequence_length=10, complex_human_instruction=instruction, device=CPU
            )
            assert torch.equal(ours["prompt_embeds"], embeds[0])
            assert torch.equal(ours["prompt_attention_mask"], mask[0])
            steered = model.encode_negative("no", 10)
            assert torch.equal(steered["prompt_embeds"], negative[0])
            assert torch.equal(steered["prompt_attention_mask"], negative_mask[0])
        assert (own["prompt_embeds"] - default["prompt_embeds"]).abs().max() > 1e-3


@pytest.mark.parametrize("name", ["sana", "sana_video"])
def test_sana_models_that_are_told_the_guidance_or_have_another_vae_are_refused(name: str, tmp_path: Path):
    folder = tiny_pipelines.save(name, tmp_path, guidance_embeds=True)
    with pytest.raises(ConfigError, match=r"has guidance_embeds = True, so it is .*a distilled model"):
        load(folder)
    change(folder / "vae/config.json", _class_name="AutoencoderKL")
    with pytest.raises(ConfigError, match=r"AutoencoderKL; supported here: Autoencoder(DC|KLWan, .*LTX2Video)$"):
        load(folder)


def test_sana_video_with_the_vae_of_ltx2_makes_what_the_stock_pipeline_makes(tmp_path: Path):
    folder = Path(tiny_pipelines.save("sana_video", tmp_path))
    save_ltx2_vae(folder)
    family = load_family("sana_video", str(folder))
    assert family.noise.shape[1:] == (4, 3, 4, 8)
    latents = run_stock(family.stock, family.noise, num_inference_steps=2)
    videos = run_stock(family.stock, family.noise, num_inference_steps=2, output_type="pil")
    pixels = family.model.decode(latents)
    assert torch.equal(pixels, torch.stack([torch.stack([torch.tensor(np.asarray(f)) for f in v]) for v in videos]))
    mean, std = (family.stock.vae.get_buffer(f"latents_{name}").view(-1, 1, 1, 1) for name in ("mean", "std"))
    encoded = family.stock.vae.encode(pixels.permute(0, 4, 1, 2, 3) / 127.5 - 1).latent_dist.mode()
    assert torch.allclose(family.model.encode_media(pixels), (encoded - mean) / std, atol=1e-5)
    change(folder / "vae/config.json", spatial_compression_ratio=None)
    with pytest.raises(ConfigError, match=r"vae/config\.json does not state how many pixels and frames"):
        checkpoints.check(str(folder))


def test_wan_two_stage_and_image_to_video_pipelines_are_refused(folders, tmp_path):
    folder = Path(tiny_pipelines.save("wan", tmp_path / "wan"))
    change(folder / "transformer/config.json", in_channels=36)
    with pytest.raises(ConfigError, match="takes 36 channels and the VAE makes 4: not a model"):
        load(folder)
    change(folder / "model_index.json", boundary_ratio=0.9)
    with pytest.raises(ConfigError, match=r"Wan 2\.2"):
        load(folder)


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
