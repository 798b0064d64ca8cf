import errno
import os
import secrets
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest

from cosmos_rl_core.errors import ArtifactError, ConfigError, UnavailableError, UnreadableError
from cosmos_rl_core.storage import store
from tests.seaweed import BUCKET


@pytest.fixture(params=["local", "seaweed"])
def racing_url(request, tmp_path):
    """A place of its own in a directory, and on a real S3 server."""
    if request.param == "local":
        return str(tmp_path / "store")
    request.getfixturevalue("seaweed")
    return f"s3://{BUCKET}/{secrets.token_hex(8)}"


def run_python(code, *arguments, env=None, **options):
    """Run ``code`` with ``store`` imported in a process of its own."""
    preamble = (
        "import sys\nfrom cosmos_rl_core.errors import UnavailableError\nfrom cosmos_rl_core.storage import store\n"
    )
    return subprocess.run(
        [sys.executable, "-c", preamble + code, *arguments],
        env=os.environ | (env or {}),
        capture_output=True,
        text=True,
        check=True,
        **options,
    ).stdout


def names_under(folder):
    return sorted(path.relative_to(folder).as_posix() for path in Path(folder).rglob("*") if path.is_file())


def test_the_first_of_two_different_writes_wins(store_url):
    url = store.join(store_url, "a", "b")
    assert store.put_if_absent(url, b"first")
    assert not store.put_if_absent(url, b"second")
    assert store.read(url) == b"first"


def test_a_part_of_an_object_is_read_by_itself(store_url):
    url = store.join(store_url, "part")
    store.write(url, b"0123456789")
    assert (store.read(url, 2, 5), store.read(url, 8, 10), store.read(url)) == (b"234", b"89", b"0123456789")
    with pytest.raises(FileNotFoundError):
        store.read(store.join(store_url, "none"), 2, 5)


def test_equal_bytes_read_back_count_as_ours(store_url):
    url = store.join(store_url, "x")
    assert store.put_if_absent(url, b"same")
    assert store.put_if_absent(url, b"same")


def test_one_of_many_threads_wins_and_the_losers_see_its_bytes(racing_url):
    url = store.join(racing_url, "race")
    start = threading.Barrier(8)

    def contend(number):
        start.wait()
        return store.put_if_absent(url, b"writer %d" % number), store.read(url)

    with ThreadPoolExecutor(8) as pool:
        outcomes = list(pool.map(contend, range(8)))
    winners = [number for number, (won, _) in enumerate(outcomes) if won]
    assert len(winners) == 1
    assert {seen for _, seen in outcomes} == {b"writer %d" % winners[0]}


@pytest.mark.processes
def test_one_of_two_processes_wins_each_of_many_races(racing_url):
    code = (
        "for i in range(20):\n"
        "    won = store.put_if_absent(f'{sys.argv[1]}/{i}', sys.argv[2].encode())\n"
        "    print(int(won), store.read(f'{sys.argv[1]}/{i}').decode())\n"
    )
    with ThreadPoolExecutor(2) as pool:
        lines_a, lines_b = (
            output.splitlines() for output in pool.map(lambda who: run_python(code, racing_url, who), ["a", "b"])
        )
    for line_a, line_b in zip(lines_a, lines_b, strict=True):
        assert (line_a, line_b) in {("1 a", "0 a"), ("0 b", "1 b")}


def test_both_stores_decide_races(racing_url):
    assert store.decides_races(racing_url)
    assert store.listed(racing_url) == {}


def test_a_missing_object_is_absent_and_no_error(store_url):
    url = store.join(store_url, "nothing", "here")
    assert store.read_if_exists(url) is None
    assert store.size(url) is None
    with pytest.raises(FileNotFoundError):
        store.read(url)


def test_a_written_object_has_its_bytes_and_size(store_url):
    url = store.join(store_url, "deep", "er", "object")
    store.write(url, b"\0" * 1000)
    store.write(url, b"shorter")
    assert store.read(url) == b"shorter"
    assert store.size(url) == 7
    store.write(url, b"")
    assert store.size(url) == 0


def test_a_folder_that_cannot_be_read_is_an_error_of_a_listing(tmp_path, monkeypatch):
    """A sweep would take what only its files name for garbage."""
    for name in ("open/a", "closed/b"):
        store.write(f"{tmp_path}/{name}", b"x")
    os.symlink(tmp_path / "nowhere", tmp_path / "broken")
    assert {name: entry.size for name, entry in store.listed(str(tmp_path)).items()} == {
        "broken": 0,
        "closed/b": 1,
        "open/a": 1,
    }
    scan = os.scandir

    def denied(path: str):
        if str(path).endswith("closed"):
            raise PermissionError(errno.EACCES, "Permission denied", path)
        return scan(path)

    monkeypatch.setattr(os, "scandir", denied)
    with pytest.raises(UnreadableError, match=r"cannot list .*: Permission denied"):
        store.listed(str(tmp_path))


