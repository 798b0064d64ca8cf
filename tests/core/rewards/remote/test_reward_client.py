"""What becomes of requests to a reward service that cannot be made, and of answers that are not what was asked for."""

import gzip
import tracemalloc
import zlib
from collections.abc import Iterator
from time import monotonic

import numpy as np
import pytest

from cosmos_rl_core.errors import ConfigError, UnavailableError
from cosmos_rl_core.rewards import remote
from cosmos_rl_core.rewards._base import Sample
from cosmos_rl_core.rewards._remote.client import MAX_REPLY_BYTES, Client, Service
from flows.launchers.variables import passed
from tests.reward_server import Raw, RewardServer, used_reward_server

PICTURE = np.full((1, 8, 8, 3), 7, np.uint8)
ANSWER = b'{"scores": {"overall_reward": [0.25]}}'
URLS = {"REMOTE_REWARD_ENQUEUE_URL": "http://localhost/e", "REMOTE_REWARD_FETCH_URL": "http://localhost/p"}


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[RewardServer]:
    with used_reward_server(monkeypatch) as service:
        yield service


def scores(count: int = 1, *, timeout_s: float = 20.0) -> list[dict[str, float] | Exception]:
    options = remote.Options(reward_fn="fn", score_key="overall_reward", timeout_s=timeout_s)
    return remote.Reward(options).score([Sample(f"s-{i}", "p", "x", PICTURE) for i in range(count)])


@pytest.mark.parametrize("token", ["", " ", None])
def test_a_service_without_a_token_gets_no_authorization(
    server: RewardServer, monkeypatch: pytest.MonkeyPatch, token: str | None
):
    server.token = ""
    monkeypatch.delenv("REMOTE_REWARD_TOKEN")
    if token is not None:
        monkeypatch.setenv("REMOTE_REWARD_TOKEN", token)
    (found,) = scores()
    assert found == {"overall_reward": 7.0, "prompt_length": 1.0, "remote-fn-overall_reward": 7.0}


def test_white_space_around_urls_and_token_does_not_count(server: RewardServer, monkeypatch: pytest.MonkeyPatch):
    for name, value in server.environment().items():
        monkeypatch.setenv(name, f" {value}\n")
    assert isinstance(scores()[0], dict)


def test_variables_may_have_other_prefixes_and_the_first_that_is_set_counts():
    def service(*prefixes: str) -> Service:
        names = ("ENQUEUE_URL", "FETCH_URL", "TOKEN", "ENQUEUE_TIMEOUT_S")
        values = {
            f"{prefix}_{name}": "9" if name.endswith("_S") else f"http://{prefix.lower().replace('_', '-')}/x"
            for prefix in prefixes
            for name in names
        }
        return Service.from_environment(values)

    first, second, third = "REMOTE_REWARD", "DIFFUSION_REWARD", "WFM_REWARD"
    for prefixes, host in (((third,), "wfm"), ((third, second), "diffusion"), ((third, second, first), "remote")):
        found = service(*prefixes)
        assert found.enqueue_url == found.fetch_url == found.token == f"http://{host}-reward/x"
        assert found.enqueue_timeout_s(2**30) == 9
    mixed = Service.from_environment(
        {"WFM_REWARD_ENQUEUE_URL": "http://w/e", "WFM_REWARD_FETCH_URL": "http://w/p", "REMOTE_REWARD_FETCH_URL": " "}
        | {"DIFFUSION_REWARD_ENQUEUE_URL": "http://d/e"}
    )
    assert (mixed.enqueue_url, mixed.fetch_url) == ("http://d/e", "http://w/p")
    assert passed({"WFM_REWARD_TOKEN": "t", "DIFFUSION_REWARD_TOKEN": "t", "OTHER_REWARD_TOKEN": "t"}) == [
        "DIFFUSION_REWARD_TOKEN",
        "WFM_REWARD_TOKEN",
    ]


@pytest.mark.parametrize("token", ["a b", "Bearer abc", "a\nb", "a\tb", "clé", "a\x00"])
def test_a_token_that_no_header_takes_is_found_before_anything_is_sent(token: str):
    with pytest.raises(ConfigError, match="REMOTE_REWARD_TOKEN has characters that no HTTP header") as e:
        Service.from_environment(URLS | {"REMOTE_REWARD_TOKEN": token})
    assert token not in str(e.value)


