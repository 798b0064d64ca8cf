"""Our own client against this service, and copies of results that other replicas answer with."""

import asyncio
import socket
import socketserver
import sys
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from cosmos_rl_core import plugins
from cosmos_rl_core.errors import ConfigError
from cosmos_rl_core.reward_service import index
from cosmos_rl_core.reward_service.index import Copies, Job
from cosmos_rl_core.rewards._base import Sample
from cosmos_rl_core.rewards._base.served import ScorerChangedError, ServedScorer
from tests import running_service as running
from tests.running_service import image_frame
from tests.upstream_client import UpstreamClient


@pytest.fixture
def named(monkeypatch: pytest.MonkeyPatch, service: UpstreamClient) -> None:
    """The environment names the service."""
    running.name_to_clients(service, monkeypatch)


def sample(i: int, prompt: str, frames: int = 1, size: int = 16) -> Sample:
    pixels = np.random.default_rng(i).integers(0, 256, (frames, size, size, 3), np.uint8)
    return Sample(f"s{i}", f"p{i}", prompt, pixels)


def scored(samples: list[Sample], **options: object) -> list[dict[str, float] | Exception]:
    module = plugins.load("rewards", "remote")
    return module.Reward(module.Options.model_validate({"name": "remote", **options})).score(samples)


@pytest.mark.usefixtures("named")
def test_scores_by_the_service_are_the_scorers_own_to_the_bit():
    samples = [*(sample(i, "a") for i in range(5)), sample(5, "a", frames=3), sample(6, "a", size=24)]
    module = plugins.load("rewards", "jpeg")
    own = [entry["jpeg"] for entry in module.Reward(module.Options(name="jpeg")).score(samples)]
    served = scored(samples, reward_fn="jpeg", media="pixels", batch_size=3)
    assert [entry["remote-jpeg"] for entry in served if isinstance(entry, dict)] == own


@pytest.mark.usefixtures("named")
def test_only_the_samples_that_fail_are_lost():
    samples = [sample(0, "a"), sample(1, "raise"), sample(2, "b"), sample(3, "nan")]
    found = scored(samples, reward_fn="probe", score_key="probe_reward")
    scores = [entry["probe_reward"] if isinstance(entry, dict) else None for entry in found]
    assert scores == [samples[0].pixels.mean(), None, samples[2].pixels.mean(), None]
    assert "not this one" in str(found[1])
    assert "the score 'probe' is nan" in str(found[3])


@pytest.mark.usefixtures("named")
def test_our_client_keeps_to_the_scorer_that_the_service_names(service: UpstreamClient):
    module = plugins.load("rewards", "remote")
    reward = module.Reward(module.Options(reward_fn="jpeg", media="pixels"))
    told = reward.scorer()
    assert (told.name, len(told.digest)) == ("jpeg", 64)
    free = reward.score([sample(0, "a")])
    reward.hold_to(told)
    assert reward.score([sample(0, "a")]) == free
    reward.hold_to(ServedScorer("jpeg", "0", "0" * 64))
    with pytest.raises(ScorerChangedError, match=rf"scored by jpeg 0 .*now it is jpeg .*{told.digest[:12]}"):
        reward.score([sample(0, "a")])


@pytest.mark.usefixtures("named")
def test_our_client_gives_our_service_the_metadata_of_prompts():
    module = plugins.load("rewards", "remote")
    reward = module.Reward(module.Options(reward_fn="probe", score_key="probe_reward"))
    reward.hold_to(reward.scorer())
    samples = [replace(sample(i, "metadata"), metadata={"count": 7 + i}) for i in range(2)]
    assert [entry["probe_reward"] for entry in reward.score(samples)] == [7.0, 8.0]
    (without,) = reward.score([replace(samples[0], metadata={})])
    assert "KeyError: 'count'" in str(without)


class _Redis(socketserver.StreamRequestHandler):
    """SET with EX, and GET, of the protocol of Redis; anything else is unknown."""

    values: dict[bytes, tuple[bytes, bytes]] = {}

    def handle(self) -> None:
        while line := self.rfile.readline():
            words: list[bytes] = []
            for _ in range(int(line[1:])):
                length = int(self.rfile.readline()[1:])
                words.append(self.rfile.read(length + 2)[:-2])
            self.wfile.write(self.answer(words))

    def answer(self, words: list[bytes]) -> bytes:
        match words:
            case [b"SET", key, value, b"EX", seconds]:
                self.values[key] = (value, seconds)
                return b"+OK\r\n"
            case [b"GET", key]:
                value = self.values.get(key, (None,))[0]
                return b"$-1\r\n" if value is None else b"$%d\r\n%b\r\n" % (len(value), value)
            case _:
                return b"-ERR unknown command\r\n"


@pytest.fixture
def redis_url() -> Iterator[str]:
    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), _Redis) as server:
        server.daemon_threads = True
        threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}).start()
        yield f"redis://127.0.0.1:{server.server_address[1]}/0?protocol=2"
        server.shutdown()


@pytest.mark.processes
def test_another_replica_answers_with_the_copy_in_redis(tmp_path: Path, redis_url: str):
    paths = []
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        values = running.settings(tmp_path / name, redis_url=redis_url, result_ttl_s=600)
        paths.append(running.write(tmp_path / name, values))
    with running.in_thread(paths[0]) as one, running.in_thread(paths[1]) as two:
        uuid = one.enqueue(image_frame("a", first=5))
        told = one.result(uuid, "probe")
        deadline = threading.Event()
        while (found := two.form("pull", uuid=uuid, type="probe"))[0] == 404:
            assert not deadline.wait(0.02)
    assert found == (200, told)
    assert [seconds for _, seconds in _Redis.values.values()] == [b"600"]


@pytest.mark.parametrize(("url", "reason"), [("http://somewhere", "is no URL of a Redis"), (None, "needs the package")])
def test_a_redis_that_cannot_be_used_is_a_mistake_of_the_user(
    monkeypatch: pytest.MonkeyPatch, url: str | None, reason: str
):
    if url is None:
        monkeypatch.setitem(sys.modules, "redis.asyncio", None)
    with pytest.raises(ConfigError, match=reason):
        Copies(url or "redis://127.0.0.1", 60)


async def asked_in_vain(copies: Copies) -> str | None:
    await copies.put(Job("uuid", "probe"), {})
    return await copies.get("uuid", "probe")


def test_a_redis_that_takes_connections_and_is_silent_holds_nothing_up(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(index, "REDIS_S", 0.05)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        copies = Copies(f"redis://127.0.0.1:{silent.getsockname()[1]}/0", 60)
        assert asyncio.run(asyncio.wait_for(asked_in_vain(copies), 5)) is None
    assert copies.errors == 2


@pytest.mark.processes
def test_a_redis_that_does_not_answer_holds_nothing_up(tmp_path: Path):
    values = running.settings(tmp_path, redis_url="redis://127.0.0.1:1/0")
    with running.in_thread(running.write(tmp_path, values)) as client:
        assert client.scores(image_frame("a", first=5), "probe")["scores"]["probe_reward"] == [5.0]
        assert client.form("pull", uuid="unknown", type="probe")[0] == 404
        deadline = threading.Event()
        # The copy is tried after the result can be fetched.
        while "reward_redis_errors_total 2.0" not in client.get("/metrics")[1]:
            assert not deadline.wait(0.02)
