"""Commands in messages and pages: pasted in any folder they do what the message says."""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from cosmos_rl_core.errors import ApprovalError, ConfigError, WarningError
from cosmos_rl_core.storage import store
from cosmos_rl_core.storage.sealed import seal
from flows.library import open_run
from flows.operations.export import export
from flows.planning import steps
from flows.planning.plan import Settings
from flows.reporting.collecting import Collected
from flows.terminal import commands
from flows.warning.decisions import decisions_on
from tests.flows.by_hand import whole_run
from tests.flows.test_cli import EVERY, invoke
from tests.flows.test_early_warning import LIMITS, Loop
from tests.hand_made import planned

COMMAND = re.compile(r"(?:cd \S+ && )?cosmos-flows [^`\n]*")


def words_of(text: str) -> list[str]:
    """The words of the first command of a text, after the name of the program; it is one that the parser takes."""
    found = COMMAND.search(text)
    assert found is not None, text
    words = shlex.split(found[0].rpartition("cosmos-flows ")[2])
    EVERY[words[0],].make_context(words[0], words[1:])
    return words


def limited(recipe, on_trip: str) -> str:
    return recipe(("statistics = false\n", LIMITS.replace("ON_TRIP", on_trip)))


def shown_in_the_report(loop: Loop) -> str:
    """The command that the page of the run has."""
    run = steps.open_run(loop.store, "hand")
    return commands.to_go_on(run, Collected(run, tripped=[loop.warning]).decided)


def test_what_a_limit_stopped_goes_on_with_the_printed_command(recipe, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    loop = Loop(Path(limited(recipe, "stop")).name, tmp_path)
    loop.store = "store"
    settings = Settings(loop.path, "store", "hand", overrides=("early_warning.on_trip=stop",))
    with pytest.raises(WarningError):
        loop.run()
    commands.keep(steps.open_run("store", "hand"), settings)
    with pytest.raises(WarningError) as stopped:
        loop.run()
    words = words_of(str(stopped.value).partition("or: ")[2])
    assert words[:4] == ["run", str(tmp_path / "tiny.toml"), "--store", str(tmp_path / "store")]
    assert words[-2:] == ["--set", "early_warning.on_trip=mark"]
    assert "early_warning.on_trip=stop" not in words
    assert shown_in_the_report(loop).endswith(" --set early_warning.on_trip=mark")
    monkeypatch.chdir("/")
    loop.path, loop.store = words[1], words[3]
    loop.run(words[-1])
    assert loop.made[-1] == "report"


def test_what_waits_for_approval_is_approved_and_goes_on_with_the_printed_command(recipe, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    loop = Loop(limited(recipe, "suspend"), tmp_path)
    loop.store = "store"
    with pytest.raises(ApprovalError) as asked:
        loop.run()
    commands.keep(steps.open_run("store", "hand"), Settings(loop.path, "store", "hand"))
    progress = {"end": "suspended", "error": ""}
    store.write(f"{tmp_path}/store/runs/hand/progress.json", seal("progress", progress))
    approve = f"cosmos-flows approve hand --store {tmp_path}/store && "
    assert shown_in_the_report(loop).startswith(f"{approve}cd {tmp_path} && cosmos-flows run {tmp_path}/tiny.toml ")
    status = invoke("status", "hand", "--store", "store").stdout
    monkeypatch.chdir("/")
    assert words_of(status.partition("to go on: ")[2]) == words_of(str(asked.value))
    assert invoke(*words_of(str(asked.value))).exit_code == 0
    loop.store = str(tmp_path / "store")
    assert decisions_on(loop.warning)[-1].word == "approved"


def test_a_command_to_run_works_from_any_folder(recipe, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "with space").mkdir()
    recipe(("num_iterations = 2", "num_iterations = 3"))
    text = commands.to_run(
        Settings("tiny.toml", "with space", overrides=["train.train_policy.dataset.local_dir=words"]), "pasted", 4
    )
    # What `plan` accepts is what `run` accepts; it starts nothing.
    pasted = text.replace("cosmos-flows run", f"{sys.executable} -m flows plan")
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])}
    ended = subprocess.run(
        ["bash", "-c", pasted], cwd="/", capture_output=True, text=True, env=environment, check=False
    )
    assert ended.returncode == 0, ended.stderr
    assert f"{tmp_path}/with space/runs/pasted (store from --store)" in ended.stdout
    assert "4 iterations" in ended.stdout


def test_other_messages_name_the_store_of_their_run(recipe, tmp_path, monkeypatch):
    run = planned(recipe(), tmp_path, run_id="hand")
    monkeypatch.chdir(tmp_path)
    said = []
    for work in (
        lambda: open_run("hand", "store").policy(1),
        lambda: export("store", "hand", str(tmp_path / "out"), "newest"),
    ):
        with pytest.raises(ConfigError) as refused:
            work()
        said.append(str(refused.value))
    said.append(invoke("replay", "hand", "--stage", "policy", "--store", "store").stderr)
    monkeypatch.chdir("/")
    for text in said:
        assert words_of(text) == ["status", "hand", "--store", run.store_url], text
        assert invoke(*words_of(text)).exit_code == 0


def test_the_report_names_the_command_for_its_cost(recipe, tmp_path, monkeypatch):
    run = whole_run(recipe, tmp_path)
    assert commands.about(run.store_url, "cost", "hand") == f"cosmos-flows cost hand --store {run.store_url}"
    monkeypatch.chdir(tmp_path)
    assert commands.about("store", "cost", "hand") == f"cosmos-flows cost hand --store {run.store_url}"
