"""A reward service of one machine, to which stages in this process send their samples."""

from collections.abc import Iterator

import pytest

from tests.reward_server import RewardServer, reward_server


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[RewardServer]:
    """Every request was valid, when the test ends."""
    with reward_server() as service:
        service.replica = None
        for name, value in service.environment().items():
            monkeypatch.setenv(name, value)
        yield service
        assert service.mistakes == []
