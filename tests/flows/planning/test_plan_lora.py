"""Plans of adapters, optimizers and averages: what is taken, what is refused and why."""

import pytest

from cosmos_rl_core.config.policy import LoraConfig
from cosmos_rl_core.conformance.models import tiny_pipelines
from cosmos_rl_core.errors import ConfigError
from flows.planning.plan import Settings, freeze, plan_of, read_plan
from flows.sizes import costs


def mistakes_of(path: str, *overrides: str) -> str:
    with pytest.raises(ConfigError) as caught:
        plan_of(Settings(path, overrides=overrides))
    return str(caught.value)


def test_all_unsupported_options_are_named_at_once_each_with_its_reason(recipe):
    lora = """lora = { r = 2, lora_names = ["default", "old"], primary_adapter = "old", lora_path = "x",
        modules_to_save = ["proj_out"], rank_pattern = { to_q = 4 }, r_pattern = { "to_(" = 4 }, lora_dropout = 1.0,
        init_lora_weights = "pissa_niter_4", target_modules = "to_q" }""".replace("\n", " ")
    message = mistakes_of(
        recipe(("lora = { r = 2 }", lora), ("[train]", '[train]\noptm_name = "AdamW8bit"\nema_rate = 0.4'))
    )
    for expected in (
        "policy.lora.lora_names: unknown key; there is one adapter; copies that an algorithm needs",
        "policy.lora.primary_adapter: unknown key; there is one adapter, and the algorithm decides",
        "policy.lora.lora_path: unknown key; policy.init_from names the folder of an adapter to begin with",
        "policy.lora.modules_to_save: unknown key; a LoRA file of diffusers holds adapters only",
        "policy.lora.rank_pattern: unknown key; it is policy.lora.r_pattern here",
        "policy.lora.r_pattern.to_(: not a regular expression: missing )",
        "policy.lora.lora_dropout: Input should be less than or equal to 0.9 (found 1.0)",
        "policy.lora.init_lora_weights: Input should be 'gaussian' or 'kaiming' (found 'pissa_niter_4')",
        "policy.lora.target_modules: 'to_q' is neither a list of module names nor \"all-linear\"",
        "train.optm_name: Input should be 'AdamW' or 'Adam' (found 'AdamW8bit')",
        "train.ema_rate: Input should be less than 0.2886 (found 0.4)",
    ):
        assert message.count(f"\n  {expected}") == 1, (expected, message)
    assert len(message.splitlines()) == 12


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("policy.lora.init_lora_weights=eva", "should be 'gaussian' or 'kaiming'"),
        ("policy.lora.init_lora_weights=uniform", "Input should be 'gaussian' or 'kaiming' (found 'uniform')"),
        ('policy.lora.target_modules=["to_q", "all-linear"]', '"all-linear" must be the only name'),
        ("policy.lora.r_pattern.to_x=3", "policy.lora.r_pattern: 'to_x' names none of the 16 adapted modules, e.g. "),
        ("policy.lora.r_pattern.to_q=0", "policy.lora.r_pattern.to_q: Input should be greater than or equal to 1"),
        ("train.ema_rate=0.1", "train.ema_rate without effect: ema_enable is not true"),
    ],
)
def test_options_without_effect_or_with_two_meanings_are_refused(recipe, override, expected):
    assert expected in mistakes_of(recipe(), override)


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (
            ("policy.lora.r=129",),
            "the rank is above the smaller side of 16 of 16 adapted matrices, e.g. transformer_blocks.0.attn.to_k "
            "of 128 x 128 has rank 129, at most 128. Lower r",
        ),
        (("policy.lora.r=400",), "Lower r, or set the rank of these modules by r_pattern"),
        (
            ("policy.lora.r_pattern.to_q=129",),
            "the rank is above the smaller side of 4 of 16 adapted matrices, e.g. transformer_blocks.0.attn.to_q "
            "of 128 x 128 has rank 129, at most 128. Lower r",
        ),
        (
            ("policy.lora.r=65", 'policy.lora.target_modules=["to_q", "proj_out"]'),
            "of 1 of 5 adapted matrices, e.g. proj_out of 64 x 128 has rank 65, at most 64. Lower r",
        ),
    ],
)
def test_a_rank_above_the_size_of_a_matrix_is_refused(recipe, overrides, expected):
    assert expected in mistakes_of(recipe(), *overrides)


def test_a_rank_equal_to_the_size_of_a_matrix_is_accepted(recipe):
    assert plan_of(Settings(recipe(), overrides=("policy.lora.r=128",)))


def test_dropout_is_refused_if_it_would_be_in_only_one_of_two_densities(recipe):
    flow_sde = ("policy.diffusers.sample.solver=flow_sde", "train.train_policy.train_on=[0]")
    grpo = recipe(('type = "nft"', 'type = "grpo"'), ("timesteps_fraction = 1.0\n", ""))
    plan_of(Settings(grpo, overrides=flow_sde))
    message = mistakes_of(grpo, *flow_sde, "policy.lora.lora_dropout=0.1")
    assert "policy.lora.lora_dropout = 0.1: grpo trains on the ratio of the policy's density" in message
    plan_of(Settings(recipe(), overrides=("policy.lora.lora_dropout=0.1",)))


def test_supported_options_are_frozen_read_back_and_counted(recipe, tmp_path):
    overrides = (
        "policy.lora.target_modules=all-linear",
        "policy.lora.r_pattern.to_q=5",
        "policy.lora.alpha_pattern.to_q=3.5",
        "policy.lora.use_rslora=true",
        "policy.lora.lora_dropout=0.1",
        "policy.lora.init_lora_weights=true",
        "train.optm_name=Adam",
        "train.ema_enable=true",
        "train.ema_rate=0.1",
    )
    plan = plan_of(Settings(recipe(), overrides=overrides, run_id="mine"))
    assert plan.recipe.policy.lora == LoraConfig(
        r=2,
        target_modules=("all-linear",),
        r_pattern={"to_q": 5},
        alpha_pattern={"to_q": 3.5},
        use_rslora=True,
        lora_dropout=0.1,
        init_lora_weights="kaiming",
    )
    assert freeze(plan, str(tmp_path)) == read_plan(str(tmp_path), "mine")
    without = plan_of(Settings(recipe(), overrides=tuple(o for o in overrides if "pattern" not in o)))
    # 4 blocks of width 128: rank 5 instead of 2 on to_q; float32, two moments, the slow copy and the average.
    assert (
        sum(costs.policy_parts(plan.recipe).values()) - sum(costs.policy_parts(without.recipe).values())
        == 4 * 4 * 3 * 256 * 5
    )


def test_dropout_is_refused_in_a_module_that_gets_the_texts_of_a_batch_in_a_row(recipe, tmp_path):
    z_image = f"policy.model_name_or_path={tiny_pipelines.save('z_image', tmp_path / 'z')}"
    dropout, path = "policy.lora.lora_dropout=0.1", recipe()
    said = mistakes_of(path, z_image, dropout, "policy.lora.target_modules=all-linear")
    assert "cap_embedder.1 of this model gets the texts of a batch in a row" in said
    plan_of(Settings(path, overrides=(z_image, dropout, 'policy.lora.target_modules=["to_q"]')))
