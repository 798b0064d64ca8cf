"""The suite on the 5B model of Wan 2.2, whose tokens have times of their own; old and refused checkpoints of Wan."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from cosmos_rl_core.conformance.models import tiny_pipelines
from cosmos_rl_core.conformance.models.adapters import load_model
from cosmos_rl_core.conformance.models.families import CPU, SIZE, Family, fed_to, load_family
from cosmos_rl_core.conformance.models.test_against_stock import (  # noqa: F401
    test_a_velocity_does_not_depend_on_its_batch,
    test_guidance_trains_both_predictions_or_the_conditional_one_alone,
    test_our_euler_is_the_stock_pipeline_with_an_euler_scheduler,
    test_our_solver_is_the_stock_pipeline_on_its_own_timesteps,
    test_the_timestep_is_float_and_never_truncated,
    test_the_transformer_is_fed_what_the_stock_pipeline_feeds_it,
)
from cosmos_rl_core.conformance.models.test_counting import (  # noqa: F401
    test_a_forward_pass_is_counted_as_on_encoded_prompts,
    test_configs_state_the_shapes_of_every_file,
)
from cosmos_rl_core.conformance.models.test_media import (  # noqa: F401
    test_a_draw_from_the_posterior_is_the_stock_vaes_own,
    test_decoded_latents_are_the_stock_pipelines_pictures,
    test_encoding_is_what_decoding_undoes,
    test_exported_weights_make_the_policys_pictures_in_the_stock_pipeline,
)
from cosmos_rl_core.conformance.models.test_negative import test_a_negative_prompt_acts_as_in_the_stock_call  # noqa: F401
from cosmos_rl_core.conformance.models.test_training import (  # noqa: F401
    test_a_policy_gradient_makes_good_steps_likelier_than_bad_ones,
    test_nft_moves_towards_good_samples_and_away_from_bad_ones,
    test_supervised_training_lowers_the_error_on_what_it_saw,
    x_0,
)
from cosmos_rl_core.errors import ConfigError
from cosmos_rl_core.models._conditioning import stack
from cosmos_rl_core.pipelines import checkpoints, directories, sizes
from cosmos_rl_core.pipelines.spec import CONDITIONAL_MASK
from tests.core.footprint.test_footprint import (  # noqa: F401
    counted,
    test_a_forward_pass_takes_the_memory_that_is_counted,
    test_gradients_have_the_same_bits_with_and_without_recomputation,
    test_the_vae_takes_the_memory_that_is_counted,
    test_training_takes_the_memory_that_is_counted,
)
from tests.core.pipelines.test_buckets import (
    test_every_model_predicts_on_its_buckets_as_the_stock_pipeline_does,  # noqa: F401
)


@pytest.fixture(scope="module")
def family(tmp_path_factory: pytest.TempPathFactory, device: torch.device) -> Family:
    folder = tiny_pipelines.save("wan", tmp_path_factory.mktemp("wan22") / "wan", expand_timesteps=True)
    return load_family("wan", str(folder), device)


def test_each_token_is_told_the_time_and_latents_are_16_pixels_wide(family: Family):
    checkpoints.check(family.folder)
    assert sizes.latent_shape(family.folder, SIZE, family.frames) == (4, 2, SIZE[0] // 16, SIZE[1] // 16)
    with fed_to(family.model.transformer) as fed:
        family.velocity()(family.noise, torch.tensor([0.3, 0.9], device=family.device))
    tokens = sizes.num_tokens(family.folder, SIZE, family.frames)
    times = fed[0]["time"]
    assert times.shape == (2, tokens)
    assert torch.allclose(times, torch.tensor([[300.0], [900.0]], device=family.device).expand(2, tokens))


def test_a_plan_counts_the_modulation_of_each_token(family: Family, tmp_path: Path):
    """It is 6 widths of float32 a token, in place of a sample: in a batch of 3 the most bytes of a forward pass grow
    by at least that much over the same transformer told the time once."""
    once = tiny_pipelines.save("wan", tmp_path / "wan")
    same_latents = (SIZE[0] // 2, SIZE[1] // 2)
    assert sizes.num_tokens(str(once), same_latents, 5) == sizes.num_tokens(family.folder, SIZE, 5)
    width, batch, tokens = 24, 3, sizes.num_tokens(family.folder, SIZE, 5)
    settings = {"frames": 5, "kind": "forward", "half": False}
    more = counted(family.folder, **settings) - counted(str(once), size=same_latents, **settings)
    assert more >= 6 * width * 4 * batch * (tokens - 1)


@torch.no_grad()
def test_tokens_of_a_given_picture_are_told_time_zero(family: Family):
    picture = np.random.default_rng(2).integers(0, 256, (1, 50, 70, 3), np.uint8)
    given = family.model.encode_with("a", [picture], 16, SIZE, family.frames)
    with fed_to(family.model.transformer) as fed:
        family.model.velocity(
            family.noise[:1], torch.full((1,), 0.4, device=family.device), stack([given], family.device)
        )
    latent_frames = family.noise.shape[2]
    tokens = sizes.num_tokens(family.folder, SIZE, family.frames) // latent_frames
    expected = [0.0] * tokens + [400.0] * tokens * (latent_frames - 1)
    assert fed[0]["time"].tolist() == [pytest.approx(expected)]


@torch.no_grad()
def test_prompts_with_and_without_a_picture_fit_in_one_batch(family: Family):
    """The one without equals text alone, bit for bit."""
    picture = np.random.default_rng(2).integers(0, 256, (1, 50, 70, 3), np.uint8)
    both = [family.model.encode_with("a", some, 16, SIZE, family.frames) for some in ([picture], [])]
    assert both[1][CONDITIONAL_MASK].count_nonzero() == 0
    t = torch.tensor([0.3, 0.9], device=family.device)
    together = family.model.velocity(family.noise, t, stack(both, family.device))
    text = stack(family.model.encode_prompts(["a"], 16) * 2, family.device)
    assert torch.equal(together[1], family.model.velocity(family.noise, t, text)[1])
    assert (together[0, :, 1:] - family.model.velocity(family.noise, t, text)[0, :, 1:]).abs().max() > 1e-3


def test_wan_2_1_takes_no_picture(family: Family, tmp_path: Path):
    once = tiny_pipelines.save("wan", tmp_path / "wan")
    assert directories.spec(once).references is None
    assert directories.spec(family.folder).references is not None


def change(file: Path, **values: Any) -> None:
    file.write_text(json.dumps(json.loads(file.read_text()) | values))


def load(folder: Path | str, *components: str) -> Any:
    return load_model(folder, components, CPU)


def test_a_vae_with_an_old_checkpoints_settings_is_read_as_by_the_stock_pipeline(tmp_path: Path):
    """Wan 2.1's own do not say by how much it compresses."""
    folder = Path(tiny_pipelines.save("wan", tmp_path))
    file = folder / "vae/config.json"
    late = ("scale_factor_spatial", "scale_factor_temporal", "patch_size", "in_channels", "out_channels")
    file.write_text(json.dumps({k: v for k, v in json.loads(file.read_text()).items() if k not in late}))
    assert load(folder).latent_shape((32, 64), 9) == (4, 3, 4, 8)
    assert sizes.latent_shape(str(folder), (32, 64), 9) == (4, 3, 4, 8)


def test_wan_two_stage_and_image_to_video_pipelines_are_refused(tmp_path: Path):
    folder = Path(tiny_pipelines.save("wan", tmp_path / "wan"))
    change(folder / "transformer/config.json", in_channels=36)
    with pytest.raises(ConfigError, match="takes 36 channels and the VAE makes 4: not a model"):
        load(folder)
    change(folder / "model_index.json", boundary_ratio=0.9)
    with pytest.raises(ConfigError, match=r"Wan 2\.2"):
        load(folder)