@pytest.mark.parametrize(
    ("url", "says"),
    [
        ("localhost:8080/e", "is no http(s) URL"),
        ("ftp://localhost/e", "is no http(s) URL"),
        ("http://", "is no http(s) URL"),
        ("http:///e", "is no http(s) URL"),
        ("http://localhost:eighty/e", "is no http(s) URL (Invalid port: 'eighty')"),
        ("http://localhost:99999/e", "has the port 99999"),
        ("http://localhost:0/e", "has the port 0"),
        ("http://local\nhost/e", "is no http(s) URL (Invalid non-printable ASCII character"),
        ("http://a..b/e", "is no http(s) URL ("),
        ("http://xn--/e", "is no http(s) URL ("),
        ("  ", "is not set"),
    ],
)
def test_a_url_that_no_request_can_go_to_is_found_before_anything_is_sent(url: str, says: str):
    with pytest.raises(ConfigError) as caught:
        Service.from_environment(URLS | {"REMOTE_REWARD_ENQUEUE_URL": url})
    assert str(caught.value).startswith(f"REMOTE_REWARD_ENQUEUE_URL {says}")


@pytest.mark.parametrize("replica", ["a\nb", "ré", " a", 7, ["a"], {"id": "a"}])
def test_a_replica_that_no_header_takes_fails_its_sample_at_once(server: RewardServer, replica: object):
    server.replica = replica
    began_s = monotonic()
    (found,) = scores()
    assert monotonic() - began_s < 5
    assert isinstance(found, ValueError)
    with pytest.raises(ValueError, match=r"named the replica .*COSMOS_DISABLE_REMOTE_REWARD_USE_REPLICA=1"):
        raise found


@pytest.mark.parametrize(
    "told", [{"uuid": "\ud800"}, {"uuid": "a", "replica_id": "\udfff"}, {"uuid": "a", "more": ["\udc80"]}]
)
def test_a_ticket_that_is_no_text_fails_its_sample_alone(server: RewardServer, told: dict[str, object]):
    server.enqueue_answers = [(200, told)]
    (found,) = scores()
    assert isinstance(found, ValueError)
    assert str(found).startswith("the reward service's answer is not JSON")
    assert isinstance(scores()[0], dict)


def test_an_answer_that_trickles_is_waited_for_no_longer_than_asked(server: RewardServer):
    server.pull_answers = [(200, Raw(b" " * 1000, pause_s=0.05))]
    began_s = monotonic()
    with pytest.raises(UnavailableError, match="did not answer: ReadTimeout: the answer began and did not end within "):
        scores(timeout_s=0.5)
    assert monotonic() - began_s < 5


def test_a_check_waits_no_longer_for_an_answer_that_trickles(server: RewardServer):
    server.pull_answers = [(400, Raw(b" " * 1000, pause_s=0.05))]
    began_s = monotonic()
    with (
        Client(Service.from_environment(), 0.5) as client,
        pytest.raises(UnavailableError, match="did not end within "),
    ):
        client.check()
    assert monotonic() - began_s < 5


@pytest.mark.parametrize("charset", ["idna", "rot13", "hex", "base64", "zip", "undefined", "utf-16", "no such"])
def test_an_error_is_quoted_whatever_charset_its_header_names(server: RewardServer, charset: str):
    told = Raw("f\xfcr \u732b".encode() + b"\xff", {"Content-Type": f"text/plain; charset={charset}"})
    server.enqueue_answers = [(422, told)]
    (found,) = scores()
    assert str(found) == "422 f\xfcr \u732b\ufffd"


@pytest.mark.parametrize("replica", ["a\nb", 7, None, ""])
def test_an_invalid_replica_does_not_matter_if_it_is_not_used(
    server: RewardServer, monkeypatch: pytest.MonkeyPatch, replica: object
):
    server.replica = replica
    if replica:
        monkeypatch.setenv("COSMOS_DISABLE_REMOTE_REWARD_USE_REPLICA", "1")
    found = scores()
    server.mistakes = [mistake for mistake in server.mistakes if not mistake.startswith("x-lepton")]
    assert isinstance(found[0], dict)


