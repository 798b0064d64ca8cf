"""Prompt sets by name: downloaded once, checked on every read, never taken if they are not whole."""

import json
import re
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from cosmos_rl_core.canonical import sha256
from cosmos_rl_core.datasets import _downloads, prompt_set
from cosmos_rl_core.datasets._base import prompt_id
from cosmos_rl_core.datasets._downloads import File
from cosmos_rl_core.errors import ConfigError, UnavailableError
from cosmos_rl_core.storage import http
from cosmos_rl_core.storage.cache import of_cosmos_rl

LINES = "\n".join(f"a cat with {number} legs" for number in range(20))
GENEVAL = {"tag": "counting", "include": [{"class": "cat", "count": 2}], "prompt": "two cats"}


class Site(ThreadingHTTPServer):
    """Files by path; the first answers of a path may be others."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.files: dict[str, bytes] = {}
        self.first: list[tuple[int, bytes, dict[str, str]]] = []
        """Status, body and headers of the first answers. A Content-Length may be wrong."""
        self.asked: list[str] = []
        self.url = f"http://127.0.0.1:{self.server_port}/mirror"


class Handler(BaseHTTPRequestHandler):
    server: Site  # pyright: ignore[reportIncompatibleVariableOverride]

    def do_GET(self) -> None:
        self.server.asked.append(self.path)
        body = self.server.files.get(self.path.removeprefix("/mirror/"))
        status, headers = (404, {}) if body is None else (200, dict[str, str]())
        if self.server.first:
            status, body, headers = self.server.first.pop(0)
        self.send_response(status)
        for name, value in ({"Content-Length": str(len(body or b""))} | headers).items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body or b"")

    def log_message(self, format: str, *args: Any) -> None:
        pass


@pytest.fixture
def site() -> Iterator[Site]:
    with Site() as served:
        thread = threading.Thread(target=served.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield served
        served.shutdown()
        thread.join()


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("COSMOS_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache" / "diffusion_nft"


def texts(name: str, **settings: Any) -> list[str]:
    options = prompt_set.Options.model_validate({"name": "prompt_set", "set": name} | settings)
    return [prompt.text for prompt in prompt_set.prompts(options)]


def test_prompt_sets_are_of_one_commit_if_it_is_known(folder: Path, monkeypatch: pytest.MonkeyPatch):
    asked: list[str] = []

    def read(url: str, *_: Any) -> bytes:
        asked.append(url)
        raise FileNotFoundError("404")

    monkeypatch.setattr(http, "read", read)
    for name in prompt_set.SETS:
        with pytest.raises(ConfigError, match="put the file at"):
            texts(name)
    # A branch may move between two downloads.
    of_branches = {url for url in asked if not re.search("/[0-9a-f]{40}/", url)}
    assert of_branches == {f"{prompt_set.DANCE_GRPO}/video_prompts.txt"}
    assert len(asked) == len(prompt_set.SETS)


def test_a_set_is_downloaded_once_with_its_digest_next_to_it(site: Site, folder: Path):
    site.files["train.txt"] = LINES.encode()
    assert texts("ocr", base_url=site.url) == LINES.split("\n")
    assert texts("ocr", base_url=f"{site.url}/") == LINES.split("\n")
    assert site.asked == ["/mirror/train.txt"]
    names = sorted(path.name for path in (folder / "ocr").iterdir())
    assert names == ["train.txt", "train.txt.sha256"]
    assert (folder / "ocr/train.txt.sha256").read_text() == f"{sha256(LINES.encode())}  train.txt\n"


def test_geneval_has_the_objects_of_its_prompts_as_metadata(site: Site, folder: Path):
    site.files["train_metadata.jsonl"] = json.dumps(GENEVAL).encode()
    options = prompt_set.Options(set="geneval", base_url=site.url)
    (prompt,) = prompt_set.prompts(options)
    assert (prompt.id, prompt.text) == (prompt_id("two cats"), "two cats")
    assert prompt.metadata == {name: GENEVAL[name] for name in ("tag", "include")}
    assert (folder / "geneval/train_metadata.jsonl").is_file()


def test_both_splits_of_the_videos_are_one_file_upstream(site: Site, folder: Path):
    site.files["video_prompts.txt"] = b"a\n" * 49_998
    for split in ("train", "test"):
        says = rf"it has 49999 lines, expected at least 50000; .* put the file at {folder}/dance_grpo_t2v/{split}\.txt"
        with pytest.raises(ConfigError, match=says):
            texts("dance_grpo_t2v", split=split, base_url=site.url)
    assert site.asked == ["/mirror/video_prompts.txt"] * 2


def test_files_of_cosmos_rl_and_of_a_folder_are_read_without_a_network(folder: Path, tmp_path: Path):
    for place in (folder / "ocr", tmp_path / "mine"):
        place.mkdir(parents=True)
        (place / "train.txt").write_text('a sign "A"\n', encoding="utf-8")
    assert texts("ocr", base_url="http://127.0.0.1:9") == ['a sign "A"']
    assert texts("ocr", local_dir=str(tmp_path / "mine")) == ['a sign "A"']
    with pytest.raises(ConfigError, match=r"no file at .*mine/test\.txt"):
        texts("ocr", local_dir=str(tmp_path / "mine"), split="test")
    assert not (folder / "ocr/train.txt.sha256").exists()


def test_a_file_of_the_wrong_size_is_refused(site: Site, folder: Path):
    (folder / "pickscore").mkdir(parents=True)
    file = folder / "pickscore/test.txt"
    file.write_bytes(b"")
    with pytest.raises(ConfigError, match=r"is empty, as cosmos-rl's wget leaves .* delete it to download"):
        texts("pickscore", split="test", base_url=site.url)
    file.write_text("a\n" * 2_046, encoding="utf-8")
    with pytest.raises(ConfigError, match=r"test\.txt: it has 2047 lines, expected at least 2048; delete it"):
        texts("pickscore", split="test", base_url=site.url)
    # The last line may lack its end.
    file.write_text("a\n" * 2_047 + "b", encoding="utf-8")
    assert texts("pickscore", split="test") == ["a", "b"]
    assert site.asked == []


@pytest.mark.parametrize(
    ("body", "headers", "says"),
    [
        (b"", {}, "it is empty"),
        (b"a\n" * 2_000, {}, "it has 2001 lines, expected at least 2048"),
        (LINES.encode(), {"Content-Type": "text/html; charset=utf-8"}, "a page"),
    ],
)
def test_a_download_that_is_not_the_set_leaves_nothing(
    site: Site, folder: Path, body: bytes, headers: dict[str, str], says: str
):
    site.first = [(200, body, headers)]
    with pytest.raises(ConfigError, match=rf"{says}.*; without a network, put the file at .*pickscore/test\.txt"):
        texts("pickscore", split="test", base_url=site.url)
    assert not folder.exists()


def test_a_missing_file_is_asked_for_once(site: Site, folder: Path):
    with pytest.raises(ConfigError, match=r"the server answers 404; without a network"):
        texts("ocr", base_url=site.url)
    assert len(site.asked) == 1
    for url in ("ftp://127.0.0.1", "http://[::1", "nothing"):
        with pytest.raises(ConfigError, match="cannot be downloaded"):
            texts("ocr", base_url=url)


def test_failed_requests_are_repeated(site: Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(http, "FIRST_DELAY_S", 0.001)
    whole, short = LINES.encode(), LINES.encode()[:100]
    site.files["f"] = whole
    site.first = [(503, b"", {}), (200, short, {"Content-Length": str(len(whole))}), (429, b"", {})]
    file = File(tmp_path / "f", f"{site.url}/f", lines=20)
    assert _downloads.read(file) == whole
    assert len(site.asked) == 4


def test_a_body_that_stays_incomplete_is_never_taken(site: Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(http, "FIRST_DELAY_S", 0.001)
    monkeypatch.setattr(_downloads, "RETRY_FOR_S", 0.3)
    site.first = [(200, b"a\nb\n", {"Content-Length": "5"})] * 100
    with pytest.raises(UnavailableError, match=r"cannot be downloaded: .*without a network, put the file at"):
        _downloads.read(File(tmp_path / "f", f"{site.url}/f"))
    assert len(site.asked) > 1
    assert [*tmp_path.iterdir()] == []


def test_without_a_network_the_error_says_where_the_file_belongs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(_downloads, "RETRY_FOR_S", 0.0)
    with pytest.raises(UnavailableError, match=rf"refused.*put the file at {tmp_path}/f"):
        _downloads.read(File(tmp_path / "f", "http://127.0.0.1:9/f"))


def test_a_file_that_changed_after_its_download_is_refused(site: Site, folder: Path):
    site.files["train.txt"] = LINES.encode()
    texts("ocr", base_url=site.url)
    file = folder / "ocr/train.txt"
    file.write_text(LINES.replace("cat", "dog"), encoding="utf-8")
    with pytest.raises(ConfigError, match=r"has changed since it was downloaded: sha256 .*, expected"):
        texts("ocr", base_url=site.url)
    for damaged in (b"", b"\xff", b"sha256"):
        (folder / "ocr/train.txt.sha256").write_bytes(damaged)
        with pytest.raises(ConfigError, match="delete"):
            texts("ocr", base_url=site.url)
    (folder / "ocr/train.txt.sha256").unlink()
    assert "dog" in texts("ocr", base_url=site.url)[0]


def test_a_pinned_digest_refuses_other_bytes_before_they_are_stored(site: Site, folder: Path):
    site.files["train.txt"] = b"a\nb\n"
    right = sha256(b"a\nb\n")
    with pytest.raises(ConfigError, match=f"its sha256 is {right}, expected {'0' * 64}"):
        texts("ocr", base_url=site.url, sha256="0" * 64)
    assert not folder.exists()
    assert texts("ocr", base_url=site.url, sha256=right) == ["a", "b"]
    with pytest.raises(ConfigError, match="its sha256 is"):
        texts("ocr", base_url=site.url, sha256="1" * 64)


def test_the_path_of_a_set_is_no_part_of_a_runs_identity():
    known, mirror = prompt_set.Options(set="ocr"), prompt_set.Options(set="ocr", base_url="http://x", sha256="0" * 64)
    assert known.identity() == mirror.identity() == prompt_set.Options(set="ocr", local_dir="x").identity()


def test_settings_that_contradict_each_other_and_unknown_sets_are_named():
    with pytest.raises(ValidationError, match="expected one of the two"):
        texts("ocr", base_url="http://x", local_dir="x")
    with pytest.raises(ValidationError, match="'pickscore', 'ocr', 'geneval' or 'dance_grpo_t2v'"):
        texts("pikscore")
    with pytest.raises(ValidationError, match="sha256"):
        texts("ocr", sha256="0" * 63)


def test_the_folder_of_downloads_is_cosmos_rls():
    assert of_cosmos_rl({"COSMOS_CACHE_DIR": "/c", "HOME": "/h"}) == Path("/c")
    assert of_cosmos_rl({"HOME": "/h"}) == Path("/h/.cache/cosmos_rl")
    assert of_cosmos_rl({}) is None


def test_a_set_that_may_change_says_so_unless_its_bytes_are_held(tmp_path: Path):
    def follows(name: str, **settings: Any) -> tuple[str, ...]:
        return prompt_set.Options.model_validate({"name": "prompt_set", "set": name} | settings).follows

    (said,) = follows("dance_grpo_t2v")
    assert "the branch main, which may change; state its sha256" in said
    for settings in ({"sha256": "0" * 64}, {"local_dir": str(tmp_path)}, {"base_url": "https://a/b"}):
        assert follows("dance_grpo_t2v", **settings) == ()
    assert follows("ocr") == follows("pickscore") == follows("geneval") == ()