def test_a_name_as_long_as_the_file_system_allows_is_written(tmp_path):
    url = f"{tmp_path}/{'a' + 'é' * 127}"
    assert store.put_if_absent(url, b"x")
    store.write(url, b"y")
    assert (store.read(url), store.names(str(tmp_path))) == (b"y", {url.rpartition("/")[2]})


def test_names_directly_below_a_folder_are_listed_once(store_url):
    for name in ("a/1", "a/2/x", "b", "a/2/y"):
        store.write(f"{store_url}/names/{name}", b"x")
    assert store.names(f"{store_url}/names") == {"a", "b"}
    assert store.names(f"{store_url}/names/a") == {"1", "2"}
    assert store.names(f"{store_url}/names/nothing") == set()


def test_an_object_is_seen_as_soon_as_another_process_has_written_it(store_url):
    url = store.join(store_url, "later")
    assert store.read_if_exists(url) is None
    run_python("store.write(sys.argv[1], b'from elsewhere')", url)
    assert store.read(url) == b"from elsewhere"
    assert store.size(url) == 14


@pytest.mark.parametrize("operation", ["write", "put_if_absent"])
def test_a_full_store_names_the_space_and_leaves_no_object(tmp_path, operation):
    code = (
        "import resource\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))\n"
        "try:\n"
        f"    store.{operation}(sys.argv[1], b'x' * 5000)\n"
        "except UnavailableError as error:\n"
        "    print(error)\n"
    )
    message = run_python(code, str(tmp_path / "object"))
    assert "no space left to write" in message
    assert str(tmp_path / "object") in message
    assert names_under(tmp_path) == []


def test_a_full_store_keeps_the_object_that_was_to_be_replaced(tmp_path):
    store.write(str(tmp_path / "object"), b"old")
    code = (
        "import resource\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))\n"
        "try:\n"
        "    store.write(sys.argv[1], b'x' * 5000)\n"
        "except UnavailableError:\n"
        "    print('refused')\n"
    )
    assert run_python(code, str(tmp_path / "object")) == "refused\n"
    assert names_under(tmp_path) == ["object"]
    assert store.read(str(tmp_path / "object")) == b"old"


def test_a_put_leaves_nothing_but_the_object(tmp_path):
    store.put_if_absent(str(tmp_path / "a"), b"1")
    store.put_if_absent(str(tmp_path / "a"), b"2")
    store.write(str(tmp_path / "b"), b"3")
    assert names_under(tmp_path) == ["a", "b"]


@pytest.mark.parametrize(
    "operation", ["put_if_absent(url, b'1')", "write(url, b'1')", "read(url)", "size(url)", "read_if_exists(url)"]
)
def test_a_store_that_does_not_answer_is_unavailable(operation):
    code = (
        "from cosmos_rl_core.storage import s3\n"
        "s3.RETRY_FOR_S = 0\n"
        "url = 's3://bucket/object'\n"
        "try:\n"
        f"    store.{operation}\n"
        "except UnavailableError as error:\n"
        "    print(error.retryable, error)\n"
    )
    nowhere = {
        "AWS_ENDPOINT_URL": "http://127.0.0.1:9",
        "AWS_ACCESS_KEY_ID": "test",
        "AWS_SECRET_ACCESS_KEY": "test",
        "AWS_DEFAULT_REGION": "us-east-1",
    }
    message = run_python(code, env=nowhere)
    assert message.startswith("True cannot ")
    assert "s3://bucket/object" in message
    assert "127.0.0.1:9" in message


def test_a_directory_that_cannot_be_written_is_unavailable(tmp_path):
    (tmp_path / "file").write_bytes(b"not a directory")
    with pytest.raises(UnavailableError, match="cannot write"):
        store.write(str(tmp_path / "file" / "object"), b"1")


