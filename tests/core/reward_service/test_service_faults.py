"""Scorers that die, hang, lie, do not load: each accepted request ends in its scores or in an error that says why."""

import json
import os
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from cosmos_rl_core.reward_service import pool
from tests import running_service as running
from tests.running_service import image_frame, unfinished_upload
from tests.uneven import ULP
from tests.upstream_client import UpstreamClient

pytestmark = pytest.mark.processes


@contextmanager
def serving(tmp_path: Path, *scorers: dict[str, Any], ready: bool = True, **more: Any) -> Iterator[UpstreamClient]:
    path = running.write(tmp_path, running.settings(tmp_path, *scorers, **more))
    with running.in_thread(path, ready=ready) as client:
        yield client


def probe(**more: Any) -> dict[str, Any]:
    args = {name: more.pop(name) for name in ("batching", "timeout_s", "processes", "venv_python") if name in more}
    return {"reward_type": "probe", "options": more, **args}


def scorer_pids(tmp_path: Path) -> list[int]:
    """Processes of scorers of the service with this folder, which their output goes to."""
    found = psutil.Process().children(recursive=True)
    return [child.pid for child in found if str(tmp_path) in os.path.realpath(f"/proc/{child.pid}/fd/2")]


def until(happened: Any, timeout_s: float = 20.0) -> Any:
    deadline_s = time.monotonic() + timeout_s
    while not (found := happened()):
        assert time.monotonic() < deadline_s, "it did not happen"
        time.sleep(0.02)
    return found


def test_a_request_that_ends_its_process_twice_is_an_error_and_harms_no_other(tmp_path: Path):
    with serving(tmp_path, probe()) as client:
        good = [client.enqueue(image_frame("a", "b", first=i)) for i in range(3)]
        bad = client.enqueue(image_frame("a", "die"))
        good += [client.enqueue(image_frame("a", "b", first=i)) for i in range(3, 6)]
        scores = [client.result(uuid, "probe")["scores"]["probe_reward"] for uuid in good]
        told = client.result(bad, "probe")
    assert scores == [[float(i), float(i + 1)] for i in range(6)]
    assert told["scores"] is None
    assert told["error"].startswith("probe ended by SIGKILL")
    assert "the second process that this request ended" in told["error"]


def test_many_requests_that_end_their_processes_harm_none_that_waits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(pool, "BACK_OFF_S", (0.001, 0.01))
    with serving(tmp_path, probe()) as client:
        bad = [client.enqueue(image_frame("exit")) for _ in range(3)]
        good = client.enqueue(image_frame("a", first=8))
        assert all("second process" in client.result(uuid, "probe")["error"] for uuid in bad)
        assert client.result(good, "probe")["scores"]["probe_reward"] == [8.0]


def test_a_request_whose_process_died_by_chance_is_scored_by_the_next(tmp_path: Path):
    with serving(tmp_path, probe()) as client:
        told = client.scores(image_frame(f"die-once {tmp_path / 'died'}", first=3), "probe")
        numbers = client.get("/metrics")[1]
    assert told["scores"]["probe_reward"] == [3.0]
    assert 'reward_process_deaths_total{scorer="probe"} 1.0' in numbers


def test_a_process_that_dies_idle_is_replaced(tmp_path: Path):
    with serving(tmp_path, probe()) as client:
        (pid,) = scorer_pids(tmp_path)
        os.kill(pid, signal.SIGKILL)
        assert client.scores(image_frame("a", first=9), "probe")["scores"]["probe_reward"] == [9.0]
        assert pid not in scorer_pids(tmp_path)


def test_the_exit_code_and_the_last_line_of_a_dead_process_are_told(tmp_path: Path):
    with serving(tmp_path, probe()) as client:
        told = client.scores(image_frame("exit"), "probe")
    assert "probe ended with exit code 3; it printed: a scorer may print ['exit']" in told["error"]


def test_a_process_that_does_not_answer_in_time_is_ended(tmp_path: Path):
    with serving(tmp_path, probe(timeout_s=0.4)) as client:
        told = client.scores(image_frame("sleep 60"), "probe")
        assert told["error"].startswith("probe did not answer within 0.4 s")
        assert client.scores(image_frame("a", first=5), "probe")["scores"]["probe_reward"] == [5.0]


