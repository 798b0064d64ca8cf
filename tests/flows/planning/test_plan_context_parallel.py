"""Plans of videos whose tokens several processes share: what they are told, what is refused and why."""

from pathlib import Path

import pytest

from cosmos_rl_core.config.launch import ON_POLICY, LaunchConfig
from cosmos_rl_core.config.parallelism import Parallelism
from cosmos_rl_core.conformance.models import tiny_pipelines
from cosmos_rl_core.errors import ConfigError
from flows.planning import requests
from flows.planning.plan import Settings, freeze, plan_of
from flows.planning.run import Run
from flows.running.display import Display
from flows.running.wave import Waves
from stages import contracts, registry

TWO = ("launch.processes=2", "launch.cp_size=2")
FOUR = ("launch.processes=4", "launch.cp_size=4")
DROPOUT = "policy.lora.lora_dropout=0.1"


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A pipeline of two attention heads."""
    return tiny_pipelines.save("wan", tmp_path_factory.mktemp("plans") / "wan")


@pytest.fixture
def wan(recipe, base) -> str:
    size = "diffusers = { inference_size = [32, 64], train_frames = 5 }"
    return recipe(("diffusers = { inference_size = [32, 64] }", size), ('"package:tiny-sd3"', f'"{base}"'))


def mistakes_of(path: str, *overrides: str) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        plan_of(Settings(path, overrides=overrides))
    return str(caught.value).splitlines()[1:]


def test_recipes_that_cannot_share_a_video_get_the_reason_and_dropout_is_named_too(recipe, wan):
    heads = "launch.cp_size = 4: 2 attention heads cannot be shared by 4 context-parallel peers; at most 2"
    assert mistakes_of(wan, *FOUR) == [f"  {heads}"]
    # One token: 1 x 1 patches of one frame.
    one = ("policy.diffusers.train_frames=1", "policy.diffusers.inference_size=[16, 16]")
    (tokens,) = mistakes_of(wan, *TWO, *one)
    assert tokens == "  launch.cp_size = 2: 1 tokens cannot be shared by 2 context-parallel peers; at most 1"
    dropout, others = mistakes_of(wan, *FOUR, DROPOUT)
    assert others == f"  {heads}"
    assert "policy.lora.lora_dropout = 0.1 draws one mask for all tokens of a video" in dropout
    plan_of(Settings(wan, overrides=(DROPOUT,)))
    (images,) = mistakes_of(recipe(), *TWO)
    assert images.startswith("  launch.cp_size = 2: no context parallelism for SD3Transformer2DModel; supported: C")


def test_only_as_many_as_the_stages_have_can_share(wan):
    (mistake,) = mistakes_of(
        wan, "launch.cp_size=2", "launch.stage_processes={ rollout = 4, update = 3, evaluate = 1 }"
    )
    assert mistake.endswith(
        "update: cp_size = 2 does not divide 3 processes; finetune, validate: cp_size = 2 does not divide 1 process"
    )


def test_ranks_of_stages_with_our_own_transformer_know_their_parallelism(wan, tmp_path):
    plan = plan_of(Settings(wan, overrides=(*TWO, "launch.compile=true", "launch.dp_shard_size=2")))
    run = Run(freeze(plan, str(tmp_path)), str(tmp_path))
    launcher = Waves(str(tmp_path), plan.recipe.launch, Display())
    policy = requests.policy(run)
    told = {
        stage: launcher.execution_of(policy.model_copy(update={"stage": stage}))
        for stage, config in registry.STAGES.items()
        if config.torch
    }
    assert {stage for stage, execution in told.items() if execution.parallelism.cp_size == 2} == set(ON_POLICY)
    assert set(ON_POLICY) == {stage for stage in told if issubclass(registry.STAGES[stage], contracts.OnPolicy)}
    assert told["update"].parallelism == Parallelism(world_size=2, dp_shard_size=2, cp_size=2, compile=True)
    rounding = Waves(str(tmp_path), LaunchConfig(tf32=True, attention="flash"), Display()).execution_of
    assert (rounding(policy).tf32, rounding(policy).attention) == (True, "flash")
    # As in the reward service, whose scorers have the same versions.
    judge = rounding(policy.model_copy(update={"stage": "judge"}))
    assert (judge.tf32, judge.attention) == (False, "auto")
    alone = Waves(str(tmp_path), LaunchConfig(), Display()).execution_of(policy)
    assert (alone.tf32, alone.parallelism) == (False, Parallelism())
