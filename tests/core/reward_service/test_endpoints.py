"""Every endpoint and status, for a client that knows the protocol's page and nothing of us."""

import gc
import gzip
import http.client
import json
import socket
from dataclasses import replace
from pathlib import Path
from urllib.parse import urlsplit

import numpy as np
import pytest

from tests import running_service as running
from tests.running_service import image_frame
from tests.upstream_client import UpstreamClient, frame

UNKNOWN = "00000000-0000-4000-8000-000000000000"


def test_scores_of_images_are_the_scorers(service: UpstreamClient):
    told = service.scores(image_frame("a", "bcd", "e", first=7), "probe")
    assert told["scores"]["probe_reward"] == [7.0, 8.0, 9.0]
    assert told["scores"]["length"] == [1.0, 3.0, 1.0]
    assert told["input_info"] == {"shape": [3, 4, 4, 3], "dtype": "torch.uint8", "min": "7.000", "max": "9.000"}
    assert (told["type"], told["decoded_duration"]) == ("probe", "0.00")
    assert float(told["duration"]) >= 0


def test_a_video_reaches_the_scorer_frame_by_frame(service: UpstreamClient):
    video = np.arange(2 * 3 * 5 * 4 * 6, dtype=np.uint8).reshape(2, 3, 5, 4, 6)
    infos = [{"video_fps": 24.0}, {}]
    told = service.scores(frame(["a", "b"], {"probe": 1.0}, video, media_type="video", video_infos=infos), "probe")
    assert told["scores"]["probe_reward"] == [float(sample.mean()) for sample in video]
    assert told["scores"]["shape"] == ["(5, 4, 6, 3)"] * 2
    assert told["input_info"]["video_infos"] == infos
    assert told["scores"]["fps"] == [24.0, 16.0]


def test_one_request_asks_for_several_rewards(service: UpstreamClient):
    uuid = service.enqueue(
        frame(["a"], {"probe_too": 1.0, "jpeg": 0.5, "unknown": 0}, running.images(1), media_type="image")
    )
    assert service.result(uuid, "probe_too")["scores"]["probe_reward"] == [0.0]
    assert service.result(uuid, "jpeg")["scores"]["jpeg"][0] < 0


def test_every_answer_names_its_scorer(service: UpstreamClient):
    _, info = service.get("/api/reward/info")
    told = service.scores(image_frame("a"), "probe")
    known = info["scorers"]["probe"]
    assert told["scorer"] == {"name": "probe", "version": "probe 1", "digest": known["digest"]}
    assert info["format"] == 1
    assert known | {"digest": ""} == {
        "plugin": "probe",
        "version": "probe 1",
        "digest": "",
        "scores": {"probe_reward": "mean of all pixels, 0 to 255"},
        "input": "any",
        "media": ["image", "video"],
        "metadata": True,
        "references": "ignored",
        "batching": "exact",
        "ready": True,
    }
    assert info["scorers"]["probe_too"] == known
    assert info["scorers"]["jpeg"]["digest"] != known["digest"]


def test_a_request_that_expects_this_scorer_is_accepted_and_another_is_not(service: UpstreamClient):
    digest = service.get("/api/reward/info")[1]["scorers"]["probe"]["digest"]
    assert service.scores(image_frame("a", scorers={"probe": digest}), "probe")["scorer"]["digest"] == digest
    status, told = service.post("enqueue", image_frame("a", scorers={"probe": "0" * 64}))
    assert (status, told["scorer"]) == (409, {"name": "probe", "version": "probe 1", "digest": digest})
    assert "0" * 64 in told["detail"]


@pytest.mark.parametrize(
    ("prompt", "reason"),
    [
        ("error", "ValueError: an error in place of scores"),
        ("raise", "ValueError: not this one: -0"),
        ("nan", "the score 'probe' is nan, expected a finite number"),
        ("text", "the score 'probe' is 0.5, expected a finite number"),
        ("other", "no score named 'probe' among ['else']"),
        ("list", "the scorer returned [1.0] for a sample"),
        ("one too many", "the reward returned 2 entries for 1 samples"),
    ],
)
def test_a_sample_that_fails_is_an_error_and_never_a_number(service: UpstreamClient, prompt: str, reason: str):
    told = service.scores(image_frame(prompt), "probe")
    assert told["scores"] is None
    assert told["input_info"]["shape"] == [1, 4, 4, 3]
    assert told["error"].startswith("1 of 1 samples have no score: sample 0: ")
    assert reason in told["error"]


