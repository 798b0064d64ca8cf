"""One small optimizer step of every algorithm on prompts with references, of every model plugin that takes them."""

from dataclasses import replace

import pytest
import torch

from cosmos_rl_core.conformance.models.families import PICTURES, PROMPTS, Family
from cosmos_rl_core.conformance.models.references.referring import ABLE, load_referring
from cosmos_rl_core.conformance.models.test_against_stock import (  # noqa: F401
    test_guidance_trains_both_predictions_or_the_conditional_one_alone,
)
from cosmos_rl_core.conformance.models.test_training import (  # noqa: F401
    test_a_policy_gradient_makes_good_steps_likelier_than_bad_ones,
    test_dpo_favours_the_winner_of_a_pair,
    test_nft_follows_the_sign_of_an_advantage,
    test_nft_moves_towards_good_samples_and_away_from_bad_ones,
    test_supervised_training_lowers_the_error_on_what_it_saw,
    x_0,
)
from cosmos_rl_core.models._conditioning import stack


@pytest.fixture(scope="module", params=ABLE)
def family(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, device: torch.device) -> Family:
    """Each model plugin that takes references, told of prompts with some."""
    made = load_referring(request.param, tmp_path_factory.mktemp("references"), device)
    pictures = PICTURES[: made.most]
    conditioning = stack([made.encoded(prompt, pictures) for prompt in PROMPTS], device)
    negative = stack([made.negative(pictures)] * len(PROMPTS), device)
    return replace(made.family, conditioning=conditioning, negative=conditioning.guided_by(negative))
