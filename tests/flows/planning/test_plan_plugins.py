"""Plugins that lie outside the package: found, validated and pinned by plans; refused where they were edited."""

import json
import re
import shutil
from pathlib import Path

import pytest

from cosmos_rl_core.errors import ConfigError
from cosmos_rl_core.outside_plugins import find
from flows.explaining import explain
from flows.library.lines import all_runs
from flows.planning.plan import Plan, Settings, freeze, plan_of, read_plan
from flows.planning.run import Run
from stages.execution import runner
from stages.execution.outcome import read_failures
from tests.outside import write_plugins, write_recipe

NAMES = {"algorithms": "nft2", "rewards": "bright", "datasets": "signs", "models": "tiny2"}


@pytest.fixture
def folder(tmp_path: Path):
    """A folder of plugins, which this process forgets afterwards."""
    write_plugins(tmp_path / "mine")
    yield tmp_path / "mine"
    find([])


@pytest.fixture
def recipe(folder: Path) -> str:
    """A recipe next to that folder, which names each plugin by a relative path."""
    return write_recipe(folder.parent, [f"mine/{name}" for name in ("nft2.py", "bright.py", "signs.py", "tiny2")])


def refused(recipe: str, *overrides: str) -> str:
    with pytest.raises(ConfigError) as error:
        plan_of(Settings(recipe, overrides=overrides))
    return str(error.value)


def frozen(recipe: str) -> tuple[Plan, str]:
    url = str(Path(recipe).parent / "store")
    return freeze(plan_of(Settings(recipe, url, run_id="mine")), url), url


def test_a_plan_pins_the_files_of_every_kind(recipe: str, folder: Path):
    plan = plan_of(Settings(recipe))
    assert {pin.kind: pin.name for pin in plan.plugins} == NAMES
    files = {pin.name: sorted(pin.files) for pin in plan.plugins}
    assert files["tiny2"] == ["tiny2/__init__.py", "tiny2/model.py"]
    assert files["bright"] == ["bright.py"]
    assert {pin.path for pin in plan.plugins if pin.kind != "models"} == {str(file) for file in folder.glob("*.py")}
    assert plan.model.adapter == "tiny2"
    assert f"signs of datasets, {folder / 'signs.py'}\n" in explain.explain_plan(plan, "outputs")


def test_their_settings_are_validated_with_all_others(recipe: str):
    said = refused(
        recipe,
        "train.train_policy.nft_beta=-1.0",
        "train.train_policy.dataset.cuont=3",
        'rewards=[{ fn = { name = "bright", factor = 0.0 } }]',
        "train.seed=-1",
    )
    assert "train.train_policy.nft_beta: Input should be greater than 0" in said
    assert "train.train_policy.dataset.cuont: unknown key; did you mean 'count'?" in said
    assert "rewards.0.fn.factor: Input should be greater than 0" in said
    assert "train.seed: Input should be greater than or equal to 0" in said


@pytest.mark.parametrize("edited", ["nft2.py", "bright.py", "signs.py", "tiny2/__init__.py", "tiny2/model.py"])
def test_a_resume_names_the_file_that_was_edited(edited: str, recipe: str, folder: Path):
    _, url = frozen(recipe)
    frozen(recipe)
    with (folder / edited).open("a", encoding="utf-8") as file:
        file.write("# edited\n")
    with pytest.raises(ConfigError, match=rf"{folder / edited}: found sha256 \w{{12}}, planned sha256 \w{{12}}"):
        frozen(recipe)
    # Looking at the run needs no equal files.
    assert read_plan(url, "mine").recipe.train.train_policy.type == "nft2"


def test_a_new_or_a_missing_file_of_a_plugin_is_named_too(recipe: str, folder: Path):
    (folder / "tiny2" / "notes.txt").write_text("as planned", encoding="utf-8")
    frozen(recipe)
    (folder / "tiny2" / "notes.txt").rename(folder / "tiny2" / "more.txt")
    with pytest.raises(ConfigError) as error:
        frozen(recipe)
    assert f"{folder / 'tiny2' / 'notes.txt'}: found no file, planned sha256 " in str(error.value)
    assert re.search(rf"{folder / 'tiny2' / 'more.txt'}: found sha256 \w+, planned no file", str(error.value))


def test_a_request_names_the_plugins_of_its_stage_and_its_runner_refuses_an_edited_one(recipe: str, folder: Path):
    plan, url = frozen(recipe)
    run = Run(plan, url)
    assert run.prepared.embed.plugins == plan.plugins
    request = folder.parent / "embed" / "request.json"
    request.parent.mkdir()
    request.write_text(run.prepared.embed.model_dump_json(), encoding="utf-8")
    with (folder / "tiny2" / "model.py").open("a", encoding="utf-8") as file:
        file.write("# edited\n")
    assert runner.main([str(request)]) == 64
    (failure,) = read_failures(request.parent)
    assert f"{folder / 'tiny2' / 'model.py'}: found sha256" in failure.message


