"""A lease in the store: who gets it, who is refused, and how the one who lost it learns of it."""

import itertools
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from cosmos_rl_core.errors import LeaseError
from cosmos_rl_core.storage import store
from cosmos_rl_core.storage.lease import Lease, holder_of
from cosmos_rl_core.storage.sealed import seal

ROOT = Path(__file__).parents[3]
ELSEWHERE = {"holder": "x", "host": "node-7", "machine": "another", "pid": 4, "started": 1.0}
HOLD = """
import sys, time
from cosmos_rl_core.storage.lease import Lease
with Lease(sys.argv[1], beat_s=0.05):
    print("held", flush=True)
    time.sleep(60)
"""


def lease(url: str, patience_s: float = 20.0) -> Lease:
    return Lease(url, beat_s=0.05, patience_s=patience_s)


def held_elsewhere(url: str) -> None:
    store.put_if_absent(f"{url}/1.json", seal("lease", ELSEWHERE))
    store.write(f"{url}/1.count", b"41")


def test_a_second_holder_is_refused_while_the_first_is_at_work_and_not_after(tmp_path: Path):
    url = f"{tmp_path}/run/lease"
    with lease(url) as first:
        with pytest.raises(
            LeaseError, match=rf"another process works on {tmp_path}/run: pid \d+ on .*wait for its end"
        ):
            lease(url).__enter__()
        first.check()
    began_s = time.monotonic()
    with lease(url):
        assert time.monotonic() - began_s < 2


def test_an_error_in_the_block_releases_the_lease(tmp_path: Path):
    with pytest.raises(KeyError), lease(str(tmp_path)):
        raise KeyError("body")
    with lease(str(tmp_path)):
        pass


def test_a_killed_holder_of_this_machine_is_not_waited_for(tmp_path: Path):
    command = [sys.executable, "-c", HOLD, str(tmp_path)]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == b"held\n"
        with pytest.raises(LeaseError, match=f"pid {holder.pid} on"):
            lease(str(tmp_path)).__enter__()
        # Not waited for yet: a process that is dead but has a number.
        holder.kill()
        began_s = time.monotonic()
        with lease(str(tmp_path)):
            assert time.monotonic() - began_s < 5


def test_setting_the_clock_makes_no_holder_look_dead(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    with lease(str(tmp_path)):
        # Times of day, of processes too, come of the time at which the system says it began, and that moves.
        monkeypatch.setattr("psutil._pslinux.boot_time", lambda: 1.0)
        with pytest.raises(LeaseError, match=f"pid {os.getpid()} on"):
            lease(str(tmp_path)).__enter__()


def test_a_lease_whose_counter_does_not_move_is_taken_over(tmp_path: Path):
    held_elsewhere(str(tmp_path))
    began_s = time.monotonic()
    with lease(str(tmp_path), patience_s=0.5):
        assert time.monotonic() - began_s > 0.5


def test_a_counter_that_moves_late_is_seen_too(tmp_path: Path):
    held_elsewhere(str(tmp_path))
    beat = threading.Timer(0.3, store.write, (f"{tmp_path}/1.count", b"42"))
    beat.start()
    with pytest.raises(LeaseError, match="pid 4 on node-7"):
        lease(str(tmp_path)).__enter__()
    beat.join()


def test_a_holder_that_loses_the_lease_is_told(tmp_path: Path):
    with lease(str(tmp_path)) as first:
        first.check()
        store.put_if_absent(f"{tmp_path}/2.json", seal("lease", ELSEWHERE))
        time.sleep(1)
        with pytest.raises(LeaseError, match="pid 4 on node-7"):
            first.check()


def test_one_of_several_at_once_gets_the_lease(tmp_path: Path):
    """All of them find the same dead holder and reach for the same number."""
    held_elsewhere(str(tmp_path))
    store.write(f"{tmp_path}/1.released", b"")
    taken, refused = [], []
    done = threading.Barrier(8)

    def reach() -> None:
        try:
            with lease(str(tmp_path)):
                taken.append(1)
                done.wait(20)
        except LeaseError:
            refused.append(1)
            done.wait(20)

    threads = [threading.Thread(target=reach) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (len(taken), len(refused)) == (1, 7)


def test_asking_for_the_holder_takes_no_lease(tmp_path: Path):
    url = f"{tmp_path}/run/lease"
    assert holder_of(url) is None
    with lease(url):
        found = holder_of(url)
        assert found is not None
        assert found["pid"] == os.getpid()
        assert holder_of(url) == found
        # Besides the counter, which its holder may be writing just now.
        assert [name for name in store.listed(url) if name.endswith(".json")] == ["1.json"]
    assert holder_of(url) is None


def test_a_holder_on_another_machine_counts_as_long_as_its_counter_moves(tmp_path: Path):
    url = f"{tmp_path}/run/lease"
    held_elsewhere(url)
    assert holder_of(url, patience_s=0.1) is None
    ended = threading.Event()

    def beat() -> None:
        for count in itertools.count(42):
            store.write(f"{url}/1.count", str(count).encode())
            if ended.wait(0.02):
                return

    beats = threading.Thread(target=beat)
    beats.start()
    assert holder_of(url, patience_s=1.0) == {"pid": 4, "host": "node-7"}
    ended.set()
    beats.join()


@pytest.mark.parametrize(
    "damage", [b"", b"{}", seal("lease", ELSEWHERE).replace(b"node-7", b"node-8"), seal("lease", {})]
)
def test_the_counter_alone_says_whether_an_unreadable_lease_is_held(tmp_path: Path, damage: bytes):
    held_elsewhere(str(tmp_path))
    store.write(f"{tmp_path}/1.json", damage)
    assert holder_of(str(tmp_path), patience_s=0.1) is None
    beat = threading.Timer(0.3, store.write, (f"{tmp_path}/1.count", b"42"))
    beat.start()
    with pytest.raises(LeaseError, match=r"pid \? on an unknown machine"):
        lease(str(tmp_path)).__enter__()
    beat.join()
    with lease(str(tmp_path), patience_s=0.3) as held:
        store.write(f"{tmp_path}/3.json", damage)
        time.sleep(1)
        with pytest.raises(LeaseError, match=r"pid \? on an unknown machine"):
            held.check()
