"""A run that cannot be read: it is listed as damaged, the others are shown, and commands about these go on."""

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from cosmos_rl_core.storage import store
from flows.auditing.flow import audit
from flows.cli import app as cli
from tests.flows.by_hand import make_all, whole_run
from tests.hand_made import planned


def replaced_by_a_file(*names: str) -> Callable[[Path], None]:
    def damage(run: Path) -> None:
        path = run.joinpath(*names)
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)
        path.write_text("x", encoding="utf-8")

    return damage


def replaced_by_a_folder(*names: str) -> Callable[[Path], None]:
    def damage(run: Path) -> None:
        path = run.joinpath(*names)
        path.unlink(missing_ok=True)
        path.mkdir(parents=True)

    return damage


def a_link_to_itself(run: Path) -> None:
    (run / "iterations" / "0005").symlink_to("0005")


DAMAGES: dict[str, Callable[[Path], None]] = {
    "a file after the iterations": replaced_by_a_file("iterations", "0005"),
    "a link to itself": a_link_to_itself,
    "a file for an iteration": replaced_by_a_file("iterations", "0001"),
    "a file for all iterations": replaced_by_a_file("iterations"),
    "a file for the run": replaced_by_a_file(),
    "a file for the lease": replaced_by_a_file("lease"),
    "a folder for the plan": replaced_by_a_folder("plan.json"),
    "a folder for a manifest": replaced_by_a_folder("iterations", "0001", "update", "manifest.1.json"),
    "a folder for the progress": replaced_by_a_folder("progress.json"),
    "no JSON for a plan": lambda run: store.write(f"{run}/plan.json", b"{"),
    "no plan": lambda run: (run / "plan.json").unlink(),
}


class Store:
    """A store with a whole run, ``hand``, and with ``bad``, which gets one damage after the other."""

    def __init__(self, recipe, tmp_path: Path) -> None:
        self.url = whole_run(recipe, tmp_path).store_url
        self._bad, self._kept = Path(self.url) / "runs" / "bad", tmp_path / "kept"
        make_all(planned(recipe(), tmp_path, run_id="bad"))
        shutil.copytree(self._bad, self._kept)

    def damaged(self, *names: str) -> Iterator[str]:
        """Do the damages, all or those that are named."""
        for name in names or DAMAGES:
            if self._bad.is_dir():
                shutil.rmtree(self._bad)
            self._bad.unlink(missing_ok=True)
            shutil.copytree(self._kept, self._bad)
            DAMAGES[name](self._bad)
            yield name

    def invoke(self, *words: str) -> tuple[int, str, str]:
        """Exit code, stdout and stderr of a command, which ends without a traceback."""
        ended = CliRunner().invoke(cli.app, [*words, "--store", self.url])
        assert ended.exception is None or isinstance(ended.exception, SystemExit), (words, ended.exception)
        return ended.exit_code, ended.stdout, ended.stderr


@pytest.fixture
def runs(recipe, tmp_path) -> Store:
    return Store(recipe, tmp_path)


def test_an_unreadable_run_is_listed_as_damaged_next_to_all_others(runs, recipe):
    for name in runs.damaged():
        for words in (["runs"], ["status"]):
            code, shown, _ = runs.invoke(*words)
            lines = [line.split() for line in shown.splitlines()]
            assert [line[:3] for line in lines[1:3]] == [["bad", "damaged"], ["hand", "nft", "idle"]], (name, shown)
            assert "bad is damaged: " in shown, name
            assert code == 65, name
        code, found, _ = runs.invoke("runs", "hand", "bad", "--json")
        assert (code, [run["state"] for run in json.loads(found)]) == (65, ["idle", "damaged"]), name
        for words in (["status", "hand"], ["plan", recipe()]):
            assert runs.invoke(*words)[0] == 0, (name, words)


def test_commands_on_an_unreadable_run_exit_with_the_code_for_wrong_data(runs):
    beyond = {"a file after the iterations", "a link to itself", "a file for the lease", "a folder for the progress"}
    for name in runs.damaged():
        others = () if name in beyond else ("gc bad --dry-run", "diff hand bad", "report bad")
        for words in ("status bad", "status bad --json", "audit bad", *others):
            code, shown, errors = runs.invoke(*words.split())
            assert code == 65, (name, words, shown, errors)
            assert "bad" in shown + errors, (name, words)


def test_the_audit_of_all_runs_goes_on_after_an_unreadable_one(runs):
    for name in runs.damaged("a file for an iteration", "a folder for the plan", "no plan"):
        state: Any = audit.fn(store=runs.url)
        assert state.is_failed(), name
        assert "in 2 runs" in state.message, name
        assert "runs/bad" in state.message, name
