"""What wandb hears of runs whose artifacts are made by hand."""

import importlib
import importlib.util
import sys
from pathlib import Path
from threading import Event
from types import SimpleNamespace
from typing import Any, cast

import pytest

from flows.session import loop
from flows.watching.tracking import Tracker
from tests.flows.by_hand import validated
from tests.flows.tracked import Killed, Waves, go, go_until, logging_to, rows, stored
from tests.hand_made import planned


class StandIn:
    """Wandb with a server: keeps rows by position, as a run that goes on finds them. ``broken`` names what fails."""

    def __init__(self, broken: str = "") -> None:
        self.broken = broken
        self.rows: dict[int, dict[str, Any]] = {}
        self.inits: list[dict[str, Any]] = []
        self.logged: list[int] = []
        self.exit_codes: list[int] = []
        self.starting_step = 0
        self.answers = Event()
        self.answers.set()

    Settings = SimpleNamespace

    def Image(self, picture: Any, caption: str) -> tuple[Any, str]:  # noqa: N802
        """A picture, as its size, and its words."""
        return picture.size, caption

    def Video(self, path: str, caption: str, format: str) -> tuple[bytes, str]:  # noqa: N802
        """A video, as its bytes while its file is there, and its words."""
        return Path(path).read_bytes(), f"{format}: {caption}"

    def _fail(self, where: str) -> None:
        if where == self.broken:
            raise ConnectionResetError("the service is gone")

    def setup(self, settings: Any) -> None:
        """Nothing to do."""

    def init(self, **options: Any) -> "StandIn":
        """The one run."""
        assert self.answers.wait(60)
        self._fail("init")
        self.inits.append(options)
        self.starting_step = max(self.rows, default=-1) + 1
        return self

    def define_metric(self, name: str, step_metric: str | None = None) -> None:
        """Nothing to do."""

    def log(self, row: dict[str, Any], step: int, commit: bool) -> None:
        """Keep a row."""
        self._fail("log")
        assert commit
        # What is not after the last one is dropped, and nobody is told.
        assert step > max(self.rows, default=-1)
        self.rows[step] = row
        self.logged.append(step)

    def finish(self, exit_code: int) -> None:
        """The run is over."""
        self._fail("finish")
        self.exit_codes.append(exit_code)


@pytest.fixture
def wandb_stand_in(monkeypatch: pytest.MonkeyPatch):
    """Called, it puts a stand-in where wandb would be."""

    def put(broken: str = "") -> StandIn:
        stand_in = StandIn(broken)
        monkeypatch.setitem(sys.modules, "wandb", cast("Any", stand_in))
        return stand_in

    return put


def test_wandb_gets_every_number_once_though_the_run_was_killed(recipe, tmp_path, wandb_stand_in):
    stand_in = wandb_stand_in()
    run = planned(logging_to(recipe, "wandb"), tmp_path, run_id="hand")
    go_until(run, "iteration-0001/update+fragment")
    go(run)
    assert stand_in.logged == sorted(set(stand_in.logged))
    numbers = [{k: v for k, v in row.items() if k != "stage" and v is not None} for row in rows(run)]
    assert all(any(row.items() <= sent.items() for sent in stand_in.rows.values()) for row in numbers)
    assert stand_in.exit_codes == [0]
    first, second = stand_in.inits
    assert first["id"] == second["id"]
    assert (first["project"], first["name"], first["resume"]) == ("cosmos_rl", "hand", "allow")
    assert "launch" not in first["config"]


def test_wandb_gets_every_number_of_a_stale_run_too(recipe, tmp_path, wandb_stand_in):
    stand_in = wandb_stand_in()
    path = logging_to(lambda *r: recipe(*r, ("num_iterations = 2", "num_iterations = 3\nstaleness = 1")), "wandb")
    run = planned(path, tmp_path, run_id="stale")
    go(run)
    logged = [name for row in stand_in.rows.values() for name in row]
    kept = [name for row in rows(run) for name in row]
    assert sorted(name for name in logged if "/" in name) == sorted(name for name in kept if "/" in name)


def test_wandb_gets_the_fixed_pictures_of_each_judged_version_once(recipe, tmp_path, wandb_stand_in):
    stand_in = wandb_stand_in()
    path = validated(recipe, tmp_path, ("[[rewards]]", '[logging]\nlogger = ["wandb"]\n\n[[rewards]]'))
    run = planned(path, tmp_path, run_id="hand")
    go_until(run, "iteration-0001/rollout")
    go(run)
    shown = [row for row in stand_in.rows.values() if "val/pictures" in row]
    assert [(row["policy_version"], row["step"]) for row in shown] == [(0, 0), (2, 4)]
    for row in shown:
        picture, (video, words) = row["val/pictures"]
        assert (picture, words) == (((16, 16), "a dog (0.5)"), "mp4: a dog (0.5)")
        assert video[4:8] == b"ftyp"


