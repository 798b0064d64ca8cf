"""States in which a session ends."""

import pytest

from cosmos_rl_core.errors import ConfigError, StageError, StoppedError
from flows.session.session import ends_in_state, flow_of
from tests.flows.showing.test_hidden_characters import HIDDEN, SHOWN


@pytest.mark.parametrize("kind", [ConfigError, StoppedError, StageError])
def test_the_message_of_a_state_in_prefect_is_escaped(kind: type[ConfigError]):
    @ends_in_state
    def failed() -> str:
        raise kind(f"no run {HIDDEN}")

    assert failed().message == f"no run {SHOWN}"


def test_the_message_of_a_completed_state_is_escaped():
    @ends_in_state
    def completed() -> str:
        return f"{HIDDEN} 0.1 -> 0.2"

    assert completed().message == f"{SHOWN} 0.1 -> 0.2"


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("run_id", "läufe-1a2b3c4d"),
        ("run_id", "a-recipe-with-a-long-name" * 6),
        ("overrides", ["train.seed = 1"]),
        ("overrides", ["policy.lora.r_pattern.to_q|to_k=8"]),
    ],
)
def test_a_flow_leaves_it_to_the_plan_to_refuse_names_and_overrides(name: str, value: object):
    found = flow_of("nft", None).validate_parameters({"recipe": "recipe.toml", name: value})
    assert found[name] == value
