"""The flight check as a flow: a table of all findings, and a failure if one failed."""

from pathlib import Path
from typing import Any

import pytest

from cosmos_rl_core.config.launch import LaunchConfig
from flows import infra
from flows.operations.flight_check import Finding

OK, ABSENT = Finding("store", "ok", "10 commits", 0.5), Finding("rewards", "not set up", "no service", 0.0)
FAILED = Finding("gpus", "failed", "no GPU", 1.0)


@pytest.mark.parametrize(("last", "failed"), [(ABSENT, False), (FAILED, True)])
def test_all_findings_are_shown_and_one_that_failed_fails_the_flow(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, last: Finding, failed: bool
):
    asked, tables = list[Any](), list[Any]()
    profile = tmp_path / "profile.toml"
    profile.write_text("[launch]\nprocesses = 3\n", encoding="utf-8")

    def check(store_url: str, launch: LaunchConfig) -> list[Finding]:
        asked.append((store_url, launch.processes))
        return [OK, last]

    monkeypatch.setattr(infra, "flight_check", check)
    monkeypatch.setattr(infra, "create_table_artifact", lambda rows, **_: tables.append(rows))
    state: Any = infra.check.fn("here", str(profile))
    assert asked == [("here", 3)]
    assert [[row["name"], row["word"], row["detail"]] for row in tables[0]] == [
        ["store", "ok", "10 commits"],
        [last.name, last.word, last.detail],
    ]
    assert state.is_failed() is failed
    assert state.message == "store ok, rewards not set up" if not failed else "gpus" in state.message
