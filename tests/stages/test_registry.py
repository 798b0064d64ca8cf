"""The stages by name: the files that run them, and which train."""

import pytest

from cosmos_rl_core.config.shared import StageConfig
from stages import contracts, registry


class Other(StageConfig):
    """Another stage by the name of the rollout."""

    name = "rollout"


def test_a_stage_is_in_the_file_of_its_name_in_the_folder_of_its_contract():
    assert registry.STAGES["rollout"] is contracts.Rollout
    assert registry.module_of("rollout") == "stages.rollout"
    assert registry.module_of("vlm_finetune") == "stages.vlm.finetune"


def test_exactly_the_stages_that_make_the_next_policy_count_as_training():
    assert {name for name in registry.STAGES if registry.trains(name)} == {"update", "finetune", "vlm_finetune"}


def test_two_stages_of_one_name_are_refused():
    registry.register([contracts.Rollout])
    with pytest.raises(ValueError, match="two stages have the name 'rollout'"):
        registry.register([Other])
    assert registry.STAGES["rollout"] is contracts.Rollout
