"""Runs that share GPUs by a limit of a real Prefect server: they wait for each other, and for one that was killed."""

import secrets
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from prefect.client.orchestration import get_client
from prefect.client.schemas.actions import GlobalConcurrencyLimitCreate
from prefect.settings import PREFECT_API_URL, temporary_settings

from cosmos_rl_core.config.launch import LaunchConfig
from cosmos_rl_core.errors import ConfigError, LeaseError, UnavailableError
from flows.devices.waiting import Waiting
from flows.operations import flight_check
from flows.running import gpus, server
from tests.e2e.flow_process import Flows, Started
from tests.e2e.sharing import one_try
from tests.flows.allocated import Work

GPUS = 3
SHORTEST_LEASE_S = 60.0
"""That Prefect's server takes; it looks for ended ones every 15 s."""


@pytest.fixture
def limit(prefect_environment: dict[str, str]) -> Iterator[str]:
    """A limit of its own, on the server that this process and its flows talk to."""
    name = f"gpus-{secrets.token_hex(4)}"
    with temporary_settings({PREFECT_API_URL: prefect_environment["PREFECT_API_URL"]}):
        with get_client(sync_client=True) as client:
            client.create_global_concurrency_limit(GlobalConcurrencyLimitCreate(name=name, limit=GPUS))
        yield name


@pytest.fixture
def work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Work:
    """Stages that wait to be told to go on."""
    return Work(tmp_path, monkeypatch)


@pytest.fixture
def start(
    limit: str, work: Work, prefect_environment: dict[str, str], tmp_path: Path
) -> Iterator[Callable[..., Started]]:
    """Starts a flow with one stage on two GPUs."""
    flows = Flows(tmp_path / "flows", prefect_environment)

    def share(name: str, lease_s: float = gpus.LEASE_S) -> Started:
        request = work.request(name).model_dump_json()
        return flows.start_command("tests.e2e.sharing", work.run_url, limit, str(lease_s), request)

    yield share
    flows.kill_all()


def in_use(limit: str) -> int:
    with get_client(sync_client=True) as client:
        return client.read_global_concurrency_limit_by_name(limit).active_slots


def nothing() -> None:
    pass


def test_a_stage_waits_for_gpus_of_another_run_and_gives_back_its_own_when_it_fails(
    limit: str, work: Work, start: Callable[..., Started]
) -> None:
    (work.folder / "fail").touch()
    with gpus.taken([work.request("ours")], one_try(limit), Waiting(print, nothing)):
        theirs = start("theirs")
        theirs.wait_until(lambda: "waits for 2 slots" in theirs.said)
        time.sleep(2 * gpus.ASK_S)
        assert (in_use(limit), work.ran()) == (2, [])
    work.wait_until_ran(1)
    assert in_use(limit) == 2
    work.go()
    assert "it does not fit" in theirs.finish(expect=1)
    assert in_use(limit) == 0


def test_who_waits_can_be_told_to_stop_and_has_nothing(limit: str, work: Work) -> None:
    def lost() -> None:
        raise LeaseError("another process works on the run")

    two, config = [work.request("ours")], one_try(limit)
    with gpus.taken(two, config, Waiting(print, nothing)):
        with pytest.raises(LeaseError), gpus.taken(two, config, Waiting(print, lost)):
            pass
        assert in_use(limit) == 2
    assert in_use(limit) == 0


def test_a_limit_that_there_is_not_or_that_is_too_small_is_a_mistake(limit: str, work: Work) -> None:
    side_by_side = [work.request("one"), work.request("two")]
    with pytest.raises(ConfigError, match=r"cannot take 4 slots.*greater than the limit"):
        gpus.taken(side_by_side, one_try(limit), Waiting(print, nothing)).__enter__()
    with pytest.raises(ConfigError, match="infra init"):
        gpus.taken(side_by_side, one_try("nowhere"), Waiting(print, nothing)).__enter__()
    assert in_use(limit) == 0


def test_a_server_that_does_not_answer_is_waited_for_for_a_while(work: Work, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpus, "PATIENCE_S", 5.0)
    said: list[str] = []
    with (
        temporary_settings({PREFECT_API_URL: "http://127.0.0.1:9/api"}),
        pytest.raises(UnavailableError, match="take 2"),
    ):
        gpus.taken([work.request("ours")], one_try("away"), Waiting(said.append, nothing)).__enter__()
    (waits,) = said
    assert waits.startswith("waits for Prefect's server")


def checked(name: str, config: LaunchConfig) -> tuple[str, str]:
    """What one of the flight check's checks finds."""
    found = flight_check.find(name, "", config)
    return found.word, found.detail


def test_the_flight_check_finds_a_limit_that_is_not_there_or_too_small(limit: str) -> None:
    enough = one_try(limit)
    assert checked("gpu limit", enough) == ("ok", f"0 of 3 slots of {limit!r} are taken")
    word, detail = checked("gpu limit", enough.model_copy(update={"processes": 4}))
    assert (word, "3 slots, a stage takes 4" in detail) == ("failed", True)
    word, detail = checked("gpu limit", one_try("nowhere"))
    assert (word, "no global concurrency limit 'nowhere'" in detail) == ("failed", True)


def test_the_flight_check_says_that_a_server_forgets_who_has_slots(limit: str):
    word, detail = checked("leases", one_try(limit))
    assert (word, flight_check.LASTING in detail) == ("failed", True)
    word, detail = checked("leases", LaunchConfig())
    assert (word, flight_check.LASTING in detail) == ("not set up", True)


def test_a_command_with_a_server_of_its_own_waits_for_nobody(
    limit: str, work: Work, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(server.OWN, "1")
    with gpus.taken([work.request("one")], one_try(limit), Waiting(print, nothing)):
        assert in_use(limit) == 0


@pytest.mark.slow
def test_the_gpus_of_a_killed_run_come_back(limit: str, work: Work, start: Callable[..., Started]) -> None:
    theirs = start("theirs", SHORTEST_LEASE_S)
    work.wait_until_ran(1)
    # Longer than the lease: they are still theirs, because the flow renews it.
    time.sleep(1.3 * SHORTEST_LEASE_S)
    assert in_use(limit) == 2
    theirs.kill()
    waited: list[str] = []
    with gpus.taken([work.request("ours")], one_try(limit), Waiting(waited.append, nothing)):
        assert in_use(limit) == 2
    assert waited
