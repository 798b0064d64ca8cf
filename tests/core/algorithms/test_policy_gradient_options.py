"""What DDRL and FlowGRPO take from rewards and from their settings: advantages, trained steps, refused combinations."""

import math
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch

from cosmos_rl_core.algorithms import ddrl, grpo
from cosmos_rl_core.algorithms._base import Transitions
from cosmos_rl_core.algorithms._needs import DataTerm, trained_steps
from cosmos_rl_core.config.policy import SolverConfig
from cosmos_rl_core.config.train import DatasetOptions
from cosmos_rl_core.errors import ArtifactError, ConfigError
from cosmos_rl_core.sampling.transition import Coefficients

CPU = torch.device("cpu")
DATASET = DatasetOptions(name="some prompts")
FOUR = [-1.161805, -0.387268, 0.387268, 1.161805]
"""Advantages of the rewards 1, 2, 3, 4."""

Rewards = dict[str, list[float | None]]


def policy(**options: Any) -> ddrl.Algorithm:
    return ddrl.Algorithm(ddrl.Options.model_validate({"type": "ddrl", "dataset": DATASET} | options))


def scored(rewards: Rewards, **columns: list[float | None]) -> pd.DataFrame:
    """Samples by prompt; None failed."""
    rows = [(f"{prompt}-{i}", prompt, reward) for prompt, given in rewards.items() for i, reward in enumerate(given)]
    samples = pd.DataFrame(rows, columns=["sample_id", "prompt_id", "reward"])
    return samples.assign(valid=samples["reward"].notna(), **{f"reward.{name}": v for name, v in columns.items()})


def advantages_of(rewards: Rewards, **options: Any) -> list[float]:
    return policy(**options).advantages(scored(rewards))["advantage"].tolist()


# ---- advantages


def test_advantages_equal_the_known_vectors():
    assert advantages_of({"a": [1, 2, 3, 4]}) == pytest.approx(FOUR, abs=1e-6)
    filled = advantages_of({"a": [1, 2, 3, None]}, parity_advantages=True)
    assert filled == pytest.approx([-1.224595, 0, 1.224595, 0], abs=1e-6)


@pytest.mark.parametrize("global_std", [False, True])
def test_a_failed_sample_counts_in_no_mean_and_no_deviation(global_std: bool):
    samples = scored({"a": [1, 99, 2, 3, 4]})
    samples["valid"] = [True, False, True, True, True]
    table = policy(global_std=global_std).advantages(samples)
    assert table["advantage"][[0, 2, 3, 4]].tolist() == advantages_of({"a": [1, 2, 3, 4]}, global_std=global_std)
    assert table["advantage"].isna().tolist() == [False, True, False, False, False]
    assert table["used"].tolist() == [True, False, True, True, True]


def test_failed_samples_are_used_in_parity_but_not_where_too_few_were_scored():
    samples = scored({"a": [1, 2, 3, None], "b": [None, None], "c": [1, None]})
    assert policy().advantages(samples)["used"].tolist() == [True] * 3 + [False] * 5
    table = policy(parity_advantages=True, exp_reward=True).advantages(samples)
    assert table["used"].tolist() == [True] * 4 + [False] * 4
    assert table["advantage"].isna().tolist() == [False] * 4 + [True] * 4
    assert table["advantage"].tolist()[3] == -1


def test_the_global_deviation_is_over_all_rewards_and_the_mean_still_the_prompts():
    deviation = np.std([1, 3, 11, 13, 5], ddof=1) + 1e-4
    found = advantages_of({"a": [1, 3], "b": [11, 13], "c": [5, None]}, global_std=True)
    assert found[:4] == pytest.approx([-1 / deviation, 1 / deviation] * 2, rel=1e-12)
    assert np.isnan(found[4:]).all()