def test_a_local_path_means_the_same_in_every_process(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert store.absolute("outputs") == str(tmp_path / "outputs")
    assert store.absolute("s3://bucket/prefix") == "s3://bucket/prefix"
    assert store.join("s3://bucket/prefix/", "a", "b") == "s3://bucket/prefix/a/b"


@pytest.mark.parametrize("num_chunks", [0, 1, 20])
def test_a_stream_is_written_whole_or_not_at_all(store_url: str, num_chunks: int):
    chunks = [bytes([n]) * 2**20 for n in range(num_chunks)]

    def breaking() -> Iterator[bytes | memoryview]:
        yield from chunks
        raise ArtifactError("the rest is damaged")

    url = store.join(store_url, "stream")
    with pytest.raises(ArtifactError, match="the rest is damaged"):
        store.write_stream(url, breaking())
    assert store.read_if_exists(url) is None
    store.write_stream(url, (memoryview(chunk) for chunk in chunks))
    assert store.read(url) == b"".join(chunks)
    store.write_stream(url, [b"another"])
    assert {name: entry.size for name, entry in store.listed(store_url).items()} == {"stream": 7}


def test_a_stamp_changes_with_the_object_and_hidden_ones_have_none(store_url):
    for name in ("a.txt", "b/c.txt", ".hidden", "b/.hidden/d"):
        store.write(f"{store_url}/{name}", b"1")
    before = store.stamps(store_url)
    assert before.keys() == {"a.txt", "b/c.txt"}
    assert store.stamps(store_url) == before
    store.write(f"{store_url}/a.txt", b"2")
    after = store.stamps(store_url)
    assert {name for name in after if after[name] != before[name]} == {"a.txt"}


def test_links_to_folders_are_followed_once(tmp_path):
    (tmp_path / "real").mkdir()
    (tmp_path / "real" / "a.txt").write_bytes(b"1")
    (tmp_path / "real" / "loop").symlink_to(tmp_path)
    (tmp_path / "linked").symlink_to(tmp_path / "real")
    assert store.stamps(str(tmp_path)).keys() == {"real/a.txt", "linked/a.txt"}
    with pytest.raises(FileNotFoundError):
        store.stamps(str(tmp_path / "away"))


def test_objects_that_are_read_ahead_come_in_order_though_a_later_one_is_there_first():
    last_is_there = threading.Event()

    def read(number: int) -> int:
        if number == 0:
            assert last_is_there.wait(60)
        if number == store.AT_ONCE - 1:
            last_is_there.set()
        return 10 * number

    assert list(store.ahead(range(9), read)) == [(number, 10 * number) for number in range(9)]


def test_no_more_is_read_ahead_than_is_allowed():
    read: list[int] = []
    for number, _ in store.ahead(iter(range(20)), lambda number: read.append(number)):
        # The caller works on one, and after it so many may be there.
        assert max(read) <= number + store.AT_ONCE
    assert sorted(read) == [*range(20)]


def test_an_error_of_reading_ahead_is_raised_in_its_turn_and_ends_the_threads():
    def read(number: int) -> int:
        if number >= 2:
            raise ArtifactError(f"{number} is damaged")
        return number

    threads = threading.active_count()
    coming = store.ahead(range(9), read)
    assert [next(coming), next(coming)] == [(0, 0), (1, 1)]
    with pytest.raises(ArtifactError, match=r"^2 is damaged$"):
        next(coming)
    assert threading.active_count() == threads


def test_reading_ahead_ends_with_its_reader():
    threads, read = threading.active_count(), list[int]()
    coming = store.ahead(range(1000), lambda number: read.append(number))
    assert next(coming) == (0, None)
    coming.close()
    assert threading.active_count() == threads
    assert len(read) <= 1 + store.AT_ONCE


def test_an_object_that_no_other_try_can_read_is_damage(tmp_path):
    (tmp_path / "file").write_bytes(b"no folder")
    (tmp_path / "loop").symlink_to("loop")
    (tmp_path / "folder").mkdir()
    for name in ("file/object", "loop", "folder"):
        with pytest.raises(UnreadableError, match=f"cannot read .*{name}"):
            store.read(str(tmp_path / name))
    for name in ("file/object", "loop/object"):
        with pytest.raises(UnreadableError, match=f"cannot look up .*{name}"):
            store.size(str(tmp_path / name))
    with pytest.raises(ConfigError, match="no store that can be read"):
        store.check_readable(str(tmp_path / "file"))


def test_a_folder_without_permission_is_damage_for_readers_and_a_wrong_place_for_writers():
    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o777)
        store.write(f"{folder}/run/object", b"1")
        os.chmod(f"{folder}/run", 0)
        with another_user():
            with pytest.raises(UnreadableError, match=r"cannot read .*Permission denied"):
                store.read(f"{folder}/run/object")
            with pytest.raises(UnreadableError, match=r"cannot list .*Permission denied"):
                store.names(f"{folder}/run")
            with pytest.raises(ConfigError, match=r"cannot write .*Permission denied"):
                store.write(f"{folder}/run/other", b"1")
        os.chmod(f"{folder}/run", 0o755)


@contextmanager
def another_user() -> Iterator[None]:
    """Give up the rights of root for a while: root may read everything."""
    if os.geteuid() != 0:
        yield
        return
    os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(0)
