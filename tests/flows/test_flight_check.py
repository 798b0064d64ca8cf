"""What the flight check says where something is wrong."""

import re

import pytest

from cosmos_rl_core.config.launch import LaunchConfig
from flows.operations import flight_check


@pytest.mark.slow
def test_ranks_that_cannot_hear_each_other_say_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "nowhere")
    found = flight_check.find("ring", "", LaunchConfig())
    assert found.word == "failed"
    assert re.search(r"2 ranks could not sum a tensor: .*Error: .*nowhere", found.detail)