def test_each_run_of_each_store_has_its_own_wandb_run(recipe, tmp_path, wandb_stand_in):
    stand_in = wandb_stand_in()
    for folder, run_id in (("a", "one"), ("a", "two"), ("b", "one")):
        with Tracker(planned(logging_to(recipe, "wandb"), tmp_path / folder, run_id=run_id), [].append):
            pass
    assert len({options["id"] for options in stand_in.inits}) == 3


def test_wandb_goes_on_past_an_earlier_end_that_was_evaluated(recipe, tmp_path, wandb_stand_in):
    stand_in = wandb_stand_in()
    path = validated(recipe, tmp_path, ("[[rewards]]", '[logging]\nlogger = ["wandb"]\n\n[[rewards]]'))
    run = planned(path, tmp_path, run_id="hand")
    go(run)
    before = set(stand_in.rows)
    go(planned(path, tmp_path, run_id="hand", iterations=3))
    after = [stand_in.rows[position] for position in sorted(set(stand_in.rows) - before)]
    assert [(row.get("iteration"), row.get("policy_version"), row["step"]) for row in after] == [
        (2, None, 4), (2, None, 4), (2, None, 5), (2, None, 6), (None, 3, 6), (None, 3, 6),
    ]  # fmt: skip


def test_wandb_hears_that_a_run_failed(recipe, tmp_path, wandb_stand_in):
    stand_in = wandb_stand_in()
    run = planned(logging_to(recipe, "wandb"), tmp_path, run_id="hand")
    with pytest.raises(Killed), Tracker(run, [].append) as tracker:
        loop.make(run, Waves(tracker, "iteration-0001/rollout").launch)
    assert stand_in.exit_codes == [1]
    assert [row["iteration"] for row in rows(run)] == [0] * 5


@pytest.mark.parametrize("broken", ["init", "log", "finish"])
def test_a_broken_wandb_is_one_warning(recipe, tmp_path, wandb_stand_in, broken):
    wandb_stand_in(broken)
    notes: list[str] = []
    run = planned(logging_to(recipe, "wandb"), tmp_path, run_id="hand")
    go(run, notes)
    assert notes == ["warning: nothing more goes to wandb (ConnectionResetError: the service is gone)"]
    plain = planned(recipe(), tmp_path, run_id="plain")
    go(plain)
    assert stored(run) == stored(plain)


def test_no_stage_waits_for_wandb(recipe, tmp_path, wandb_stand_in):
    stand_in = wandb_stand_in()
    stand_in.answers.clear()
    run = planned(logging_to(recipe, "wandb"), tmp_path, run_id="hand")
    with Tracker(run, [].append) as tracker:
        loop.make(run, Waves(tracker).launch)
        assert stand_in.rows == {}
        stand_in.answers.set()
    assert sum(len([key for key in row if "/" in key]) for row in stand_in.rows.values()) == sum(
        len([key for key in row if "/" in key]) for row in rows(run)
    )


def test_wandb_that_is_not_installed_is_one_warning(recipe, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", cast("Any", None))
    notes: list[str] = []
    go(planned(logging_to(recipe, "wandb"), tmp_path, run_id="hand"), notes)
    assert len(notes) == 1
    assert notes[0].endswith("; install the extra `tracking`")


@pytest.mark.processes
@pytest.mark.skipif(importlib.util.find_spec("wandb") is None, reason="wandb (the extra `tracking`) is not installed")
def test_wandb_offline_keeps_the_numbers_in_a_folder(recipe, tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_DIR", str(tmp_path))
    monkeypatch.setenv("WANDB_SILENT", "true")
    notes: list[str] = []
    run = planned(logging_to(recipe, "wandb"), tmp_path, run_id="hand")
    wandb: Any = importlib.import_module("wandb")
    try:
        with pytest.raises(Killed), Tracker(run, notes.append) as tracker:
            loop.make(run, Waves(tracker, "iteration-0001/update+fragment").launch)
        go(run, notes)
    finally:
        wandb.teardown()
    assert notes == []
    kept = [path.read_bytes() for path in tmp_path.glob("wandb/offline-run-*/run-*.wandb")]
    assert len(kept) == 2
    names = {key for row in rows(run) for key in row if "/" in key}
    assert "train/loss_avg" in names
    assert {name for name in names if name.encode() not in kept[0] or name.encode() not in kept[1]} == set()