@pytest.mark.parametrize("source", ["this is not Python", None], ids=["broken", "removed"])
def test_a_stage_does_not_run_a_plugin_that_it_cannot_verify(source: str | None, recipe: str, folder: Path):
    run = Run(*frozen(recipe))
    (request := folder.parent / "request.json").write_text(run.prepared.embed.model_dump_json(), encoding="utf-8")
    file = folder / "bright.py"
    file.unlink() if source is None else file.write_text(source, encoding="utf-8")
    assert runner.main([str(request)]) == 64
    (failure,) = read_failures(request.parent)
    assert f"{file}: found {'no file' if source is None else 'sha256'}" in failure.message


def test_shared_artifacts_depend_on_the_plugins_that_made_them(recipe: str, folder: Path):
    before = Run(*frozen(recipe)).prepared.embed
    with (folder / "tiny2" / "model.py").open("a", encoding="utf-8") as file:
        file.write("# edited\n")
    url = str(folder.parent / "store")
    after = Run(freeze(plan_of(Settings(recipe, url, run_id="other")), url), url).prepared.embed
    assert before.slot != after.slot
    with (folder / "bright.py").open("a", encoding="utf-8") as file:
        file.write("# edited\n")
    again = Run(freeze(plan_of(Settings(recipe, url, run_id="another")), url), url).prepared.embed
    assert again.slot == after.slot


def test_runs_with_plugins_of_one_name_are_listed_together(recipe: str, folder: Path):
    """A process knows one of them at a time, and `runs` reads many runs at once."""
    shutil.copytree(folder, other := folder.with_name("other"))
    paths = json.dumps([str(other / name) for name in ("nft2.py", "bright.py", "signs.py", "tiny2")])
    for number in range(8):
        overrides = (f"plugins={paths}",) if number % 2 else ()
        plan = plan_of(Settings(recipe, url := str(folder.parent / "store"), f"run{number}", overrides=overrides))
        freeze(plan, url)
    assert {(line.state, line.error) for line in all_runs(str(folder.parent / "store"))} == {("idle", "")}


BREAKS = {
    "ends the process": ("bright.py", "import sys\nsys.exit(0)\n", "bright.py cannot be imported: SystemExit: 0"),
    "fails in its prompts": (
        "signs.py",
        "def prompts(options):\n    return {}['no']\n",
        "dataset plugin {folder}/signs.py: KeyError: 'no'",
    ),
    "fails in its constructor": (
        "bright.py",
        "class Reward:\n    def __init__(self, options):\n        open('/nowhere/weights')\n",
        "reward plugin {folder}/bright.py: FileNotFoundError: [Errno 2] No such file or directory: '/nowhere/weights'",
    ),
    "lacks a method": (
        "bright.py",
        "class Reward:\n    version = '1'\n    def __init__(self, options): pass\n",
        "reward plugin {folder}/bright.py: AttributeError: 'Reward' object has no attribute 'check_prompt'",
    ),
    "has no version": (
        "bright.py",
        "class Reward(Reward):\n    version = property(lambda self: 1, lambda self, value: None)\n",
        "version must be a string, found 1",
    ),
    "imports the file next to it": (
        "bright.py",
        "import signs\n",
        "make a folder bright/ with __init__.py of both and write `from . import`",
    ),
    "imports a helper as if it were a package": (
        "bright.py",
        "from .signs import prompts\n",
        "a file alone is no package: make a folder bright/ with __init__.py and the helper in it",
    ),
    "says no needs": (
        "nft2.py",
        "class Algorithm:\n    def __init__(self, options): pass\n",
        "algorithm plugin {folder}/nft2.py: AttributeError: 'Algorithm' object has no attribute 'needs'",
    ),
    "says its needs in another form": (
        "nft2.py",
        "class Algorithm(Algorithm):\n    needs = property(lambda self: {'train_on': [0]}, lambda self, needs: None)\n",
        "Algorithm.needs must be a Needs, found {{'train_on': [0]}}",
    ),
}


@pytest.mark.parametrize("what", BREAKS)
def test_a_plugin_that_fails_while_it_is_planned_with_is_named(what: str, recipe: str, folder: Path):
    name, addition, expected = BREAKS[what]
    with (folder / name).open("a", encoding="utf-8") as file:
        file.write(f"\n{addition}")
    assert expected.format(folder=folder) in refused(recipe)


WRONG_NEEDS = {
    "behaviour=OLD": ("behaviour='teacher'", "behaviour = 'teacher': expected one of ('current', 'old', 'reference')"),
    "roles=(CURRENT, BEHAVIOUR, REFERENCE) if": (
        "roles=(CURRENT, 'teacher') if",
        "roles: found 'teacher', expected of ('current', 'behaviour', 'old', 'reference')",
    ),
    "old_decay=options.old_decay": ("old_decay=None", "'old' is read, and old_decay = None says that there is no such"),
    "timesteps_fraction=options.timesteps_fraction": ("timesteps_fraction=3.0", "timesteps_fraction = 3.0: expected"),
    "off_policy=True": ("max_logp_drift=0.1", "max_logp_drift limits the drift of recorded steps; set train_on too"),
}


