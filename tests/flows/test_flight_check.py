"""What the flight check says where something is wrong."""

import pytest

from cosmos_rl_core.config.launch import LaunchConfig
from cosmos_rl_core.errors import UnavailableError
from flows.operations import flight_check


@pytest.mark.slow
def test_ranks_that_cannot_hear_each_other_say_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "nowhere")
    with pytest.raises(UnavailableError, match=r"2 ranks could not sum a tensor: .*Error: .*nowhere"):
        flight_check._ring(LaunchConfig())
