"""Files at http URLs: stamps, copies, what is tried again and what is not."""

import io
from collections.abc import Iterator

import pytest

from cosmos_rl_core.errors import ConfigError, UnavailableError
from cosmos_rl_core.storage import http
from tests.file_server import FileServer, serving

DATA = bytes(range(256)) * 100


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[FileServer]:
    monkeypatch.setattr(http, "FIRST_DELAY_S", 0.001)
    with serving() as server:
        server.files["/a.tar"] = DATA
        yield server


def copied(server: FileServer) -> bytes:
    file = io.BytesIO()
    http.copy(f"{server.url}/a.tar", file)
    return file.getvalue()


def test_a_stamp_changes_with_the_file_and_reads_none_of_it(server: FileServer):
    first = http.stamp(f"{server.url}/a.tar")
    assert first.startswith(f"{len(DATA)} ")
    assert http.stamp(f"{server.url}/a.tar") == first
    server.files["/a.tar"] = DATA[::-1]
    assert http.stamp(f"{server.url}/a.tar") != first
    assert {method for method, _, _ in server.asked} == {"HEAD"}


def test_a_copy_goes_on_where_it_was_interrupted(server: FileServer):
    server.cuts = [1000, 500]
    assert copied(server) == DATA
    assert [wanted for _, _, wanted in server.asked] == ["", "bytes=1000-", "bytes=1500-"]


def test_a_busy_server_is_asked_again_from_the_same_place(server: FileServer):
    server.cuts = [1000]
    server.statuses = [200, 503, 429]
    assert copied(server) == DATA
    assert [wanted for _, _, wanted in server.asked] == ["", *["bytes=1000-"] * 3]


@pytest.mark.parametrize("setting", ["tagged", "ranges"])
def test_a_copy_begins_again_if_the_rest_may_be_of_another_file(server: FileServer, setting: str):
    setattr(server, setting, False)
    server.cuts = [1000]
    assert copied(server) == DATA
    assert len(server.asked) == 2


def test_a_file_that_changes_meanwhile_is_copied_anew(server: FileServer, monkeypatch: pytest.MonkeyPatch):
    server.cuts = [1000]
    served = server.asked

    class Changing(list[tuple[str, str, str]]):
        def append(self, asked: tuple[str, str, str]) -> None:
            super().append(asked)
            if len(self) == 2:
                server.files["/a.tar"] = DATA[::-1]

    server.asked = Changing(served)
    assert copied(server) == DATA[::-1]


def test_a_server_that_stays_busy_is_unavailable(server: FileServer, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(http, "RETRY_FOR_S", 0.0)
    server.statuses = [503]
    with pytest.raises(UnavailableError, match=r"a\.tar: the server answers 503") as raised:
        http.stamp(f"{server.url}/a.tar?signature=secret")
    assert raised.value.retryable
    assert "secret" not in str(raised.value)


def test_a_server_that_is_not_there_is_unavailable(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(http, "RETRY_FOR_S", 0.0)
    with serving() as server:
        url = server.url
    with pytest.raises(UnavailableError, match="cannot read http://127"):
        http.stamp(f"{url}/a.tar")


def test_a_missing_file_and_a_missing_permission_are_mistakes_of_people(server: FileServer):
    with pytest.raises(FileNotFoundError, match=r"b\.tar: the server answers 404"):
        http.stamp(f"{server.url}/b.tar")
    server.statuses = [403]
    with pytest.raises(ConfigError, match=r"http://127\.0\.0\.1:\d+/a\.tar: the server answers 403 to HEAD"):
        http.stamp(f"{server.url}/a.tar?signature=secret")


def test_a_server_without_lengths_and_tags_or_times_is_refused(server: FileServer):
    server.tagged = False
    with pytest.raises(ConfigError, match="the server must state Content-Length, and ETag or Last-Modified"):
        http.stamp(f"{server.url}/a.tar")