@pytest.mark.parametrize("old", WRONG_NEEDS)
def test_impossible_needs_are_reported_with_the_plugin(recipe: str, folder: Path, old: str):
    file, (new, expected) = folder / "nft2.py", WRONG_NEEDS[old]
    source = file.read_text(encoding="utf-8")
    assert source.count(old) == 1
    file.write_text(source.replace(old, new), encoding="utf-8")
    said = refused(recipe, "train.train_policy.kl_beta=0.1")
    assert f"algorithm plugin {file}" in said
    assert expected in said


@pytest.mark.parametrize("method", ["loss", "advantages"])
def test_an_algorithm_without_a_method_is_reported_with_the_plugin(recipe: str, folder: Path, method: str):
    file = folder / "nft2.py"
    file.write_text(file.read_text(encoding="utf-8").replace(f"def {method}(", f"def my_{method}("), encoding="utf-8")
    assert f"algorithm plugin {file}: TypeError: Algorithm has no method {method}" in refused(recipe)


OF_EACH = "return tuple(Prompt(id=prompt_id(text), text=text) for text in texts)"
WRONG_PROMPTS = {
    "return None": "prompts() must return a tuple of Prompt, found NoneType",
    "return texts": "prompts() must return a tuple of Prompt, found one of str: 'a sign that says",
    'return tuple(Prompt(id="same", text=text) for text in texts)': "prompts() gives 4 prompts the id 'same', such as",
    'return tuple(Prompt(id=prompt_id(t), text=t, metadata={"x": float("nan")}) for t in texts)': "as JSON",
    'return tuple(Prompt(id=prompt_id(t), text=t, metadata={"x": {1, 2}}) for t in texts)': "cannot be written as JSON",
}


@pytest.mark.parametrize("wrong", WRONG_PROMPTS)
def test_impossible_prompts_are_reported_with_the_plugin(recipe: str, folder: Path, wrong: str):
    file = folder / "signs.py"
    source = file.read_text(encoding="utf-8")
    assert source.count(OF_EACH) == 1
    file.write_text(source.replace(OF_EACH, wrong), encoding="utf-8")
    said = refused(recipe)
    assert f"dataset plugin {file}" in said
    assert WRONG_PROMPTS[wrong] in said


def test_a_model_that_the_recipe_names_replaces_the_shipped_one_of_its_class(recipe: str, folder: Path):
    spec, index = folder / "tiny2" / "__init__.py", folder.parent / "base" / "model_index.json"
    for file in (spec, index):
        text = file.read_text(encoding="utf-8")
        assert text.count("OtherPipeline") == 1
        file.write_text(text.replace("OtherPipeline", "StableDiffusion3Pipeline"), encoding="utf-8")
    plan = plan_of(Settings(recipe))
    assert plan.model.adapter == "tiny2"
    assert "(tiny2 in place of sd3, " in explain.explain_plan(plan, "outputs")
    named = ", ".join(f'"{folder / name}"' for name in ("nft2.py", "bright.py", "signs.py"))
    assert plan_of(Settings(recipe, overrides=(f"plugins=[{named}]",))).model.adapter == "sd3"


def test_a_pipeline_class_that_no_model_claims_lists_the_known_ones(recipe: str, folder: Path):
    spec = folder / "tiny2" / "__init__.py"
    spec.write_text(spec.read_text(encoding="utf-8").replace("OtherPipeline", "WanPipeline"), encoding="utf-8")
    assert "no model plugin for the pipeline class 'OtherPipeline'; known: Cosmos2" in refused(recipe)


def test_two_models_that_claim_one_class_are_refused(recipe: str, folder: Path):
    shutil.copytree(folder / "tiny2", folder / "tiny3")
    paths = json.dumps([str(folder / name) for name in ("nft2.py", "bright.py", "signs.py", "tiny2", "tiny3")])
    assert "the model plugins tiny2, tiny3 all claim 'OtherPipeline'" in refused(recipe, f"plugins={paths}")


WRONG_OPTIONS = {
    'some: set[str] = {"a", "b"}': "Options.some is a set, which has no order; use a tuple",
    'model_config = {"arbitrary_types_allowed": True}\n    odd: object = object()': "Options cannot be written as JSON",
}


@pytest.mark.parametrize("wrong", WRONG_OPTIONS)
def test_options_that_no_plan_can_hold_are_reported_with_the_plugin(recipe: str, folder: Path, wrong: str):
    file = folder / "bright.py"
    source, first = file.read_text(encoding="utf-8"), '    name: Literal["bright"]\n'
    assert source.count(first) == 1
    file.write_text(source.replace(first, f"{first}    {wrong}\n"), encoding="utf-8")
    said = refused(recipe)
    assert f"reward plugin {file}: {WRONG_OPTIONS[wrong]}" in said
