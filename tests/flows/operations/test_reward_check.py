"""`reward-service check` tries any service that speaks the protocol, and says what is wrong with which exit code."""

import json
from collections.abc import Iterator
from dataclasses import replace

import pytest
from typer.testing import CliRunner

from cosmos_rl_core.errors import ConfigError
from flows.cli import app as cli
from flows.operations import reward_check
from tests.reward_server import Frame, RewardServer, reward_server
from tests.running_service import TOKEN
from tests.upstream_client import UpstreamClient


@pytest.fixture
def upstream() -> Iterator[RewardServer]:
    with reward_server() as server:
        yield server


def check(monkeypatch: pytest.MonkeyPatch, url: str, *options: str, token: str = TOKEN) -> tuple[int, str]:
    monkeypatch.setenv("REMOTE_REWARD_TOKEN", token)
    ended = CliRunner().invoke(cli.app, ["reward-service", "check", url, *options])
    return ended.exit_code, ended.output


def test_all_rewards_of_this_service_are_tried(monkeypatch: pytest.MonkeyPatch, service: UpstreamClient):
    code, said = check(monkeypatch, service.url, "--json")
    found = {each["reward"]: each for each in json.loads(said)}
    assert (code, sorted(found), {each["works"] for each in found.values()}) == (
        0,
        ["jpeg", "probe", "probe_too"],
        {True},
    )
    assert found["probe"]["found"].startswith("probe_reward 128.1, length 23, shape (1, 64, 64, 3)")
    assert found["probe"]["found"].endswith("; probe 1")


def test_a_service_as_cosmos_rls_is_asked_for_a_named_reward(monkeypatch: pytest.MonkeyPatch, upstream: RewardServer):
    upstream.scores = lambda frame: {"pickscore": [float(frame.array.shape[0])]}
    code, said = check(monkeypatch, upstream.enqueue_url, "--reward", "pickscore", token=upstream.token)
    assert (code, said.split(": ", 2)[2]) == (0, "pickscore 1\n")
    assert upstream.mistakes == []


def test_a_service_that_lists_no_rewards_is_checked_with_a_named_one(
    monkeypatch: pytest.MonkeyPatch, upstream: RewardServer
):
    code, said = check(monkeypatch, upstream.enqueue_url, token=upstream.token)
    assert code == 64
    assert "name one with --reward" in said


def test_an_unknown_reward_and_a_wrong_token_are_mistakes_of_the_user(
    monkeypatch: pytest.MonkeyPatch, service: UpstreamClient
):
    code, said = check(monkeypatch, service.url, "--reward", "pickscroe", "--reward", "jpeg")
    assert code == 64
    assert "pickscroe: FAILS" in said
    assert "jpeg: works" in said
    assert "known: jpeg, probe, probe_too" in said
    code, said = check(monkeypatch, service.url, token="wrong")
    assert code == 64
    assert "401" in said
    assert "wrong" not in said.replace("missing or wrong", "")


def test_a_service_that_does_not_answer_or_score_may_work_later(
    monkeypatch: pytest.MonkeyPatch, service: UpstreamClient, upstream: RewardServer
):
    code, said = check(monkeypatch, "http://127.0.0.1:1", "--reward", "x")
    assert (code, "did not answer" in said) == (75, True)

    def fails(_frame: Frame) -> None:
        return None

    upstream.scores = fails
    code, said = check(monkeypatch, upstream.enqueue_url, "--reward", "x", "--timeout-s", "0.3", token=upstream.token)
    assert (code, "no x scores of request" in said) == (75, True)


@pytest.mark.parametrize("url", ["nonsense", "localhost:8080", "http://"])
def test_a_text_that_is_no_url_is_named(url: str):
    with pytest.raises(ConfigError, match=rf"'{url}' is no http\(s\) URL; expected the URL of a service"):
        reward_check.service_at(url, {})


@pytest.mark.parametrize("path", ["", "/", "/api/reward", "/api/reward/enqueue", "/api/reward/pull"])
def test_a_service_is_found_by_any_of_its_urls(path: str):
    found = reward_check.service_at(f"http://host:1{path}", {})
    assert found.enqueue_url == "http://host:1/api/reward/enqueue"
    assert replace(found, enqueue_url="").fetch_url == "http://host:1/api/reward/pull"