def test_numbers_next_to_the_score_that_a_sample_lacks_are_null(service: UpstreamClient):
    told = service.scores(image_frame("plain", "extra", first=3), "probe")
    assert told["scores"]["probe_reward"] == [3.0, 4.0]
    assert told["scores"]["length"] == [5.0, None]
    assert told["scores"]["else"] == [None, 1.0]


def test_the_samples_that_failed_are_named(service: UpstreamClient):
    told = service.scores(image_frame("a", "raise", "b", "nan"), "probe")
    assert told["scores"] is None
    assert told["errors"] == [
        None,
        "ValueError: not this one: -1",
        None,
        "the score 'probe' is nan, expected a finite number",
    ]
    assert told["error"].startswith("2 of 4 samples have no score")


@pytest.mark.parametrize(
    ("body", "sentence"),
    [
        (b"no frame", "bad frame: no newline"),
        (
            image_frame("a", reward="pickscroe"),
            "unknown reward 'pickscroe'; known: jpeg, probe, probe_too",
        ),
        (
            frame(["a"], {"probe": 1.0}, np.zeros((1, 16, 1, 2, 2), np.float16)),
            "probe takes image or video, not latent",
        ),
        (image_frame("a")[:-1], "bad frame: 47 bytes after the array's header"),
    ],
    ids=["no frame", "unknown reward", "latents", "too short"],
)
def test_requests_that_cannot_be_scored_are_refused_at_once(service: UpstreamClient, body: bytes, sentence: str):
    status, told = service.post("enqueue", body)
    assert (status, list(told)) == (422, ["detail"])
    assert sentence in told["detail"]


def test_nothing_of_a_refused_request_stays_on_the_disk(service: UpstreamClient, spool: Path):
    service.post("enqueue", b"no frame")
    service.scores(image_frame("a"), "probe")
    # The result comes first, then the body goes.
    left = [path for name in ("incoming", "frames", "decoded") for path in (spool / "spool" / name).iterdir()]
    assert len(left) <= 1


def test_pull_answers_404_for_unknown_requests_and_rewards(service: UpstreamClient):
    status, told = service.form("pull", uuid=UNKNOWN, type="probe")
    assert (status, told) == (
        404,
        {"message": f"this service knows no request {UNKNOWN}; results are kept for 86400 s"},
    )
    uuid = service.enqueue(image_frame("a"))
    assert service.form("pull", uuid=uuid, type="jpeg")[1] == {"message": f"request {uuid} asked for probe, not jpeg"}
    # Without a type it is cosmos-rl's default, which this request did not ask for.
    assert service.form("pull", uuid=uuid)[0] == 404


def test_a_form_without_its_fields_is_refused_as_by_upstream(service: UpstreamClient, worker_token: str):
    missing = {"type": "missing", "loc": ["body", "uuid"], "msg": "Field required", "input": None}
    assert service.form("pull", type="probe") == (422, {"detail": [missing]})
    json_body = {"Content-Type": "application/json"}
    assert service.post("pull", b'{"uuid": "a"}', json_body) == (422, {"detail": [missing]})
    assert [service.form(name)[0] for name in ("ping", "latent_attr")] == [422, 422]
    assert replace(service, token=worker_token).form("push", uuid="a")[0] == 422
    many = "&".join(f"a{i}=1" for i in range(100)).encode()
    assert service.post("pull", many, {"Content-Type": "application/x-www-form-urlencoded"})[0] == 422


def test_the_small_endpoints_answer_as_upstream(service: UpstreamClient):
    assert service.form("ping", info_data="here") == (200, {"message": "Ping request received"})
    told = json.dumps({"chunk_duration": 81, "fps": 16})
    assert service.form("latent_attr", fields=told) == (200, {"message": "Latent attributes set successfully"})
    assert service.form("latent_attr", fields="{")[0] == 500
    assert service.get("/api/reward/enqueue")[0] == 405


