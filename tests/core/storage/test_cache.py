import os
import subprocess
import sys
from pathlib import Path

import pytest

from cosmos_rl_core.canonical import sha256
from cosmos_rl_core.errors import ConfigError
from cosmos_rl_core.storage.cache import DIRECTORY, GIGABYTES, LOCK, PART, SMALLEST_BYTES, Cache, of_node

SIZE = SMALLEST_BYTES


def object_of(number):
    """Bytes unlike any other number's, and their digest."""
    data = bytes([number]) * SIZE
    return data, sha256(data)


def refuse():
    pytest.fail("it was fetched")


def kept(folder):
    return {path.name for path in folder.iterdir() if path.suffix != LOCK}


def test_an_object_is_fetched_once(tmp_path):
    node = Cache(tmp_path, 10 * SIZE)
    data, digest = object_of(1)
    assert node.read(digest, SIZE, lambda: data) == data
    assert Cache(tmp_path, 10 * SIZE).read(digest, SIZE, refuse) == data
    assert node.read_part(digest, 3, 7) == data[3:7]
    assert node.read_part(object_of(2)[1], 3, 7) is None
    assert kept(tmp_path) == {digest}


def test_the_object_used_longest_ago_makes_room_and_the_bound_always_holds(tmp_path):
    node = Cache(tmp_path, 3 * SIZE)
    objects = [object_of(number) for number in range(5)]
    for age, (data, digest) in enumerate(objects[:3]):
        node.read(digest, SIZE, lambda data=data: data)
        os.utime(tmp_path / digest, (age, age))
    node.read(objects[0][1], SIZE, refuse)
    for data, digest in objects[3:]:
        node.read(digest, SIZE, lambda data=data: data)
        assert sum((tmp_path / name).stat().st_size for name in kept(tmp_path)) <= 3 * SIZE
    assert kept(tmp_path) == {objects[i][1] for i in (0, 3, 4)}


def test_objects_that_are_too_large_or_too_small_are_not_kept(tmp_path):
    node = Cache(tmp_path, 2 * SIZE)
    for size in (SIZE - 1, 2 * SIZE + 1):
        data = b"x" * size
        assert node.read(sha256(data), size, lambda data=data: data) == data
    assert kept(tmp_path) == set()


@pytest.mark.parametrize("damage", [b"", b"cut", b"y" * SIZE], ids=["empty", "cut", "other"])
def test_a_damaged_copy_is_dropped_and_fetched_again(tmp_path, damage):
    node = Cache(tmp_path, 10 * SIZE)
    data, digest = object_of(1)
    (tmp_path / digest).write_bytes(damage)
    assert node.read(digest, SIZE, lambda: data) == data
    assert node.read(digest, SIZE, refuse) == data


def test_an_object_that_cannot_be_fetched_leaves_nothing_and_nobody_waiting(tmp_path):
    node = Cache(tmp_path, 10 * SIZE)
    data, digest = object_of(1)
    with pytest.raises(FileNotFoundError):
        node.read(digest, SIZE, (tmp_path / "none").read_bytes)
    assert kept(tmp_path) == set()
    assert node.read(digest, SIZE, lambda: data) == data


def test_leftovers_of_a_process_that_was_killed_while_it_wrote_are_cleared_away(tmp_path):
    data, digest = object_of(1)
    (tmp_path / f"{object_of(2)[1]}{PART}").write_bytes(b"half")
    assert Cache(tmp_path, 10 * SIZE).read(digest, SIZE, lambda: data) == data
    assert kept(tmp_path) == {digest}


def test_a_full_disk_costs_only_the_copy(tmp_path):
    code = (
        "import resource, sys\n"
        "from pathlib import Path\n"
        "from cosmos_rl_core.storage.cache import Cache\n"
        "from cosmos_rl_core.canonical import sha256\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))\n"
        f"data = b'x' * {SIZE}\n"
        "print(Cache(Path(sys.argv[1]), 10**9).read(sha256(data), len(data), lambda: data) == data)\n"
    )
    said = subprocess.run([sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, check=True)
    assert said.stdout == "True\n"
    assert kept(tmp_path) == set()


def test_one_of_many_processes_fetches_and_the_others_wait_for_it(tmp_path):
    data, digest = object_of(7)
    code = (
        "import sys, time\n"
        "from pathlib import Path\n"
        "from cosmos_rl_core.storage.cache import Cache\n"
        "def fetch():\n"
        "    Path(sys.argv[1], 'fetched').open('a').write('x')\n"
        "    time.sleep(1)\n"
        f"    return bytes([7]) * {SIZE}\n"
        f"found = Cache(Path(sys.argv[1], 'cache'), 10**9).read({digest!r}, {SIZE}, fetch)\n"
        f"sys.exit(found != bytes([7]) * {SIZE})\n"
    )
    (tmp_path / "cache").mkdir()
    processes = [subprocess.Popen([sys.executable, "-c", code, str(tmp_path)]) for _ in range(3)]
    assert [process.wait(60) for process in processes] == [0, 0, 0]
    assert (tmp_path / "fetched").read_text() == "x"
    assert kept(tmp_path / "cache") == {digest}
    assert (tmp_path / "cache" / digest).read_bytes() == data


def test_the_environment_says_whether_there_is_a_cache_and_directories_need_none(tmp_path):
    environment = {DIRECTORY: str(tmp_path / "new" / "cache"), GIGABYTES: "0.5"}
    found = of_node("s3://bucket/slot", environment)
    assert found == Cache(Path(environment[DIRECTORY]), 5 * 10**8)
    assert Path(environment[DIRECTORY]).is_dir()
    assert of_node("s3://bucket/slot", {DIRECTORY: str(tmp_path)}) == Cache(tmp_path, 100 * 10**9)
    assert of_node("s3://bucket/slot", {}) is None
    assert of_node(str(tmp_path / "slot"), environment) is None
    for wrong in ("much", "0", "-1", "nan", "inf"):
        with pytest.raises(ConfigError, match=f"'{wrong}' is not a number of gigabytes above 0"):
            of_node("s3://bucket/slot", environment | {GIGABYTES: wrong})
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(ConfigError, match=r"file/cache' cannot be used"):
        of_node("s3://bucket/slot", {DIRECTORY: str(tmp_path / "file" / "cache")})