def test_tls_to_a_server_without_it_is_a_mistake_at_once(server: RewardServer, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("REMOTE_REWARD_ENQUEUE_URL", server.enqueue_url.replace("http:", "https:"))
    began_s = monotonic()
    with pytest.raises(ConfigError, match=r"no request to the reward service at https://127.*can be made"):
        scores()
    assert monotonic() - began_s < 5


def test_a_redirect_is_not_followed(server: RewardServer):
    server.enqueue_answers = [(302, Raw(b"", {"Location": server.enqueue_url}))]
    with pytest.raises(ConfigError, match="it redirects; set its final URL"):
        scores()


def bomb(size: int) -> bytes:
    """Zeros, compressed to a thousandth."""
    packed = zlib.compressobj(wbits=zlib.MAX_WBITS | 16)
    zeros = bytes(2**20)
    return b"".join([*(packed.compress(zeros) for _ in range(size // len(zeros))), packed.flush()])


def test_a_compression_bomb_is_read_up_to_the_limit_and_fails_its_sample(server: RewardServer):
    server.pull_answers = [(200, Raw(bomb(2**28), {"Content-Encoding": "gzip"}))]
    tracemalloc.start()
    try:
        (found,) = scores()
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert isinstance(found, ValueError)
    assert str(found) == f"the reward service's answer is larger than {MAX_REPLY_BYTES} bytes"
    assert peak < 2**28


@pytest.mark.parametrize(
    ("reply", "says"),
    [
        (Raw(bytes(MAX_REPLY_BYTES + 1)), "is larger than"),
        (Raw(b"junk", {"Content-Encoding": "gzip, gzip"}), "cannot be decompressed"),
        (Raw(b"junk", {"Content-Encoding": "gzip"}), "cannot be decompressed"),
        (Raw(gzip.compress(ANSWER)[:20], {"Content-Encoding": "gzip"}), "is not JSON"),
        (Raw(b""), "is not JSON"),
        (Raw(b"<html>log in</html>"), "is not JSON: 200 <html>log in</html>"),
        (Raw(b"\xff\xfe{"), "is not JSON"),
        (Raw(b"[" * 100_000), "is not JSON"),
        ([1.0], "is not a JSON object"),
        (0.5, "is not a JSON object"),
        ({}, "200 {}"),
        ({"error": "out of memory", "scores": {"overall_reward": [1.0]}}, "out of memory"),
        ({"scores": [1.0]}, r"asked for fn, got 200 \{\"scores\": \[1.0\]\}"),
        ({"scores": {}}, "fn gives no scores, not overall_reward"),
        ({"scores": {"b": [1.0], "a": [1.0]}}, "fn gives a, b, not overall_reward; if it never does, set score_key"),
        ({"scores": {"overall_reward": None}}, "overall_reward has no list of 1 scores"),
        ({"scores": {"overall_reward": 0.5}}, "overall_reward has no list of 1 scores"),
        ({"scores": {"overall_reward": "5"}}, "overall_reward has no list of 1 scores"),
        ({"scores": {"overall_reward": []}}, "overall_reward has no list of 1 scores"),
        ({"scores": {"overall_reward": [1.0, 2.0]}}, "overall_reward has no list of 1 scores"),
        ({"scores": {"overall_reward": [[1.0]]}}, "could not score it"),
        ({"scores": {"overall_reward": [True]}}, "could not score it"),
        ({"scores": {"overall_reward": [float("nan")]}}, "could not score it"),
        ({"scores": {"overall_reward": [10**400]}}, "could not score it"),
        ({"scores": {"overall_reward": [{"value": 1.0}]}}, "could not score it"),
        ({"scores": {"overall_reward": ["x" * 10_000]}}, r"could not score it.*\.\.\."),
    ],
)
def test_an_answer_without_the_score_fails_its_sample_alone(server: RewardServer, reply: object, says: str):
    server.pull_answers = [(200, reply)]
    (found,) = scores()
    assert isinstance(found, ValueError)
    with pytest.raises(ValueError, match=says):
        raise found
    assert len(str(found)) < 1000
    assert isinstance(scores()[0], dict)


def test_only_the_samples_whose_answers_lack_the_key_are_lost(server: RewardServer):
    server.pull_answers = [(200, {"scores": {"other": [1.0, 2.0]}}), (200, {"scores": {"other": [1.0]}})]
    # Which of the two is asked for first again is not decided.
    assert sorted(type(one).__name__ for one in scores(2)) == ["RefusedError", "dict"]


def test_an_answer_that_is_compressed_unasked_is_read(server: RewardServer):
    packed = gzip.compress(ANSWER)
    server.pull_answers = [(200, Raw(packed, {"Content-Encoding": "gzip"}))]
    (found,) = scores()
    assert found == {"overall_reward": 0.25, "remote-fn-overall_reward": 0.25}


def test_a_check_asks_the_service_as_a_run_does_and_scores_nothing(server: RewardServer):
    with Client(Service.from_environment(), 1.0) as client:
        said = client.check()
    assert said == f"answers 405 at {server.enqueue_url} and 400 at {server.fetch_url}"
    assert server.frames == []


@pytest.mark.parametrize(
    ("answer", "error", "says"),
    [
        ((401, {}), ConfigError, "set REMOTE_REWARD_TOKEN"),
        ((302, {}), ConfigError, "it redirects"),
        ((503, {"detail": "starting"}), UnavailableError, "answered 503"),
        ((200, Raw(b"junk", {"Content-Encoding": "gzip"})), UnavailableError, "cannot be decompressed"),
    ],
)
def test_a_check_finds_errors_at_which_a_run_would_stop(
    server: RewardServer, answer: tuple[int, object], error: type[Exception], says: str
):
    server.pull_answers = [answer]
    with Client(Service.from_environment(), 1.0) as client, pytest.raises(error, match=says):
        client.check()
