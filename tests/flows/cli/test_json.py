"""JSON of commands: one document on stdout, with the keys that the page of commands names."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from cosmos_rl_core.storage import store
from flows.cli import app as cli
from flows.operations.pools import Objects
from tests.flows.by_hand import SECONDS, whole_run
from tests.flows.cli.test_app import EVERY, LEAVES
from tests.flows.ledger.test_ledger import written
from tests.flows.prepared import prepare
from tests.hand_made import planned

PAGE = (Path(__file__).parents[3] / "docs" / "json.md").read_text(encoding="utf-8")
WITHOUT = {
    ("schema",): "prints JSON and nothing else",
    ("reward-service", "serve"): "ends only when it is stopped",
}
"""Commands without `--json`, and why."""


def keys_on_page(command: str) -> list[str]:
    """The names in code in the row of a command, without those in brackets."""
    rows = [row.split(" | ") for row in PAGE.splitlines() if row.startswith("| `")]
    (keys,) = [keys for names, keys in rows if f"`{command}`" in names]
    return re.findall(r"`(\w+)`", re.sub(r"\(.*?\)", "", keys.partition(", with ")[0]))


def asked(*words: object) -> Any:
    """The document that a command prints."""
    ended = CliRunner().invoke(cli.app, [*map(str, words), "--json"])
    assert ended.exit_code == 0, ended.output
    return json.loads(ended.stdout)


def require_keys(found: Any, command: str) -> None:
    assert sorted(found) == sorted(keys_on_page(command))


@pytest.mark.parametrize("names", LEAVES, ids=" ".join)
def test_every_command_prints_json(names):
    options = {option for parameter in EVERY[names].params for option in parameter.opts}
    assert ("--json" in options) is (names not in WITHOUT)


def test_commands_without_json_output_exist():
    assert set(WITHOUT) <= set(LEAVES)


@pytest.mark.parametrize("names", [names for names in LEAVES if names not in WITHOUT], ids=" ".join)
def test_the_docs_name_the_keys_of_each_command(names):
    assert keys_on_page(" ".join(names))


def test_exported_weights_and_their_run_are_named(recipe, tmp_path):
    run = whole_run(recipe, tmp_path)
    found = asked("export", "hand", tmp_path / "out", "--best", "--store", run.store_url)
    require_keys(found, "export")
    (copied,) = found["copied"]
    assert copied == {"policy": 0, "directory": f"{tmp_path}/out/safetensors/step_0", "files": 1, "file": None}
    assert Path(copied["directory"]).is_dir()
    assert (found["best"]["k"], found["judged"], found["to_come"]) == (0, [0, 2], [])


def test_a_report_has_an_address(recipe, tmp_path):
    run = planned(recipe(), tmp_path, run_id="hand")
    found = asked("report", "hand", "--store", run.store_url)
    require_keys(found, "report")
    assert store.size(found["report"])


def test_commands_that_look_at_a_run_print_the_documented_keys(recipe, tmp_path):
    run = whole_run(recipe, tmp_path)
    written(run, SECONDS)
    at = ("--store", run.store_url)
    for command, options in (
        ("cost", ()),
        ("gc", ("--dry-run",)),
        ("delete", ("--dry-run",)),
        ("stop", ()),
        ("rerun", ("--stage", "report", "--dry-run")),
        ("fork", ("--at", "1", "--dry-run")),
    ):
        require_keys(asked(command, "hand", *options, *at), command)
    begun = planned(recipe(), tmp_path, run_id="begun")
    require_keys(asked("diff", "begun", "begun", *at), "diff")
    require_keys(asked("audit", "begun", *at), "audit")
    require_keys(asked("status", begun.plan.run_id, *at), "status RUN")
    require_keys(asked("plan", recipe(), *at), "plan")


def test_lists_have_the_documented_keys():
    require_keys(asked("shipped")[0], "shipped")


def test_the_runs_of_a_store_have_the_documented_keys(recipe, tmp_path):
    run = whole_run(recipe, tmp_path)
    (line,) = asked("runs", "--store", run.store_url)
    require_keys(line, "runs")


def test_commands_on_datasets_print_the_documented_keys(pictures, tmp_path):
    url = str(tmp_path / "store")
    prepare(pictures, url)
    settings = tmp_path / "clips.toml"
    settings.write_text(f'name = "clips"\n[sources.mine]\nname = "local"\nlocal_dir = "{pictures}"\n')
    found = asked("preprocess", settings, "--store", url)
    require_keys(found, "preprocess")
    assert (found["snapshot"], found["items"], found["new"], found["removed"]) == (1, 3, 0, 0)
    assert store.size(found["url"])
    found = asked("data", "show", "clips", "--store", url, "--output", tmp_path / "pages")
    require_keys(found, "data show")
    assert (found["items"], found["pages"]) == (3, [f"{tmp_path}/pages/1.html"])
    require_keys(asked("data", "gc", "--dry-run", "--store", url), "data gc")


def test_an_error_leaves_stdout_empty(tmp_path):
    for words in (["export", "nobody", "out"], ["report", "nobody"], ["sign", "nobody", "--key", "key.pem"]):
        ended = CliRunner().invoke(cli.app, [*words, "--store", str(tmp_path), "--json"])
        assert (ended.exit_code, ended.stdout) == (64, "")
        assert "nobody" in ended.stderr


def test_captions_in_files_are_counted(tmp_path):
    (tmp_path / "videos").mkdir()
    (tmp_path / "videos" / "a.mp4").touch()
    found = asked("data", "caption-files", tmp_path, "--prompt", "a robot")
    require_keys(found, "data caption-files")
    assert found == {"prompt": "a robot", "folder": f"{tmp_path}/metas", "created": 1, "total": 1}


def test_objects_of_a_server_have_the_documented_keys():
    require_keys(vars(Objects("cosmos", "process", {"checks": 1}, "gpus", 8, ["crashes"])), "infra init")
