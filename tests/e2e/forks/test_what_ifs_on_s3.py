"""What-ifs of a run on a real S3 server whose ranks share the weights, under another judge, from its middle on."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from flows.cli.app import app
from tests.e2e.flow_process import NO_PREFECT, PREFECT, RUN_ID, Flows
from tests.e2e.forks.test_forked_runs import SMALL
from tests.e2e.runs.test_s3_runs import FlowsOnS3
from tests.seaweed import started_seaweed

SHARDED = (*SMALL, "launch.dp_shard_size=2")
STRICTER = """
[[rewards]]
fn = { name = "ocr", line_width = 96 }
[[rewards]]
role = "gate"
min = -1.85
fn = { name = "jpeg" }
"""


def json_of(flows: Flows, *words: str) -> dict[str, object]:
    ended = CliRunner(env=flows.given).invoke(app, [*words, "--store", flows.store, "--json"])
    assert ended.exit_code == 0, ended.output
    return json.loads(ended.stdout)


@pytest.mark.slow
def test_settings_of_a_sharded_run_on_s3_are_judged_as_it_is_by_another_judge(tmp_path: Path) -> None:
    rewards = tmp_path / "rewards.toml"
    rewards.write_text(STRICTER, encoding="utf-8")
    with started_seaweed(tmp_path / "seaweed") as server:
        flows = FlowsOnS3(tmp_path / "flows", {}, server)
        flows.program, flows.recipe = NO_PREFECT, "configs/tiny/nft.toml"
        try:
            options = [word for one in SHARDED for word in ("--set", one)]
            flows.start(*options, "--iterations", "3").finish(timeout_s=900)
            words = ("what-if", RUN_ID, "--store", flows.store, "--iterations", "1-2", "--controls", "0")
            words = (*words, "--rewards", str(rewards), "--set", "train.optm_lr=3e-3", "--name", "judged")
            flows.start_command(PREFECT, *words).finish(timeout_s=900)
            server.fetch(flows.prefix, tmp_path / "fetched")
            numbers = json.loads((tmp_path / "fetched/studies/judged/numbers.json").read_text(encoding="utf-8"))
            itself, changed = numbers["settings"]
            assert itself["by"] == changed["by"] == "held-out weighted reward"
            assert [*itself["runs"][0]["figures"]] == ["3"]
            assert [*changed["runs"][0]["figures"]] == ["1", "3"]
            # The first update is on samples of the policy that it begins with.
            assert [*changed["runs"][0]["drifts"]] == ["2"]
            assert 0 < changed["drift"] < 0.05
            assert {(one["setting"], one["above"]) for one in numbers["differences"]} == {
                (changed["setting"], "as it was"),
                ("as it was", changed["setting"]),
            }
            for run in (RUN_ID, itself["runs"][0]["run"], changed["runs"][0]["run"]):
                assert json_of(flows, "audit", run)["faults"] == []
        finally:
            flows.kill_all()