def test_a_scorer_that_is_away_for_long_fails_the_request(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(pool, "UNAVAILABLE_S", 0.01)
    with serving(tmp_path, probe()) as client:
        told = client.scores(image_frame("away"), "probe")
    assert told["error"] == "probe: UnavailableError: the judge is away, in 6 tries"


def calls(path: Path) -> list[int]:
    return [int(line) for line in path.read_text().split()]


def test_exact_scores_each_request_alone_and_fast_requests_of_one_shape_together(tmp_path: Path):
    exact, fast = tmp_path / "exact", tmp_path / "fast"
    scorers = (
        probe(log=str(exact)) | {"name": "exact"},
        probe(log=str(fast), batching="fast") | {"name": "fast", "fast_samples": 6},
    )
    with serving(tmp_path, *scorers) as client:
        found: dict[str, list[Any]] = {}
        for name in ("exact", "fast"):
            # While the first is scored, the others queue up.
            bodies = [image_frame("sleep 1.2", reward=name)]
            bodies += [image_frame("a", "b", reward=name, first=i) for i in range(5)]
            bodies += [image_frame("a", reward=name, size=8)]
            uuids = [client.enqueue(body) for body in bodies]
            found[name] = [client.result(uuid, name)["scores"]["probe_reward"] for uuid in uuids]
        known = client.get("/api/reward/info")[1]["scorers"]
    assert found["exact"] == found["fast"]
    assert found["exact"][1:6] == [[float(i), float(i + 1)] for i in range(5)]
    assert calls(exact) == [1, 2, 2, 2, 2, 2, 1]
    assert calls(fast) == [1, 6, 4, 1]
    assert [known[name]["batching"] for name in ("exact", "fast")] == ["exact", "fast"]
    assert known["exact"]["digest"] != known["fast"]["digest"]


def test_a_scorer_whose_batches_change_scores_gets_batches_of_1_and_is_another_scorer(tmp_path: Path):
    even, uneven = (
        {"reward_type": "uneven", "name": kernel, "options": {"kernel": kernel}} for kernel in ("even", "place")
    )
    plugins = [str(Path(running.__file__).with_name("uneven.py"))]
    with serving(tmp_path, even, uneven, uneven | {"name": "fast", "batching": "fast"}, plugins=plugins) as client:
        found = {name: client.scores(image_frame("a", "b", reward=name), name) for name in ("even", "place", "fast")}
        known = client.get("/api/reward/info")[1]["scorers"]
    scores = [found[name]["scores"]["uneven"] for name in ("even", "place", "fast")]
    assert scores == [[0.0, 1.0], [0.0, 1.0], [0.0, 1.0 + ULP]]
    assert [known[name]["batching"] for name in found] == ["exact", "exact, batches of 1", "fast"]
    assert [known[name]["version"] for name in found] == ["uneven 1", "uneven 1, batches of 1", "uneven 1"]
    assert found["place"]["scorer"]["digest"] == known["place"]["digest"] != known["even"]["digest"]
    assert "uneven scores in batches of 1: " in (tmp_path / "spool" / "logs" / "place.0.log").read_text()


def test_a_poisonous_request_is_taken_out_of_a_batch(tmp_path: Path):
    with serving(tmp_path, probe(batching="fast")) as client:
        prompts = ["sleep 0.5", "a", "die", "raise", "b"]
        uuids = [client.enqueue(image_frame(prompt, first=i)) for i, prompt in enumerate(prompts)]
        told = [client.result(uuid, "probe") for uuid in uuids]
    assert [each["scores"] and each["scores"]["probe_reward"] for each in told] == [[0.0], [1.0], None, None, [4.0]]
    assert "second process" in told[2]["error"]
    assert "not this one" in told[3]["error"]


def test_a_scorer_that_does_not_load_is_named_and_others_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(pool, "BACK_OFF_S", (0.01, 0.05))
    scorers = (probe(release="broken"), {"reward_type": "jpeg"}, probe(venv_python="/no/python") | {"name": "lost"})
    with serving(tmp_path, *scorers, ready=False) as client:
        early, told = client.post("enqueue", image_frame("a"))
        until(lambda: client.post("enqueue", image_frame("a"))[0] == 503)
        if early == 200:  # accepted before anybody knew
            failed = client.result(told["uuid"], "probe")
            assert "probe does not load: FileNotFoundError: no weights here" in failed["error"]
        until(lambda: client.post("enqueue", image_frame("a", reward="lost"))[0] == 503)
        status, health = client.get("/healthz")
        known = client.get("/api/reward/info")[1]["scorers"]
        assert client.scores(image_frame("a", reward="jpeg"), "jpeg")["scores"]["jpeg"][0] < 0
    assert (status, health["status"], sorted(health["loading"])) == (503, "not ready", ["lost", "probe"])
    assert health["faults"]["probe"] == "probe does not load: FileNotFoundError: no weights here"
    assert "/no/python cannot be started" in health["faults"]["lost"]
    assert (known["probe"]["ready"], known["probe"]["digest"]) == (False, "")


def test_requests_wait_for_a_process_that_loads_while_another_one_never_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(pool, "BACK_OFF_S", (0.01, 0.02))
    # The first process that looks finds no file and loads; the other one breaks, again and again.
    with serving(tmp_path, probe(processes=2, only=str(tmp_path / "taken")), ready=False) as client:
        until(lambda: client.get("/healthz")[1]["faults"])
        told = client.scores(image_frame("a", first=6), "probe")
    assert told["scores"]["probe_reward"] == [6.0]


def test_an_interpreter_without_our_packages_says_which_one_it_misses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(pool, "BACK_OFF_S", (0.01, 0.05))
    bare = tmp_path / "bare"
    # The same interpreter, without the packages that are installed with it.
    bare.write_text(f'#!/bin/sh\nexec {os.path.realpath(sys.executable)} -S "$@"\n')
    bare.chmod(0o755)
    with serving(tmp_path, probe(venv_python=str(bare)), ready=False) as client:
        faults = until(lambda: client.get("/healthz")[1]["faults"])
    assert "ModuleNotFoundError: No module named" in faults["probe"]


def test_requests_of_one_scorer_are_scored_side_by_side_by_its_processes(tmp_path: Path):
    with serving(tmp_path, probe(processes=2)) as client:
        started_s = time.monotonic()
        uuids = [client.enqueue(image_frame("sleep 1")) for _ in range(2)]
        for uuid in uuids:
            client.result(uuid, "probe")
        assert time.monotonic() - started_s < 1.8


def test_a_full_queue_asks_clients_to_come_again(tmp_path: Path):
    with serving(tmp_path, probe(), max_queue=2) as client:
        uuids = [client.enqueue(image_frame("sleep 0.5")) for _ in range(2)]
        status, told = client.post("enqueue", image_frame("a"))
        assert (status, told) == (429, {"detail": "2 requests wait, at most 2"})
        for uuid in uuids:
            client.result(uuid, "probe")
        assert until(lambda: client.post("enqueue", image_frame("a"))[0] == 200)


def test_a_body_that_stops_arriving_is_given_up(tmp_path: Path):
    with serving(tmp_path, probe(), body_timeout_s=0.3) as client:
        connection = unfinished_upload(client)
        assert connection.getresponse().status == 408
        connection.close()
        assert [*(tmp_path / "spool" / "incoming").iterdir()] == []


def test_results_are_forgotten_after_their_time(tmp_path: Path):
    with serving(tmp_path, probe(), result_ttl_s=1.5) as client:
        uuid = client.enqueue(image_frame("a"))
        client.result(uuid, "probe")
        until(lambda: client.form("pull", uuid=uuid, type="probe")[0] == 404)


def test_bodies_and_results_leave_no_files_behind(tmp_path: Path):
    with serving(tmp_path, probe()) as client:
        for _ in range(3):
            client.scores(image_frame("a"), "probe")
        until(lambda: not [*(tmp_path / "spool" / "frames").iterdir()])
        assert not [*(tmp_path / "spool" / "incoming").iterdir()]


def test_a_worker_ends_with_its_service(tmp_path: Path):
    with serving(tmp_path, probe()):
        (pid,) = scorer_pids(tmp_path)
    assert not psutil.pid_exists(pid)


def test_pixels_of_a_large_request_never_pass_through_a_pipe(tmp_path: Path):
    with serving(tmp_path, probe()) as client:
        image = np.full((1, 1024, 1024, 3), 255, np.uint8)
        body = json.dumps({"prompts": ["a"], "reward_fn": {"probe": 1.0}, "media_type": "image"}).encode() + b"\n"
        np.save(tmp_path / "image.npy", image)
        (pid,) = scorer_pids(tmp_path)
        before = psutil.Process(pid).io_counters().read_chars
        assert client.scores(body + (tmp_path / "image.npy").read_bytes(), "probe")["scores"]["probe_reward"] == [255.0]
        assert psutil.Process(pid).io_counters().read_chars - before < 2**16
