"""Scorers whose batches change scores are found on the machine where they run, and score in batches of 1 there."""

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cosmos_rl_core import plugins
from cosmos_rl_core.config.train import RewardOptions
from cosmos_rl_core.errors import ConfigError
from cosmos_rl_core.rewards import clip_score, geneval
from cosmos_rl_core.rewards._base import Sample
from cosmos_rl_core.rewards._batches.exact import exact, why_not_exact
from cosmos_rl_core.rewards._batches.trial import trial_samples
from tests import tiny_scorers, uneven

TORCH = [name for name in plugins.own("rewards") if plugins.load("rewards", name).Options.facts.torch]


def samples(count: int) -> list[Sample]:
    return [Sample(f"s{i}", "p", "x", np.full((1, 4, 4, 3), i, np.uint8)) for i in range(count)]


def nothing(why: str) -> None:
    raise AssertionError(why)


def test_a_scorer_with_even_kernels_keeps_its_batches_after_three_forwards():
    options = uneven.Options()
    reward, alone = exact(uneven.Reward, options, nothing)
    assert isinstance(reward, uneven.Reward)
    assert (reward.options, reward.forwards, alone) == (options, 3, False)


@pytest.mark.parametrize("kernel", ["place", "neighbours"])
def test_kernels_that_look_at_the_batch_are_given_one_item_each(kernel: str):
    said: list[str] = []
    options = uneven.Options.model_validate({"kernel": kernel})
    reward, alone = exact(uneven.Reward, options, said.append)
    assert alone
    (why,) = said
    assert why.startswith("uneven scores in batches of 1: ")
    # The very promise, which the scorer breaks in batches of 4.
    before = uneven.Reward(options)
    assert before.score(samples(3)) != [one for sample in samples(3) for one in before.score([sample])]
    assert reward.score(samples(3)) == [{"uneven": 0.0}, {"uneven": 1.0}, {"uneven": 2.0}]


def test_the_reason_shows_both_scores_of_a_test_picture():
    options = uneven.Options(kernel="neighbours")
    why = why_not_exact(uneven.Reward(options), options)
    assert why is not None
    assert re.fullmatch(r"a test picture has \{.*2041\} alone and \{.*20415\} first among others", why)


def test_a_scorer_that_no_batch_makes_repeatable_is_refused():
    with pytest.raises(ConfigError, match=r"gives the same picture .* its kernels are not repeatable here"):
        exact(uneven.Reward, uneven.Options(kernel="chance"), lambda why: None)


def test_a_scorer_that_cannot_score_the_test_pictures_is_not_trusted_with_batches():
    said: list[str] = []
    _, alone = exact(uneven.Reward, uneven.Options(kernel="blind"), said.append)
    assert alone
    assert "(ValueError: nothing to see)" in said[0]


def test_without_batches_no_test_pictures_are_scored():
    options = uneven.Options(kernel="place", batch_size=1)
    reward, alone = exact(uneven.Reward, options, nothing)
    assert isinstance(reward, uneven.Reward)
    assert (reward.forwards, alone) == (0, False)


@pytest.mark.parametrize("name", TORCH)
def test_every_setting_of_a_batch_is_named_in_the_facts_of_its_scorer(name: str):
    options: type[RewardOptions] = plugins.load("rewards", name).Options
    assert {*options.facts.batches} == {field for field in options.model_fields if field.endswith("batch_size")}


def test_a_scorer_of_clip_passes_here(tmp_path: Path):
    given = tiny_scorers.settings("clip_score", tmp_path)
    options = clip_score.Options.model_validate({**given, "batch_size": 3})
    reward: Any = clip_score.Reward(options)
    assert why_not_exact(reward, options) is None


def test_bits_of_both_models_of_geneval_are_compared_since_pictures_may_show_nothing(tmp_path: Path):
    options = geneval.Options.model_validate(tiny_scorers.settings("geneval", tmp_path))
    reward: Any = geneval.Reward(options)
    assert why_not_exact(reward, options) is None
    one, other = reward.probe(trial_samples("image", 2))
    assert one != other
