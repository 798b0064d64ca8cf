"""Commands in messages and pages: pasted in any folder they do what the message says."""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from cosmos_rl_core.errors import FREE_SPACE, ApprovalError, ArtifactError, ConfigError, UnavailableError, WarningError
from cosmos_rl_core.storage import store
from cosmos_rl_core.storage.sealed import seal
from flows.library import open_run
from flows.library.collected import Collected
from flows.library.exports import export
from flows.operations import preprocess as preprocessing
from flows.operations import show_data
from flows.planning import steps
from flows.planning.plan import Settings
from flows.reporting import writing
from flows.terminal import commands
from flows.warning.decisions import decisions_on
from stages.artifacts import snapshots
from stages.artifacts.artifact import Artifact, remaking
from stages.artifacts.pool import check_not_swept
from stages.artifacts.slots import drop, input_of
from tests.flows.by_hand import whole_run
from tests.flows.cli.test_app import EVERY, invoke
from tests.flows.operations.test_preprocess import config_of, prepare
from tests.flows.warning.test_warnings import LIMITS, Loop
from tests.hand_made import planned

COMMAND = re.compile(r"(?:cd \S+ && )?cosmos-flows [^`\n]*")


def words_of(text: str) -> list[str]:
    """The words of the first command of a text, after the name of the program; it is one that the parser takes."""
    found = COMMAND.search(text)
    assert found is not None, text
    words = shlex.split(found[0].rpartition("cosmos-flows ")[2])
    count = 1 if (words[0],) in EVERY else 2
    EVERY[tuple(words[:count])].make_context(" ".join(words[:count]), words[count:])
    return words


def limited(recipe, on_trip: str) -> str:
    return recipe(("statistics = false\n", LIMITS.replace("ON_TRIP", on_trip)))


def shown_in_the_report(loop: Loop) -> str:
    """The command that the page of the run has."""
    run = steps.read_run(loop.store, "hand")
    return commands.to_go_on(run, Collected(run, tripped=[loop.warning]).decided)


def test_a_run_that_a_limit_stopped_goes_on_with_the_printed_command(recipe, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    loop = Loop(Path(limited(recipe, "stop")).name, tmp_path)
    loop.store = "store"
    settings = Settings(loop.path, "store", "hand", overrides=("early_warning.on_trip=stop",))
    with pytest.raises(WarningError):
        loop.run()
    commands.keep(steps.read_run("store", "hand"), settings)
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


def test_a_suspended_run_is_approved_and_goes_on_with_the_printed_command(recipe, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    loop = Loop(limited(recipe, "suspend"), tmp_path)
    loop.store = "store"
    with pytest.raises(ApprovalError) as asked:
        loop.run()
    commands.keep(steps.read_run("store", "hand"), Settings(loop.path, "store", "hand"))
    progress = {"end": "suspended", "error": ""}
    store.write(f"{tmp_path}/store/runs/hand/progress.json", seal("progress", progress))
    approve = f"cosmos-flows approve hand --store {tmp_path}/store && "
    shown = shown_in_the_report(loop)
    assert shown.startswith(f"{approve}cd {tmp_path} && cosmos-flows run {tmp_path}/tiny.toml ")
    status = invoke("status", "hand", "--store", "store").stdout
    monkeypatch.chdir("/")
    told = status.partition("to go on: ")[2]
    assert told.strip() == shown
    assert words_of(told.partition(" && ")[0]) == words_of(str(asked.value))
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
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[3])}
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


def test_a_deleted_part_of_an_artifact_is_made_again_with_the_printed_command(recipe, tmp_path, monkeypatch):
    run = whole_run(recipe, tmp_path)
    for slot, words in (
        (run.slots.iteration(1, "update"), ["--stage", "update", "--iteration", "1"]),
        (run.slots.version(2, "evaluate"), ["--stage", "evaluate", "--iteration", "2"]),
    ):
        artifact = Artifact(input_of(slot))
        name = artifact.names()[-1]
        drop(slot, name.partition("/")[0])
        with pytest.raises(ArtifactError, match=r"was deleted, because") as gone:
            Artifact(input_of(slot)).read(name)
        monkeypatch.chdir("/")
        assert words_of(str(gone.value)) == ["rerun", "hand", *words, "--store", run.store_url]
        assert invoke(*words_of(str(gone.value)), "--dry-run").exit_code == 0


def test_an_artifact_outside_of_runs_has_no_command(tmp_path):
    assert remaking(str(tmp_path / "dataset" / "clips" / "parts" / "1")) == ""
    assert remaking(str(tmp_path / "slot")) == ""


def test_messages_on_datasets_name_their_store(pictures, store_url, monkeypatch):
    config = config_of(pictures, max_left_out=0.9)
    for name in ("0001", "0002"):
        (pictures / f"{name}.png").write_bytes(b"")
    monkeypatch.chdir(Path(store_url).parent)
    monkeypatch.setattr(preprocessing, "SHOWN", 1)
    said = prepare(config, pictures.parent, url=Path(store_url).name)
    assert "1 more left out" in said
    show = ["data", "show", "clips", "--store", store_url]
    assert words_of(said) == show
    with pytest.raises(ConfigError) as unknown:
        show_data.find(Path(store_url).name, "other")
    assert words_of(str(unknown.value)) == ["preprocess", "FILE", "--store", store_url]
    prepare(config, pictures.parent, url=store_url, verify=True, merge=True)
    snapshots.remove(store_url, "clips", 1)
    with pytest.raises(ConfigError, match="was removed") as removed:
        snapshots.Snapshot.read(store_url, "clips", 1)
    assert words_of(str(removed.value)) == show
    sweep = store.join(store_url, "dataset", "embeddings", "sweep")
    store.write(sweep, b"")
    with pytest.raises(UnavailableError) as swept:
        check_not_swept(store.join(store_url, "dataset"))
    assert words_of(str(swept.value)) == ["data", "gc", "--store", store_url]


def test_a_full_disk_names_a_command_with_a_store():
    assert words_of(FREE_SPACE) == ["gc", "RUN", "--store", "STORE"]


def test_a_page_that_cannot_be_written_names_its_run_and_store(recipe, tmp_path, monkeypatch):
    run = planned(recipe(), tmp_path, run_id="hand")
    monkeypatch.setattr(writing, "page", lambda *_, **__: 1 / 0)
    said: list[str] = []
    with writing.Pages(run, said.append):
        pass
    assert words_of(said[-1]) == ["report", "hand", "--store", run.store_url]


def test_the_command_to_go_on_keeps_the_option_remake(recipe, tmp_path):
    remaking_them = Settings(recipe(), str(tmp_path / "store"), remake=True)
    assert "--remake" in words_of(commands.to_run(remaking_them, "hand"))
    assert "--remake" not in commands.to_run(Settings(recipe(), "store"), "hand")


def test_the_report_names_the_command_for_its_cost(recipe, tmp_path, monkeypatch):
    run = whole_run(recipe, tmp_path)
    assert commands.about(run.store_url, "cost", "hand") == f"cosmos-flows cost hand --store {run.store_url}"
    monkeypatch.chdir(tmp_path)
    assert commands.about("store", "cost", "hand") == f"cosmos-flows cost hand --store {run.store_url}"
