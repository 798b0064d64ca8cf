"""The server of reports: all runs of a store on one page, and the report of each, read-only."""

import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from starlette.testclient import TestClient

from cosmos_rl_core.errors import ConfigError
from flows.defaults import REPORTS_VARIABLE, served_report
from flows.library import open_run
from flows.planning.run import Run
from flows.reporting.report import page_now
from flows.reporting.serving import app_of, serve
from flows.showing import contents
from tests.flows.by_hand import planned_run
from tests.flows.tracked import go


@pytest.fixture
def runs(recipe, tmp_path: Path) -> Run:
    """A finished run, in whose store another one is damaged."""
    run = planned_run(recipe, tmp_path)
    go(run)
    root = Path(run.store_url, "runs")
    shutil.copytree(root / "hand", root / "broken")
    (root / "broken" / "plan.json").write_bytes(b"{}")
    return run


@pytest.fixture
def client(runs: Run) -> Iterator[TestClient]:
    with TestClient(app_of(runs.store_url, "127.0.0.1"), base_url="http://127.0.0.1") as found:
        yield found


def test_the_list_has_every_run_also_a_damaged_one(client: TestClient):
    page = client.get("/").text
    assert re.findall(r'href="/runs/([^/]+)/report/index.html"', page) == ["broken", "hand"]
    assert re.search(r'<span class="state damaged">damaged</span>.*plan.json', page, re.DOTALL)
    assert re.search(r'<span class="state \w+">\w+</span></td><td>nft</td><td>2 of 2</td>', page)
    assert '<meta http-equiv="refresh" content="15">' in page


def test_a_report_is_the_page_of_the_run_as_it_is_now(client: TestClient, runs: Run):
    without = r"Written [^<]* UTC"
    served = client.get("/runs/hand").text
    assert re.sub(without, "", served) == re.sub(without, "", page_now(open_run("hand", runs.store_url)).decode())
    assert "finished" in served


def test_files_that_a_report_links_are_served(client: TestClient, runs: Run):
    assert client.get("/runs/hand/plan.json").content == Path(runs.url, "plan.json").read_bytes()
    lines = client.get("/runs/hand/metrics.jsonl")
    assert (lines.content, lines.headers["content-type"]) == (
        Path(runs.url, "metrics.jsonl").read_bytes(),
        "text/plain; charset=utf-8",
    )


PARTS = {
    "bytes=0-3": (206, slice(0, 4)),
    "bytes=2-": (206, slice(2, None)),
    "bytes=-5": (206, slice(-5, None)),
    "bytes=-99999999": (206, slice(0, None)),
    "bytes=4-99999999": (206, slice(4, None)),
    "bytes=0-1,4-5": (200, slice(0, None)),
    "bytes=5-2": (200, slice(0, None)),
    "lines=0-3": (200, slice(0, None)),
}
"""Status and bytes that answer a header ``Range``."""


def test_a_player_of_videos_gets_the_range_that_it_asks_for(client: TestClient, runs: Run):
    data = Path(runs.url, "plan.json").read_bytes()
    for header, (status, part) in PARTS.items():
        found = client.get("/runs/hand/plan.json", headers={"range": header})
        assert (header, found.status_code, found.content) == (header, status, data[part])
        assert found.headers["content-length"] == str(len(data[part]))
        begin = len(data) - len(data[part]) if part.stop is None else part.start
        where = f"bytes {begin}-{begin + len(data[part]) - 1}/{len(data)}" if status == 206 else None
        assert found.headers.get("content-range") == where


@pytest.mark.parametrize("header", ["bytes=99999999-", "bytes=-0"])
def test_a_range_outside_of_the_file_is_refused_with_its_size(client: TestClient, runs: Run, header: str):
    found = client.get("/runs/hand/plan.json", headers={"range": header})
    assert found.status_code == 416
    assert found.headers["content-range"] == f"bytes */{Path(runs.url, 'plan.json').stat().st_size}"


REFUSED = {
    "/runs/other/report/index.html": 404,
    "/runs/broken/report/index.html": 500,
    "/runs/hand/nothing.json": 404,
    "/runs/hand/iterations": 404,
    "/runs/hand/%2e%2e/broken/plan.json": 404,
    "/runs/%2e%2e/plan.json": 404,
    "/runs/hand//etc/hostname": 404,
}


def test_missing_files_and_files_outside_of_runs_are_refused(client: TestClient):
    assert {address: client.get(address).status_code for address in REFUSED} == REFUSED


def test_nothing_can_be_written(client: TestClient, runs: Run):
    before = Path(runs.url, "plan.json").read_bytes()
    for method in ("POST", "PUT", "DELETE", "PATCH"):
        assert client.request(method, "/runs/hand/plan.json", content=b"x").status_code == 405
    assert Path(runs.url, "plan.json").read_bytes() == before


def test_a_server_for_this_machine_answers_no_other_name(client: TestClient, runs: Run):
    other = {"host": "reports.example"}
    assert client.get("/", headers=other).status_code == 400
    with TestClient(app_of(runs.store_url, "0.0.0.0"), base_url="http://reports.example") as public:
        assert public.get("/").status_code == 200


def test_a_port_that_is_taken_is_refused_by_name(runs: Run):
    words = [sys.executable, "-m", "flows", "report", "--serve", "--store", runs.store_url, "--port", "0"]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        try:
            address = server.stdout.readline().rpartition(" at ")[2].strip()
            assert httpx.get(address, timeout=60).status_code == 200
            with pytest.raises(ConfigError, match="--port"):
                serve(runs.store_url, "127.0.0.1", int(address.rpartition(":")[2]), print)
        finally:
            server.terminate()


def test_the_page_of_prefect_links_the_served_report(monkeypatch: pytest.MonkeyPatch):
    assert served_report("hand") == ""
    monkeypatch.setenv(REPORTS_VARIABLE, "http://reports:8090/")
    address = "http://reports:8090/runs/hand/report/index.html"
    assert served_report("hand") == address
    assert contents.report_link("/store/runs/hand/report/index.html", address).startswith(f"[report]({address})")