def test_a_push_needs_the_workers_token_and_never_overwrites(service: UpstreamClient, worker_token: str):
    worker, scores = replace(service, token=worker_token), json.dumps({"scores": {"probe_reward": [99.0]}})
    uuid = service.enqueue(image_frame("sleep 0.5"))
    assert service.form("push", uuid=uuid, type="probe", scores=scores)[0] == 401
    assert worker.form("push", uuid=UNKNOWN, type="probe", scores=scores)[0] == 404
    assert worker.form("push", uuid=uuid, type="probe", scores="{}")[0] == 500
    two = json.dumps({"scores": {"probe_reward": [1.0, 2.0]}})
    assert worker.form("push", uuid=uuid, type="probe", scores=two)[0] == 500
    nan = '{"scores": {"probe_reward": [NaN]}}'
    assert worker.form("push", uuid=uuid, type="probe", scores=nan)[0] == 500
    stored = {"message": "Scores received and stored successfully"}
    assert worker.form("push", uuid=uuid, type="probe", scores=scores) == (200, stored)
    assert worker.form("push", uuid=uuid, type="probe", scores=two)[0] == 409
    told = service.result(uuid, "probe")
    assert told["scores"] == {"probe_reward": [99.0]}
    # Nobody who expects a scorer adopts it.
    assert told["scorer"]["version"] == "pushed"
    service.scores(image_frame("after it"), "probe")
    assert service.result(uuid, "probe") == told


def test_a_wrong_token_is_refused_everywhere_but_at_the_health_check(service: UpstreamClient):
    for client in (replace(service, token="wrong"), replace(service, token="")):
        assert client.post("enqueue", image_frame("a"))[0] == 401
        assert [client.form(name)[0] for name in ("pull", "push", "ping", "latent_attr")] == [401] * 4
        assert [client.get(path)[0] for path in ("/api/reward/info", "/metrics", "/healthz")] == [401, 401, 200]


def test_a_large_body_is_refused_whether_or_not_it_says_how_large(service: UpstreamClient):
    large = bytes(2 * 2**20)
    status, told = service.post("enqueue", large)
    assert (status, told["detail"]) == (413, "a body of more than 1 MiB; send fewer samples in a request")
    host = service.url.removeprefix("http://")
    connection = http.client.HTTPConnection(host, timeout=30)
    chunks = (large[i : i + 2**16] for i in range(0, len(large), 2**16))
    headers = {"Authorization": f"Bearer {service.token}"}
    connection.request("POST", "/api/reward/enqueue", chunks, headers, encode_chunked=True)
    assert connection.getresponse().status == 413
    connection.close()
    # Too large by its very last block.
    connection.request("POST", "/api/reward/enqueue", iter([large[: 2**20], b"1"]), headers, encode_chunked=True)
    assert connection.getresponse().status == 413
    connection.close()


def test_a_compressed_body_is_refused_unread(service: UpstreamClient):
    bomb = gzip.compress(bytes(2**24))
    status, told = service.post("enqueue", bomb, {"Content-Encoding": "gzip"})
    assert (status, told["detail"]) == (
        415,
        "Content-Encoding gzip: send the frame as it is, not compressed",
    )


def test_health_and_metrics_tell_what_happened(service: UpstreamClient):
    service.scores(image_frame("a"), "probe")
    status, health = service.get("/healthz")
    assert (status, health["status"], health["loading"], health["faults"]) == (200, "ready", [], {})
    _, text = service.get("/metrics")
    numbers = dict(line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#"))
    assert float(numbers["reward_accepted_total"]) >= 1
    assert float(numbers['reward_settled_total{outcome="scored",reward="probe"}']) >= 1
    assert numbers['reward_processes_ready{scorer="probe"}'] == "1.0"


def test_answers_are_sent_at_once(service: UpstreamClient):
    """Without TCP_NODELAY the body of an answer waits up to 40 ms for the client to acknowledge its headers."""
    address = urlsplit(service.url)
    client = http.client.HTTPConnection(str(address.hostname), address.port)
    client.request("GET", "/healthz")
    client.getresponse().read()
    assert client.sock is not None
    ours = client.sock.getsockname()
    accepted = [one for one in gc.get_objects() if issubclass(type(one), socket.socket) and peer_of(one) == ours]
    assert [one.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY) for one in accepted] == [1]
    client.close()


def peer_of(one: socket.socket) -> object:
    try:
        return one.getpeername()
    except OSError:  # closed, or not connected
        return None
