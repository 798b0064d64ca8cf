"""The command line: its help, whose examples parse; its JSON; what it says to wrong words."""

import json
import re
import shlex
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner, Result

from cosmos_rl_core.errors import EXIT_CODES
from cosmos_rl_core.storage import store
from cosmos_rl_core.storage.sealed import seal
from flows.cli import app as cli
from flows.planning.plan import Settings, plan_of
from stages.artifacts.generations import invalidate
from tests.flows.by_hand import whole_run
from tests.hand_made import make_run, planned

ROOT = Path(__file__).parents[3]
SD3 = ROOT / "tests" / "core" / "upstream_recipes" / "stable-diffusion-3-5-medium-nft.toml"


def invoke(*words: object) -> Result:
    return CliRunner().invoke(cli.app, list(map(str, words)))


def commands(group: Any, names: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Every command and group, with the words that lead to it."""
    yield names, group
    for name, command in getattr(group, "commands", {}).items():
        yield from commands(command, (*names, name))


EVERY = dict(commands(typer.main.get_command(cli.app)))
LEAVES = [names for names, command in EVERY.items() if not hasattr(command, "commands")]


@pytest.mark.parametrize("names", EVERY, ids=" ".join)
def test_help_explains_each_command_in_one_line(names):
    ended = invoke(*names, "--help")
    assert ended.exit_code == 0
    first = (EVERY[names].help or "").strip().partition("\n\n")[0]
    assert first.endswith(".")
    assert "\n" not in first or names == ()
    assert len(first) < 120


@pytest.mark.parametrize("names", LEAVES, ids=" ".join)
def test_the_parser_accepts_every_example_of_the_help(names):
    title, *examples = (EVERY[names].epilog or "").split("\n\n")
    assert title == "Examples:"
    assert 1 <= len(examples) <= 3
    shown = " ".join(invoke(*names, "--help").stdout.split())
    for example in examples:
        assert example in shown
        program, *words = shlex.split(example)
        assert (program, tuple(words[: len(names)])) == ("cosmos-flows", names)
        # Makes a context, which parses and converts all words and refuses those that it does not know.
        EVERY[names].make_context(" ".join(names), words[len(names) :])


def test_every_exit_code_is_in_the_help():
    codes = re.search(r"Exit\s+codes:(.*?)\.\s", invoke("--help").stdout.replace("│", ""), re.DOTALL)
    assert codes is not None
    assert {str(code) for code in (0, *EXIT_CODES.values(), 70, 130, 143)} <= set(re.findall(r"\d+", codes[1]))


def test_a_plan_as_json_has_the_facts_of_its_text(recipe):
    path = recipe()
    ended = invoke("plan", path, "--json")
    found, plan = json.loads(ended.stdout), plan_of(Settings(path))
    assert found["run"] == plan.run_id
    assert found["recipe"] == plan.recipe.model_dump(mode="json")
    assert found["prompts"] == {"train": 4, "held_out": 0}
    assert found["stages"]["update"] == found["recipe"]["train"]["num_iterations"]
    total, trained = found["parameters"]["total"], found["parameters"]["trained"]
    assert 0 < trained < total
    assert found["writes"]["policy"] == {"current": 4 * trained, "old": 4 * trained, "optimizer": 8 * trained}
    update = next(stage for stage in found["memory"] if stage["stage"] == "update")
    assert update["rows"]["gradients"] == {"device": 4 * trained, "cpu": 0}
    (peaks,) = [line for line in invoke("plan", path).stdout.splitlines() if line.startswith("on the device")]
    # An export holds nothing there, for which people see no number.
    shown = [f"{peak / 2**20:.2f}" for stage in found["memory"] if (peak := stage["peak"]["device"])]
    assert peaks.split()[3:] == shown


def test_status_as_json_names_every_stage(recipe, tmp_path):
    run = whole_run(recipe, tmp_path)
    found = json.loads(invoke("status", "hand", "--store", run.store_url, "--json").stdout)
    assert (found["run"], found["state"], found["holder"], found["standing"]) == ("hand", "idle", None, 23)
    (reward,) = [stage for stage in found["stages"] if stage["name"] == "iteration-0001/reward-ocr"]
    assert reward == {
        "name": "iteration-0001/reward-ocr",
        "stage": "reward-ocr",
        "k": 1,
        "state": "stands",
        "why": "",
        "generation": 1,
        "attempts": 1,
        "seconds": 3.0,
        "reward": 0.25,
        "loss": None,
        "slot": run.slots.iteration(1, "reward-ocr"),
    }
    rewards = {"jpeg": 0.25, "ocr": 0.25}
    best = {"k": 0, "by": "held-out ocr", "figure": 0.25, "standard_error": None, "rewards": rewards, "passed": None}
    assert found["best"] == best
    assert invoke("status", "hand", "--store", run.store_url, "--json", "--watch").exit_code == 64


def test_rerun_and_gc_say_as_json_what_they_would_do_and_do_nothing(recipe, tmp_path):
    run = whole_run(recipe, tmp_path)
    options = ("hand", "--store", run.store_url, "--dry-run", "--json")
    assert json.loads(invoke("rerun", *options, "--stage", "evaluate", "--iteration", 2).stdout) == {
        "run": "hand",
        "name": "policy-0002/evaluate",
        "slot": run.slots.version(2, "evaluate"),
        "generation": 1,
        "committed": True,
        "dry_run": True,
        "shared": False,
        "below": [
            {"name": "policy-0002/evaluate-jpeg", "seconds": 3.0},
            {"name": "policy-0002/evaluate-ocr", "seconds": 3.0},
            {"name": "policy-0002/fragment", "seconds": 0.0},
            {"name": "report", "seconds": 5.0},
        ],
    }
    litter = store.join(run.slots.policy(0), "attempts", "dead", "w")
    store.write(litter, b"12345")
    policy = [{"name": "policy", "files": 1, "bytes": 5}]
    for hours, stages, kept in ((24.0, [], policy), (0.0, policy, [])):
        garbage = json.loads(invoke("gc", *options, "--older-than", hours).stdout)
        assert garbage.pop("bytes") >= 5 * len(stages)
        # What flows of this machine left, whoever started them.
        garbage.pop("folders")
        said = {"run": "hand", "url": run.url, "deleted": False, "older_than_h": hours}
        assert garbage == said | {"stages": stages, "kept": kept}
    assert store.size(litter) == 5
    assert json.loads(invoke("status", "hand", "--store", run.store_url, "--json").stdout)["standing"] == 23


def test_an_import_as_json_has_every_key_and_its_notes_go_to_stderr(tmp_path):
    output = tmp_path / "ours.toml"
    ended = invoke("import-recipe", SD3, "--json", "--output", output)
    found = json.loads(ended.stdout)
    assert ended.exit_code == 0
    assert f"written to {output}" in ended.stderr
    assert (found["schema"], found["mistakes"]) == ("diffusers", [])
    keys = {key["key"]: key for key in found["keys"]}
    assert keys["train.optm_lr"]["settings"] == {"train.optm_lr": found["values"]["train"]["optm_lr"]}
    planning = invoke("plan", SD3, "--json", "--set", f"train.train_policy.dataset.local_dir={tmp_path}")
    assert (planning.exit_code, planning.stdout) == (64, "")


def test_status_without_a_run_lists_the_stores_runs(recipe, tmp_path):
    run = whole_run(recipe, tmp_path)
    begun = planned(recipe(), tmp_path, run_id="begun")
    unreadable = store.join(store.absolute(run.store_url), "runs", "unreadable", "plan.json")
    store.write(unreadable, b"{")
    ended = invoke("status", "--store", run.store_url)
    assert ended.exit_code == 65, ended.stderr
    rows = [line.split() for line in ended.stdout.splitlines()]
    assert rows[:4] == [
        ["run", "algorithm", "state", "iterations", "reward", "left", "devices"],
        ["begun", "nft", "idle", "0/2"],
        ["hand", "nft", "idle", "2/2", *["held-out", "ocr", "0.250", "->", "0.250,", "jpeg", "0.250", "->", "0.250"]],
        ["unreadable", "damaged"],
    ]
    assert ended.stdout.splitlines()[4].startswith(f"unreadable is damaged: {unreadable} ")
    found = json.loads(invoke("status", "--store", begun.store_url, "--json").stdout)
    assert [line["run"] for line in found] == ["begun", "hand", "unreadable"]
    assert found[1] == {
        "run": "hand",
        "state": "idle",
        "algorithm": "nft",
        "iterations": 2,
        "num_iterations": 2,
        "reward_name": "held-out ocr",
        "reward": 0.25,
        "reward_error": None,
        "first_reward": 0.25,
        "first_reward_error": None,
        "rewards": {"ocr": [0.25, 0.25], "jpeg": [0.25, 0.25]},
        "left_s": None,
        "device_s": None,
        "error": "",
    }


def test_a_store_without_a_run_is_no_error(tmp_path):
    ended = invoke("status", "--store", tmp_path / "empty")
    assert (ended.exit_code, ended.stdout.count("\n")) == (0, 1)
    assert ended.stdout.startswith(f"the store {tmp_path / 'empty'} has no runs; start one")
    assert json.loads(invoke("status", "--store", tmp_path / "empty", "--json").stdout) == []


def test_the_list_shows_how_a_run_ended_and_its_newest_scores(recipe, tmp_path):
    run = make_run(recipe(), tmp_path)
    invalidate(run.slots.iteration(1, "reward-ocr"), 1, "test")
    invalidate(run.slots.iteration(1, "update"), 1, "test")
    progress = {"end": "failed", "error": "iteration-0001/update ended (killed):\nmore"}
    store.write(store.join(run.url, "progress.json"), seal("progress", progress))
    (found,) = json.loads(invoke("status", "--store", run.store_url, "--json").stdout)
    assert (found["state"], found["error"]) == ("failed", "iteration-0001/update ended (killed)")
    assert (found["iterations"], found["reward"]) == (1, 0.25)


def test_the_package_runs_as_a_module_and_tells_its_version():
    command = [sys.executable, "-m", "flows", "--version"]
    ended = subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT)
    assert ended.stdout == f"cosmos-flows {version('cosmos-rl-flows')}\n"


def test_the_exit_code_tells_the_kind_of_error_if_stderr_takes_no_text():
    """`/dev/full` is a device without room."""
    command = [sys.executable, "-m", "flows", "plan", "missing.toml"]
    with Path("/dev/full").open("w", encoding="utf-8") as full:
        assert subprocess.run(command, stderr=full, check=False, cwd=ROOT).returncode == 64


def test_usage_messages_name_the_program_however_it_was_started(main):
    code, shown, words = main("status", "--sotre", "x")
    assert (code, shown) == (64, "")
    assert "Usage: cosmos-flows status" in words


def test_completion_can_be_installed_and_completes_commands(main, monkeypatch, tmp_path):
    monkeypatch.setenv("_TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION", "1")
    monkeypatch.setenv("HOME", str(tmp_path))
    code, script, _ = main("--show-completion", "bash")
    assert (code, "_COSMOS_FLOWS_COMPLETE=complete_bash" in script) == (0, True)
    assert main("--install-completion", "bash")[0] == 0
    installed = (tmp_path / ".bash_completions" / "cosmos-flows.sh").read_text(encoding="utf-8")
    assert installed.strip() == script.strip()
    for name, value in {
        "_COSMOS_FLOWS_COMPLETE": "complete_bash",
        "COMP_WORDS": "cosmos-flows sta",
        "COMP_CWORD": "1",
    }.items():
        monkeypatch.setenv(name, value)
    assert main()[:2] == (0, "status\n")


def test_the_help_of_all_commands_has_the_line_of_each_command():
    for names, group in EVERY.items():
        context = typer.Context(group)
        for name in getattr(group, "commands", {}):
            assert group.get_command(context, name).help == EVERY[(*names, name)].help


WRONG = {
    "status --watch --store STORE": "--watch follows one run: add its id",
    "status --store foo://x": "Protocol not known: foo",
    "status nobody --store STORE": "there is no run 'nobody' in the store STORE; it has hand; name another --store",
    "status hnad --store STORE": "did you mean 'hand'?",
    "status hand --store STORE/elsewhere": "in the store STORE/elsewhere; it has no run at all; name another --store",
    "status hand --store foo://x": "Protocol not known: foo; a store is a directory or s3://bucket/prefix",
    "report hand --port 8090 --store STORE": "--host and --port belong to --serve",
    "report hand --serve --store STORE": "--serve shows all runs until it is stopped",
    "gc nobody --store STORE": "there is no run 'nobody'",
    "export nobody out --store STORE": "there is no run 'nobody'",
    "export hand out --store STORE": "hand has no export yet; run it",
    "rerun nobody --stage policy --store STORE": "there is no run 'nobody'",
    "rerun hand --stage rolout --iteration 0 --store STORE": "did you mean 'rollout'?",
    "rerun hand --stage rollout --iteration 9 --store STORE": "hand has no rollout of iteration 9; known: 0 to 1",
    "rerun hand --stage policy --store STORE": "policy of hand has no artifact and no unfinished one; just run it",
    "plan tiny/nft": "no file at tiny/nft; did you mean package:tiny/nft?",
    "plan configs/tiny/nft.toml --cluster eight-gpus": "no file at eight-gpus; did you mean package:eight-gpus?",
    "plan nosuch.toml": "no file at nosuch.toml; expected a TOML file such as configs/tiny/nft.toml",
    "run nosuch.toml": "no file at nosuch.toml",
    "plan RECIPE --set train.sed=1": "train.sed: unknown key; did you mean 'seed'?",
    "plan RECIPE --set trainseed": "cannot read override 'trainseed'; expected section.key=value",
    "plan RECIPE --set train.seed=x": "train.seed: Input should be a valid integer (found 'x')",
    "plan RECIPE --cluster nosuch.toml": "no file at nosuch.toml; expected a TOML file such as deployments/clusters",
    "plan RECIPE --store foo://x": "Protocol not known: foo",
    "plan RECIPE --run-id a/b": "run id 'a/b' must be letters, digits",
    "import-recipe nosuch.toml": "no file at nosuch.toml",
    "import-recipe RECIPE": "neither of cosmos-rl's schemas",
    "infra check --cluster nosuch.toml": "no file at nosuch.toml",
}
"""Command lines, and the words that stderr must have; each ends with 64."""


def test_a_wrong_command_line_gets_one_clear_message_and_no_traceback(recipe, tmp_path):
    run = planned(recipe(), tmp_path, run_id="hand")
    names = {"STORE": run.store_url, "RECIPE": recipe()}

    def filled(text: str) -> str:
        for name, value in names.items():
            text = text.replace(name, value)
        return text

    for line, words in WRONG.items():
        ended = invoke(*shlex.split(filled(line)))
        assert (ended.exit_code, ended.stdout) == (64, ""), line
        assert filled(words) in ended.stderr, line
        assert "Traceback" not in ended.stderr, line


def test_a_place_that_cannot_be_written_is_a_wrong_setting(recipe, tmp_path):
    run = whole_run(recipe, tmp_path)
    (tmp_path / "file").write_text("")
    ended = invoke("export", "hand", tmp_path / "file", "--store", run.store_url)
    assert ended.exit_code == 64
    assert f"cannot write {tmp_path / 'file'}" in ended.stderr


def test_a_damaged_lease_has_no_owner(recipe, tmp_path):
    run = planned(recipe(), tmp_path, run_id="hand")
    store.write(store.join(run.url, "lease", "1.json"), b"{")
    ended = invoke("status", "hand", "--store", run.store_url, "--json")
    assert ended.exit_code == 0
    assert json.loads(ended.stdout)["state"] == "idle"


def test_the_commands_are_listed_in_groups():
    shown = invoke("--help").stdout
    for title in ("Make and end runs", "Look at runs", "Prove and compare", "Data and rewards", "Keep the house"):
        assert f"─ {title} ─" in shown
    assert "─ Commands ─" not in shown


def test_every_package_tells_type_checkers_that_it_is_typed():
    root = Path(cli.__file__).parents[2]
    data = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["setuptools"]["package-data"]
    for package in ("flows", "stages", "cosmos_rl_core"):
        assert (root / package / "py.typed").read_bytes() == b""
        assert "py.typed" in data[package]
