"""The deletion of a run: what is asked, what is refused, and that nothing is left."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from flows.cli import app as cli
from flows.library import open_run
from flows.planning.run import Run
from tests.flows.by_hand import make_all, whole_run
from tests.flows.cli.test_app import invoke
from tests.hand_made import planned


@pytest.fixture
def run(recipe, tmp_path: Path) -> Run:
    return whole_run(recipe, tmp_path)


def test_a_deletion_asks_first_says_its_bytes_and_leaves_nothing(run):
    folder = Path(run.url)
    size = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    refused = invoke("delete", "hand", "--store", run.store_url)
    assert (refused.exit_code, "add --yes" in refused.stderr) == (64, True)
    shown = json.loads(invoke("delete", "hand", "--dry-run", "--json", "--store", run.store_url).stdout)
    assert (shown["bytes"], shown["deleted"]) == (size, False)
    assert folder.is_dir()
    ended = invoke("delete", "hand", "--yes", "--store", run.store_url)
    assert (ended.exit_code, ended.stdout.startswith(f"deleted {folder}: ")) == (0, True)
    assert not folder.exists()
    assert "has no runs" in invoke("runs", "--store", run.store_url).stdout
    assert invoke("delete", "hand", "--yes", "--store", run.store_url).exit_code == 64


def test_a_run_at_work_is_not_deleted(run):
    with run.lease():
        ended = invoke("delete", "hand", "--yes", "--store", run.store_url)
    assert (ended.exit_code, "another process works on" in ended.stderr) == (75, True)
    assert open_run("hand", run.store_url).now().current == 23


def test_a_run_that_another_run_reads_is_not_deleted(run, recipe, tmp_path):
    planned(recipe(), tmp_path, run_id="later", overrides=("policy.init_from=hand@0",))
    ended = invoke("delete", "hand", "--yes", "--store", run.store_url)
    assert (ended.exit_code, "later read artifacts of hand" in ended.stderr) == (64, True)
    assert invoke("delete", "later", "--yes", "--store", run.store_url).exit_code == 0
    assert invoke("delete", "hand", "--yes", "--store", run.store_url).exit_code == 0


@pytest.mark.parametrize("damage", [b"{", None])
def test_a_damaged_run_can_be_deleted(run, damage):
    plan = Path(run.url) / "plan.json"
    plan.unlink() if damage is None else plan.write_bytes(damage)
    assert invoke("delete", "hand", "--yes", "--store", run.store_url).exit_code == 0
    assert not Path(run.url).exists()


def test_a_deletion_that_was_killed_is_finished_by_the_next_one(run, recipe, tmp_path):
    make_all(planned(recipe(), tmp_path, run_id="other"))
    (Path(run.url) / "plan.json").unlink()
    listed = CliRunner().invoke(cli.app, ["runs", "--store", run.store_url])
    assert "hand is damaged: " in listed.stdout
    assert invoke("delete", "hand", "--yes", "--store", run.store_url).exit_code == 0
    assert invoke("runs", "--store", run.store_url).exit_code == 0
