"""A Prefect server that is overloaded, or whose proxy is: waited for, then told of, whichever request it refuses."""

import itertools
import json
from collections.abc import Callable, Iterator
from functools import partial

import pytest
from prefect.client.orchestration import get_client
from prefect.client.schemas.actions import GlobalConcurrencyLimitCreate
from prefect.settings import (
    PREFECT_API_URL,
    PREFECT_CLIENT_MAX_RETRIES,
    PREFECT_LOGGING_TO_API_ENABLED,
    temporary_settings,
)
from typer.testing import CliRunner

from cosmos_rl_core.config.launch import LaunchConfig
from cosmos_rl_core.errors import UnavailableError
from flows.cli import app
from flows.devices.waiting import Waiting
from flows.running import gpus
from flows.running.server import QUIET
from stages.artifacts.request import Request
from stages.reporting.contracts import Report
from tests.e2e.flow_process import RUN_ID, Flows
from tests.faulty_proxy import Exchange, FaultyProxy, faulty_proxy, lost, silent

CODES = (429, 502, 503)
UNAVAILABLE = 75
FEWEST = 8
"""Requests of a run: its flow, its flow run, its name, tags and states."""


def overloaded(code: int, request: Exchange) -> None:
    """As a server or proxy answers that has too much to do."""
    body = json.dumps({"exception_message": "too busy"}).encode()
    request.reply(code, [("Content-Type", "application/json"), ("Retry-After", "0")], body)


OVERLOADED = partial(overloaded, 503)


@pytest.fixture
def proxy(prefect_environment: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> Iterator[FaultyProxy]:
    """Before the server; this process asks it, and gives up at the first refusal unless told otherwise."""
    for name, value in QUIET.items():
        monkeypatch.setenv(name, value)
    with faulty_proxy(prefect_environment["PREFECT_API_URL"]) as proxy:
        url = f"{proxy.endpoint}/api"
        monkeypatch.setenv("PREFECT_API_URL", url)
        # Log lines are sent whenever a thread gets to it.
        quiet = {PREFECT_LOGGING_TO_API_ENABLED: False}
        with temporary_settings({PREFECT_API_URL: url, PREFECT_CLIENT_MAX_RETRIES: 0, **quiet}):
            yield proxy


@pytest.fixture
def again(flows: Flows) -> Callable[[], tuple[int, str]]:
    """Gives the command of a finished run once more; returns its exit code and what it said."""

    def give() -> tuple[int, str]:
        command = ["run", flows.recipe, "--store", flows.store, "--run-id", RUN_ID, "--allow-numerics-change"]
        ended = CliRunner().invoke(app.app, command)
        return ended.exit_code, ended.output

    return give


def test_a_server_that_is_overloaded_for_a_moment_is_waited_for(
    proxy: FaultyProxy, again: Callable[[], tuple[int, str]]
):
    proxy.faults = [partial(overloaded, code) for code in CODES]
    with temporary_settings({PREFECT_CLIENT_MAX_RETRIES: 3}):
        assert again()[0] == 0


def require_told(ended: tuple[int, str], proxy: FaultyProxy, code: int) -> None:
    exit_code, said = ended
    assert exit_code == UNAVAILABLE, said
    assert f"{proxy.endpoint}/api answers {code} " in said
    assert "Traceback" not in said


@pytest.mark.parametrize("passed", [0, 6])
def test_one_that_stays_so_ends_the_command_with_what_to_do(
    proxy: FaultyProxy, again: Callable[[], tuple[int, str]], passed: int
):
    proxy.faults = [Exchange.pass_on] * passed
    proxy.always = partial(overloaded, 503)
    require_told(again(), proxy, 503)


@pytest.mark.slow
@pytest.mark.parametrize("code", CODES)
def test_so_it_does_whichever_request_is_refused_first(
    proxy: FaultyProxy, again: Callable[[], tuple[int, str]], code: int
):
    passed = 0
    for passed in itertools.count():
        proxy.reset()
        proxy.faults = [Exchange.pass_on] * passed
        proxy.always = partial(overloaded, code)
        ended = again()
        if ended[0] == 0:
            break
        # The real server may be overloaded too.
        assert ended[0] == UNAVAILABLE
        assert "Traceback" not in ended[1]
    assert passed > FEWEST


@pytest.mark.parametrize(
    "fault", [pytest.param(lost, id="lost"), *(pytest.param(f, marks=pytest.mark.slow) for f in (OVERLOADED, silent))]
)
def test_one_that_fails_at_artifacts_alone_stops_no_run(
    proxy: FaultyProxy, again: Callable[[], tuple[int, str]], fault: Callable[[Exchange], None]
):
    proxy.always = lambda request: (fault if "/artifacts/" in request.path else Exchange.pass_on)(request)
    exit_code, said = again()
    assert exit_code == 0, said
    assert said.count("Prefect takes no artifacts now") == 1


@pytest.mark.parametrize("code", CODES)
def test_infra_says_so_too(proxy: FaultyProxy, code: int):
    proxy.always = partial(overloaded, code)
    ended = CliRunner().invoke(app.app, ["infra", "init"])
    require_told((ended.exit_code, ended.output), proxy, code)


@pytest.mark.parametrize("code", CODES)
def test_slots_of_a_limit_are_asked_for_again(proxy: FaultyProxy, code: int, monkeypatch: pytest.MonkeyPatch):
    limit = f"busy-{code}"
    with get_client(sync_client=True) as client:
        client.create_global_concurrency_limit(GlobalConcurrencyLimitCreate(name=limit, limit=1))
    monkeypatch.setattr(gpus, "ASK_S", 0.1)
    request = Request(stage="report", slot="run/report", seed=0, config=Report(title="", reward=""))
    said: list[str] = []
    one_gpu = LaunchConfig(gpu_limit=limit, stage_gpus={"report": (0,)})
    proxy.faults = [partial(overloaded, code)] * 3
    with gpus.taken([request], one_gpu, Waiting(said.append, lambda: None)):
        assert said[0].startswith("waits for Prefect's server")
    monkeypatch.setattr(gpus, "PATIENCE_S", 0.5)
    proxy.always = partial(overloaded, code)
    with pytest.raises(UnavailableError, match="cannot take 1 slot"):
        gpus.taken([request], one_gpu, Waiting(said.append, lambda: None)).__enter__()
