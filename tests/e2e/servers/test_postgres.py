"""Prefect's server for a team, as docs/prefect.md starts it: with PostgreSQL, and with leases that outlive it."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from prefect.client.orchestration import get_client
from prefect.settings import PREFECT_API_URL, temporary_settings

from flows.devices.waiting import Waiting
from flows.operations.pools import GPUS
from flows.running import gpus
from tests.e2e import postgres
from tests.e2e.deployed import Deployed
from tests.e2e.postgres import Postgres
from tests.e2e.prefect_server import LASTING_LEASES, PrefectServer
from tests.e2e.sharing import one_try
from tests.flows.allocated import Work
from tests.test_rules import ROOT

pytestmark = [postgres.needs_postgres, pytest.mark.slow]


@pytest.fixture(scope="module")
def database() -> Iterator[Postgres]:
    """An empty one."""
    with postgres.running() as database:
        yield database


@pytest.fixture(scope="module")
def server(database: Postgres, tmp_path_factory: pytest.TempPathFactory) -> Iterator[PrefectServer]:
    """Alone knows where the database is."""
    settings = {"PREFECT_SERVER_DATABASE_CONNECTION_URL": database.url} | LASTING_LEASES
    server = PrefectServer(tmp_path_factory.mktemp("prefect"), settings)
    try:
        server.start()
        yield server
    finally:
        server.stop()


@pytest.fixture(scope="module")
def deployed(server: PrefectServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployed]:
    """Pools, deployments, a worker."""
    deployed = Deployed(tmp_path_factory.mktemp("deployed"), server.environment)
    deployed.set_up(gpus=2)
    yield deployed
    deployed.close()


def test_a_deployment_runs_to_its_end_and_the_database_has_it(
    deployed: Deployed, database: Postgres, server: PrefectServer
) -> None:
    options = [f"-p{name}={value}" for name, value in deployed.parameters(iterations=1).items()]
    assert "Completed" in deployed.prefect("deployment", "run", "nft/tiny-nft", *options, "--watch")
    assert database.ask("select state_type from flow_run where not auto_scheduled") == "COMPLETED"
    declared = yaml.safe_load((ROOT / "deployments" / "prefect.yaml").read_text(encoding="utf-8"))["deployments"]
    assert database.ask("select count(*) from deployment") == str(len(declared))
    home = Path(server.environment["PREFECT_HOME"])
    assert not list(home.glob("*.db"))
    said = [path.read_bytes() for folder in (home, deployed.folder) for path in folder.rglob("*") if path.is_file()]
    assert not any(database.password.encode() in data for data in said)


def test_who_has_gpus_keeps_them_while_the_server_starts_again(
    deployed: Deployed, server: PrefectServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def in_use() -> int:
        with get_client(sync_client=True) as client:
            return client.read_global_concurrency_limit_by_name(GPUS).active_slots

    request = Work(tmp_path, monkeypatch).request("stage")
    with temporary_settings({PREFECT_API_URL: server.environment["PREFECT_API_URL"]}):
        with gpus.taken([request], one_try(GPUS), Waiting(print, lambda: None)):
            server.stop()
            server.start()
            assert in_use() == 2
        assert in_use() == 0