@pytest.mark.parametrize("global_std", [False, True])
@pytest.mark.parametrize("parity", [False, True])
def test_equal_rewards_have_exactly_no_advantage(global_std: bool, parity: bool):
    rewards: Rewards = {"a": [0.1, 0.1, None, 0.1], "b": [0.7, 0.7, 0.7]}
    found = advantages_of(rewards, global_std=global_std, parity_advantages=parity)
    assert np.nan_to_num(found).tolist() == [0] * 7


def test_equal_rewards_have_no_advantage_under_the_exponential_except_in_parity():
    rewards: Rewards = {"a": [0.1, 0.1], "b": [1, 3]}
    assert advantages_of(rewards, exp_reward=True)[:2] == [0, 0]
    assert advantages_of(rewards, exp_reward=True, parity_advantages=True)[:2] == [-1, -1]


def test_the_bounds_come_after_the_exponential():
    found = advantages_of({"a": [1, 2, 3, 4]}, exp_reward=True, adv_clip_min=-3.0)
    assert found == pytest.approx([-3, *(-math.exp(-a) for a in FOUR[1:])], abs=1e-6)
    assert advantages_of({"a": [1, 2, 3, 4]}, adv_clip_min=-1.0, adv_clip_max=0.5)[::3] == [-1, 0.5]


def test_an_advantage_of_seven_tenths_gives_the_known_loss_under_the_exponential():
    """A pair this far apart has the advantages -.7 and .7; -exp(-.7) and 10 exp(-.7) follow."""
    apart = 0.7e-4 / (0.5 - 0.7 / math.sqrt(2))
    assert advantages_of({"a": [0, apart]}) == pytest.approx([-0.7, 0.7])
    advantage = advantages_of({"a": [0, apart]}, exp_reward=True)[1]
    assert advantage == pytest.approx(-0.4965853, abs=1e-7)

    x, one = torch.ones(1, 2, device=CPU), torch.ones(1, dtype=torch.float64, device=CPU)
    given = torch.full((1,), advantage, dtype=torch.float32, device=CPU)
    at = Coefficients(*[one] * len(Coefficients._fields))
    batch = Transitions(x=x, x_next=x, history=x, at=at, log_prob=one, advantages=given)
    assert float(policy().loss(lambda _: x, batch).per_sample) == pytest.approx(4.965853, abs=1e-6)


def test_advantages_of_several_rewards_are_averaged_or_taken_of_their_sum():
    sums: Rewards = {"a": [11, 32, 23, 44]}
    samples = scored(sums, one=[1, 2, 3, 4], other=[10, 30, 20, 40])
    swapped = [FOUR[i] for i in (0, 2, 1, 3)]
    averaged = policy().advantages(samples)["advantage"].tolist()
    assert averaged == pytest.approx([(a + b) / 2 for a, b in zip(FOUR, swapped, strict=True)], abs=1e-4)
    summed = policy(reward_average=False).advantages(samples)["advantage"].tolist()
    assert summed == advantages_of(sums)


def test_advantages_are_added_without_a_change_of_rows_and_columns():
    samples = scored({"a": [1, 3], "b": [5, 2]}, one=[1, 3, 5, 2]).sample(frac=1, random_state=3)
    table = policy(exp_reward=True).advantages(samples)
    pd.testing.assert_frame_equal(table.drop(columns=["advantage", "used"]), samples)
    by_id = dict(zip(table["sample_id"], table["advantage"], strict=True))
    assert by_id["a-0"] < by_id["a-1"] < 0
    assert by_id["b-1"] < by_id["b-0"] < 0


@pytest.mark.parametrize("broken", ["reward", "reward.one"])
def test_a_valid_sample_without_a_finite_reward_is_wrong_data(broken: str):
    samples = scored({"a": [1, 2, 3]}, one=[1, 2, 3])
    if broken == "reward":
        samples = samples.drop(columns="reward.one")
    samples.loc[1, broken] = math.nan
    with pytest.raises(ArtifactError, match=f"without a finite {broken}: a-1"):
        policy().advantages(samples)


# ---- trained steps


