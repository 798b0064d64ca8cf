"""The store of commands and flows that are given none: the one of the environment, else ``outputs``."""

import json
from pathlib import Path
from typing import Any

import yaml

from flows.auditing.flow import audit
from flows.defaults import STORE_VARIABLE, store_of
from flows.library import open_run
from flows.preprocess import preprocess
from flows.stage import run as run_stage
from tests.flows.by_hand import whole_run
from tests.flows.cli.test_app import EVERY, LEAVES, invoke

ROOT = Path(__file__).parents[2]


def with_store() -> dict[tuple[str, ...], Any]:
    """The option of each command that has a store."""
    every = {names: [one for one in EVERY[names].params if one.name == "store"] for names in LEAVES}
    return {names: found[0] for names, found in every.items() if found}


def test_every_command_with_a_store_reads_the_variable():
    found = with_store()
    assert len(found) >= 15
    assert [names for names, option in found.items() if option.envvar != STORE_VARIABLE] == []


def test_commands_find_a_run_in_the_store_of_the_environment(recipe, tmp_path, monkeypatch):
    run = whole_run(recipe, tmp_path)
    monkeypatch.setenv(STORE_VARIABLE, run.store_url)
    monkeypatch.chdir(tmp_path)
    assert invoke("status", "hand", "--json").exit_code == 0
    assert invoke("runs").stdout.count("hand") == 1
    assert open_run("hand").id == "hand"
    # The option is stronger, and an empty variable is none.
    assert "no runs" in invoke("runs", "--store", tmp_path / "other").stdout
    monkeypatch.setenv(STORE_VARIABLE, "")
    assert str(tmp_path / "outputs") in invoke("runs").stdout


def test_a_plan_says_where_the_name_of_its_store_comes_from(recipe, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    def named(*options: str) -> tuple[str, str]:
        (line,) = [one for one in invoke("plan", recipe(), *options).stdout.splitlines() if one.startswith("store ")]
        return line.split()[1], line.partition("(store from ")[2]

    assert named()[0].startswith(str(tmp_path / "outputs"))
    assert named()[1] == "the default)"
    monkeypatch.setenv(STORE_VARIABLE, "elsewhere")
    assert named() == (f"{tmp_path}/elsewhere/runs/{planned_id(recipe())}", f"{STORE_VARIABLE})")
    assert named("--store", "given")[1] == "--store)"
    assert json.loads(invoke("plan", recipe(), "--json").stdout)["store_from"] == STORE_VARIABLE


def planned_id(path: str) -> str:
    return str(json.loads(invoke("plan", path, "--json").stdout)["run"])


def test_no_deployment_has_a_store_of_its_own():
    found = yaml.safe_load((ROOT / "deployments" / "prefect.yaml").read_text(encoding="utf-8"))["deployments"]
    assert len(found) > 20
    assert not [one["name"] for one in found if "store" in one.get("parameters", {})]


def test_a_flow_takes_the_store_of_the_process_that_it_runs_in(recipe, tmp_path, monkeypatch):
    run = whole_run(recipe, tmp_path)
    monkeypatch.setenv(STORE_VARIABLE, run.store_url)
    assert store_of(None) == run.store_url
    assert store_of("given") == "given"
    state: Any = audit.fn()
    assert " 1 run" in state.message
    for flow in (audit, preprocess, run_stage):
        assert flow.parameters.properties["store"]["default"] is None, flow.name
