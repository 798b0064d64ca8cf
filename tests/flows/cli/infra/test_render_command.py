"""`cosmos-flows cluster render`: what it prints, and what it writes."""

import json
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from flows.cli import app as cli
from tests.flows.cli.test_json import require_keys


def asked(*words: object) -> str:
    """What a command prints."""
    ended = CliRunner().invoke(cli.app, ["cluster", "render", *map(str, words)])
    assert ended.exit_code == 0, ended.output
    return ended.stdout


def test_files_are_printed_or_written(tmp_path: Path):
    printed = asked("slurm", "package:ray")
    said = asked("slurm", "package:ray", "--out", tmp_path / "jobs")
    paths = [Path(line) for line in said.splitlines()]
    assert [path.name for path in paths] == ["cosmos-flows.sbatch", "cosmos-flows-rollout.sbatch"]
    assert printed == "".join(path.read_text() for path in paths)
    again = CliRunner().invoke(cli.app, ["cluster", "render", "slurm", "package:ray", "--out", str(tmp_path / "jobs")])
    assert (again.exit_code, again.stdout) == (64, "")
    assert "exists already" in again.stderr


@pytest.mark.parametrize(("out", "said"), [("file", "file exists, and is no folder"), ("file/jobs", "Not a directory")])
def test_a_file_in_place_of_the_folder_is_named(tmp_path: Path, out: str, said: str):
    (tmp_path / "file").touch()
    ended = CliRunner().invoke(cli.app, ["cluster", "render", "slurm", "package:ray", "--out", str(tmp_path / out)])
    assert (ended.exit_code, ended.stdout) == (64, "")
    assert said in ended.stderr


def test_manifests_are_one_stream_with_the_command_after_two_dashes():
    *_, job = yaml.safe_load_all(
        asked("kuberay", "package:ray", "--", "prefect", "worker", "start", "--pool", "cosmos")
    )
    (flow,) = job["spec"]["template"]["spec"]["containers"]
    assert flow["args"] == ["prefect", "worker", "start", "--pool", "cosmos"]


def test_json_has_the_documented_keys(tmp_path: Path):
    (found,) = json.loads(asked("kuberay", "package:ray", "--json"))
    require_keys(found, "cluster render")
    assert (found["name"], found["path"]) == ("cosmos-flows.yaml", None)
    (written,) = json.loads(asked("kuberay", "package:ray", "--json", "--out", tmp_path))
    assert Path(written["path"]).read_text() == written["text"] == found["text"]