def test_a_random_step_is_the_next_of_the_order_that_is_not_listed():
    assert trained_steps((0, -1, 3, -1), [3, 5, 0, 1, 2, 4]) == (0, 1, 3, 5)
    assert trained_steps((4, 2), range(5)) == (2, 4)
    assert trained_steps((-1,), [2, 0, 1, 3, 4]) == (2,)


@pytest.mark.parametrize("train_on", [(0, 4), (-1, -1, 0, 1, 2)])
def test_more_steps_than_the_sampler_has_are_refused(train_on: tuple[int, ...]):
    with pytest.raises(ConfigError, match="can be trained on are 0, 1, 2, 3;"):
        trained_steps(train_on, range(4))


@pytest.mark.parametrize("train_on", [(1, 2, 1), (-2, 0)])
def test_a_step_that_is_listed_twice_or_does_not_exist_is_refused(train_on: tuple[int, ...]):
    with pytest.raises(ConfigError, match="list each once"):
        trained_steps(train_on, range(4))


def test_each_listed_step_is_trained_once():
    assert policy().needs.num_times(20) == 10
    assert policy(train_on=(0, -1, -1)).needs.num_times(3) == 3


# ---- options


def test_the_defaults_have_the_values_of_the_recipes():
    one, other = ddrl.Options(type="ddrl", dataset=DATASET), grpo.Options(type="grpo", dataset=DATASET)
    assert (one.kl_beta, one.data_beta, one.train_on) == (0, 0.01, tuple(range(0, 19, 2)))
    assert (other.kl_beta, other.data_beta, other.train_on) == (0.01, 0, tuple(range(8)))
    assert (one.rewarded, one.ratio_mode, one.kl_mode, one.clip_ratio) == (True, "mean_logp", "exact", 1e-4)
    assert one.model_dump(exclude={"type", "kl_beta", "data_beta", "train_on"}) == other.model_dump(
        exclude={"type", "kl_beta", "data_beta", "train_on"}
    )


def test_parts_and_data_follow_from_the_weights():
    assert policy().needs.roles == ("current", "behaviour")
    anchored = policy(kl_beta=0.1, data_beta=0.0)
    assert (anchored.needs.roles, anchored.needs.data_term) == (("current", "behaviour", "reference"), None)
    drawn = policy(data_on_first_only=True, use_rl_sigma_and_noise=False, text_dropout=0.1)
    assert (policy().needs.data_term, drawn.needs.data_term) == (
        DataTerm(on_first_only=False, as_rollout=True, text_dropout=0.2),
        DataTerm(on_first_only=True, as_rollout=False, text_dropout=0.1),
    )
    assert (policy().needs.behaviour, policy(on_policy=False).needs.behaviour) == ("current", "reference")
    assert policy().needs.old_decay is None


def test_the_allowed_drift_is_half_of_the_clip_unless_it_is_given():
    by_default, given = policy(clip_ratio=1e-3).needs, policy(max_logp_drift=1e-5, max_drift=0.1).needs
    assert (by_default.max_logp_drift, by_default.max_drift) == (5e-4, None)
    assert (given.max_logp_drift, given.max_drift) == (1e-5, 0.1)


WRONG = {
    "clip_ratio": 1.0,
    "kl_beta": -1.0,
    "loss_scale": 0.0,
    "text_dropout": 1.1,
    "max_drift": 0.0,
    "min_group_size": 1,
    "adv_clip_max": 0.0,
    "ratio_mode": "exact",
    "num_conditional_frames": 0,
    "update_ref_every_iter": 16,
}


@pytest.mark.parametrize(("field", "value"), WRONG.items())
def test_options_out_of_bounds_misspelt_or_without_effect_are_refused(field: str, value: Any):
    with pytest.raises(ValueError, match=field):
        policy(**{field: value})


