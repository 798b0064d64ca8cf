"""One running service with the probe, shared by the tests that leave it as it is."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests import running_service as running
from tests.upstream_client import UpstreamClient


@pytest.fixture(scope="session")
def spool(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("service")


@pytest.fixture(scope="session")
def service(spool: Path) -> Iterator[UpstreamClient]:
    values = running.settings(spool, {"reward_type": "probe"}, {"reward_type": "jpeg", "name": "jpeg"}, max_body_mb=1)
    with running.in_thread(running.write(spool, values)) as client:
        yield client


@pytest.fixture(scope="session")
def worker_token(service: UpstreamClient, spool: Path) -> str:
    return (spool / "spool" / "worker.token").read_text()
