"""Media and latents of models: samples that are not finite."""

import numpy as np
import pytest
import torch

from cosmos_rl_core.conformance.models.adapters import load_model
from cosmos_rl_core.models._media import NotFiniteError
from cosmos_rl_core.pipelines import directories
from stages.rollout import decode_finite

CPU = torch.device("cpu")


def test_a_sample_whose_pixels_are_not_finite_changes_no_bit_of_the_others():
    model = load_model(directories.resolve_path("package:tiny-sd3"), ("vae",), CPU)
    latents = torch.randn(4, *model.latent_shape((32, 64), 1), generator=torch.Generator().manual_seed(0))
    whole = model.decode(latents).numpy()
    broken = latents.clone()
    broken[1] = 1e38
    broken[2, 0, 0, 0] = torch.nan
    with pytest.raises(NotFiniteError):
        model.decode(broken)
    first, second, third, fourth = decode_finite(model, broken, [True, True, False, True])
    assert (second, third) == (None, None)
    for place, found in ((0, first), (3, fourth)):
        assert found is not None
        np.testing.assert_array_equal(found, whole[place])