def test_a_loss_without_any_term_is_refused():
    with pytest.raises(ValueError, match="there is no loss"):
        policy(policy_weight=0.0, data_beta=0.0)
    assert policy(policy_weight=0.0).needs.data_term is not None


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({"text_dropout": 0.2}, "text_dropout"),
        ({"use_rl_sigma_and_noise": True}, "use_rl_sigma_and_noise"),
        ({"data_on_first_only": False, "text_dropout": 0.0}, "data_on_first_only, text_dropout"),
    ],
)
def test_settings_of_an_absent_data_term_have_no_effect_even_at_their_defaults(given: Any, named: str):
    (sentence,) = policy(data_beta=0.0, **given).options.without_effect()
    assert sentence == f"{named} without effect: data_beta = 0 leaves out the diffusion loss on media"
    assert not [*policy(**({"data": {"name": "rendered_text"}} | given)).options.without_effect()]


def test_the_kind_of_an_absent_distance_is_a_setting_without_effect():
    (sentence,) = policy(kl_mode="exact").options.without_effect()
    assert sentence == "kl_mode without effect: kl_beta = 0 leaves out the distance to the reference"
    assert not [*policy(kl_mode="exact", kl_beta=0.1).options.without_effect()]


def test_a_recipe_without_data_and_without_a_data_term_is_valid():
    assert not [*policy(data_beta=0.0).options.without_effect()]
    assert not [*policy(data_beta=0.0, data=None).options.without_effect()]


def test_a_bound_that_cuts_off_every_transformed_advantage_is_refused():
    with pytest.raises(ValueError, match="adv_clip_min = 0 cuts off every advantage of exp_reward"):
        policy(exp_reward=True, adv_clip_min=0.0)


@pytest.mark.parametrize(
    ("options", "sampler", "named"),
    [
        ({"train_on": (20,)}, {"solver": "flow_sde"}, "18, 19; a -1"),
        ({"train_on": (3,)}, {"solver": "euler"}, "none, this sampler adds no noise"),
        ({"train_on": (0,), "kl_mode": "flow_grpo", "kl_beta": 0.1}, {"solver": "cps"}, "kl_mode = 'flow_grpo'"),
        (
            {"train_on": (0,), "train_unconditional": False},
            {"solver": "flow_sde", "guidance_scale": 1.0},
            "train_unconditional = false",
        ),
    ],
)
def test_samplers_that_the_loss_cannot_train_on_are_refused(options: Any, sampler: Any, named: str):
    policy(train_on=(0, 2)).needs.check(SolverConfig(num_steps=20, solver="flow_sde"))
    with pytest.raises(ConfigError, match=named):
        policy(**options).needs.check(SolverConfig(num_steps=20, **sampler))


@pytest.mark.parametrize("given", [{"kl_beta": 0.1}, {"on_policy": False}])
def test_a_reference_that_is_read_may_be_renewed(given: dict[str, Any]):
    assert policy(update_ref_every_iter=16, **given).options.update_ref_every_iter == 16


@pytest.mark.parametrize("train_on", [(), (0, 0), (-2,)])
def test_steps_that_are_empty_or_have_one_twice_are_refused(train_on: tuple[int, ...]):
    with pytest.raises(ValueError, match="each once and from 0"):
        policy(train_on=train_on)


def test_given_frames_need_an_order():
    with pytest.raises(ValueError, match="min_num_conditional_frames = 2 is more than max_num_conditional_frames = 1"):
        policy(min_num_conditional_frames=2, max_num_conditional_frames=1)
    with pytest.raises(ValueError, match="min_num_conditional_frames = 1 is more than max_num_conditional_frames = 0"):
        policy(min_num_conditional_frames=1)


def test_media_may_serve_given_frames_alone():
    given = policy(
        min_num_conditional_frames=1, max_num_conditional_frames=2, data_beta=0.0, data={"name": "rendered_text"}
    )
    assert not [*given.options.without_effect()]
    assert (given.options.given_frames, given.needs.data_term) == ((1, 2), None)
    assert policy(max_num_conditional_frames=1).needs.data_term == DataTerm(
        on_first_only=False, as_rollout=True, text_dropout=0.2, given_frames=(0, 1)
    )
