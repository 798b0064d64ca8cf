"""What is remembered of large files, and which changes of them are seen."""

import hashlib
import multiprocessing
import os
import time
from pathlib import Path
from typing import Any

import pytest

from cosmos_rl_core.storage import file_digests
from cosmos_rl_core.storage.cache import LOCK, of_user
from cosmos_rl_core.storage.file_digests import SMALLEST_BYTES, Remembered

FALSE = "f" * 64
"""No file's digest: where it is the answer, the file was not read."""


def sha256(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "weights"
    path.write_bytes(bytes(SMALLEST_BYTES))
    return path


@pytest.fixture
def remembered(tmp_path: Path, file: Path) -> Remembered:
    """With a false digest of the file: one that nobody reads again is seen by it."""
    found = Remembered(tmp_path / "digests", settled_s=-1.0)
    assert found.sha256(file) == sha256(file)
    entry = entry_in(tmp_path)
    entry.write_text(entry.read_text().replace(sha256(file), FALSE))
    return found


def entry_in(folder: Path) -> Path:
    (entry,) = (one for one in (folder / "digests").iterdir() if not one.name.endswith(LOCK))
    return entry


def test_a_large_file_that_did_not_change_is_not_read_again(remembered: Remembered, file: Path):
    assert remembered.sha256(file) == FALSE
    link = file.with_name("link")
    link.symlink_to(file)
    assert remembered.sha256(link) == FALSE


def test_a_byte_that_changed_is_noticed_also_where_size_and_time_are_put_back(remembered: Remembered, file: Path):
    before = file.stat()
    time.sleep(0.02)  # A tick of the file system's clock.
    with file.open("r+b") as stream:
        stream.write(b"1")
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))
    after = file.stat()
    assert (after.st_mtime_ns, after.st_size, after.st_ino) == (before.st_mtime_ns, before.st_size, before.st_ino)
    assert remembered.sha256(file) == sha256(file)
    # And is remembered in the place of the last one.
    assert remembered.sha256(file) == sha256(file)


def test_another_file_in_its_place_is_noticed(remembered: Remembered, file: Path):
    other = file.with_name("other")
    other.write_bytes(bytes(SMALLEST_BYTES - 1) + b"1")
    os.utime(other, ns=(file.stat().st_atime_ns, file.stat().st_mtime_ns))
    other.replace(file)
    assert remembered.sha256(file) == sha256(file)


def test_damaged_records_of_digests_are_ignored(remembered: Remembered, file: Path, tmp_path: Path):
    entry = entry_in(tmp_path)
    for damaged in (b"", b"\xff\xfe", b"1 2 3", entry.read_bytes()[5:]):
        entry.write_bytes(damaged)
        assert remembered.sha256(file) == sha256(file)


def digest_in_turn(file: Path, folder: Path, meeting: Any, told: Any) -> None:
    meeting.wait()
    before = read_bytes()
    found = Remembered(folder, settled_s=-1.0).sha256(file)
    told.put((found, read_bytes() - before))


def read_bytes() -> int:
    """Bytes that this process has read."""
    return int(Path("/proc/self/io").read_text().split()[1])


@pytest.mark.processes
def test_one_of_several_processes_that_ask_together_reads_the_file(tmp_path: Path):
    file, size, count = tmp_path / "large", 2**27, 3
    with file.open("wb") as stream:
        stream.truncate(size)
    forks = multiprocessing.get_context("fork")
    meeting, told = forks.Barrier(count), forks.SimpleQueue()
    asking = [
        forks.Process(target=digest_in_turn, args=(file, tmp_path / "digests", meeting, told)) for _ in range(count)
    ]
    for one in asking:
        one.start()
    answers = [told.get() for _ in asking]
    for one in asking:
        one.join()
    assert {found for found, _ in answers} == {sha256(file)}
    assert sorted(read >= size for _, read in answers) == [False, False, True]


def test_small_and_just_changed_files_are_not_remembered(file: Path, tmp_path: Path):
    small = tmp_path / "config.json"
    small.write_text("{}")
    folder = tmp_path / "digests"
    assert Remembered(folder, settled_s=-1.0).sha256(small) == sha256(small)
    assert Remembered(folder).sha256(file) == sha256(file)
    assert not folder.exists()


def test_without_a_place_to_remember_digests_files_are_read_each_time(file: Path, tmp_path: Path):
    (tmp_path / "no folder").write_text("")
    # As a user without a home has it (`HOME=/dev/null`), or without permission to write there.
    for folder in (None, tmp_path / "no folder", tmp_path / "no folder" / "digests"):
        assert Remembered(folder, settled_s=-1.0).sha256(file) == sha256(file)


def test_the_digest_of_files_covers_their_names_and_bytes(file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "a").write_text("1")
    plain = f'[["a","{sha256(tmp_path / "a")}"],["w","{sha256(file)}"]]'.encode()
    assert file_digests.files_digest({"w": file, "a": tmp_path / "a"}) == hashlib.sha256(plain).hexdigest()


def test_the_users_cache_is_where_the_environment_says():
    assert of_user({"XDG_CACHE_HOME": "/x", "HOME": "/h"}) == Path("/x/cosmos-rl-flows")
    assert of_user({"HOME": "/h"}) == Path("/h/.cache/cosmos-rl-flows")
    assert of_user({}) is None
