"""`cosmos-flows check-plugin` in a folder that knows nothing of the repository: good plugins pass, broken ones fail."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from cosmos_rl_core.errors import ConfigError
from flows.plugin_checks import suite
from tests.flows.cli.test_json import require_keys
from tests.pages import ROOT, examples, write

OF_PAGES = ("redness.py", "signs.py", "rwr.py", "half_sde.py", "qwen2_vl.py")
MODELS = ROOT / "cosmos_rl_core" / "models"
MIXING = '''

class Mixing(ZImage):
    """Z-Image whose samples see each other."""

    def velocity(self, x_t, t, conditioning):
        """Predict, and add the mean of the batch."""
        found = super().velocity(x_t, t, conditioning)
        return found + 0.1 * found.mean(0, keepdim=True)


load = Mixing
'''
INHERITED = '''"""Redness by a class of another package."""

from elsewhere.scores import Base
from cosmos_rl_core.config.train import RewardOptions
from typing import Literal


class Options(RewardOptions):
    """None."""

    name: Literal["inherited"]


class Reward(Base):
    """All of it is inherited."""
'''
BASE = '''"""Scores of another project."""


class Base:
    """A reward."""

    def __init__(self, options):
        self.version = "1"

    def check_prompt(self, prompt):
        return None

    def score(self, samples, scale=1.0):
        return [{"inherited": scale * float(sample.pixels.mean())} for sample in samples]
'''
COUNTS = [
    ("return float(red", "self.seen += 1\n        return self.seen * float(red"),
    ('self.version = "1"', 'self.version, self.seen = "1", 0'),
]
WRONG = [
    (
        "from collections.abc import Callable\n",
        "from collections.abc import Callable\nfrom dataclasses import replace\n",
    ),
    ("    half =", "    wrong = lambda steps: [replace(step, push=0.9 * step.push) for step in steps]\n    half ="),
]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The plugins of the pages."""
    write(tmp_path, examples("reward.md", "dataset.md", "algorithm.md", "solver.md", "vlm.md", "model.md"))
    return tmp_path


def check_plugin(folder: Path, *words: str, expect: int = 0) -> "subprocess.CompletedProcess[str]":
    """The command, given in a folder."""
    environment = os.environ | {"PYTHONPATH": f"{ROOT}{os.pathsep}{folder}"}
    command = [sys.executable, "-P", "-m", "flows", "check-plugin", *words]
    ended = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    assert ended.returncode == expect, ended.stdout + ended.stderr
    return ended


def changed(folder: Path, name: str, *changes: tuple[str, str]) -> str:
    """Write a plugin of the pages once more, under the name ``bad_...``, with other texts in it."""
    text = (folder / name).read_text(encoding="utf-8").replace(f'["{name[:-3]}"]', f'["bad_{name[:-3]}"]')
    text = text.replace('{"redness":', '{"bad_redness":')
    for old, new in changes:
        assert old in text
        text = text.replace(old, new)
    (folder / f"bad_{name}").write_text(text, encoding="utf-8")
    return f"bad_{name}"


def of_kinds(found: dict[str, Any]) -> dict[str, int]:
    return {one["kind"]: one["passed"] for one in found["plugins"]}


def test_plugins_of_the_pages_and_inherited_ones_pass(folder: Path):
    """Also one whose every member is inherited from another package, with an argument of its own."""
    (folder / "inherited.py").write_text(INHERITED, encoding="utf-8")
    (folder / "elsewhere").mkdir()
    (folder / "elsewhere" / "scores.py").write_text(BASE, encoding="utf-8")
    found = json.loads(check_plugin(folder, *OF_PAGES, "inherited.py", "--json").stdout)
    require_keys(found, "check-plugin")
    assert found["failed"] == found["skipped"] == 0
    least = {"algorithms": 9, "rewards": 9, "datasets": 8, "solvers": 5, "vlms": 2}
    assert {kind: passed >= least[kind] for kind, passed in of_kinds(found).items()} == dict.fromkeys(least, True)
    assert {one["path"] for one in found["plugins"]} == {str(folder / name) for name in (*OF_PAGES, "inherited.py")}


def test_broken_plugins_fail_and_are_named_with_what_to_do(folder: Path):
    written = [
        changed(folder, "redness.py", *COUNTS),
        changed(folder, "rwr.py", ('{"weight": weight,', '{"weight": weight * float("nan"),')),
        changed(folder, "signs.py", ("prompt_id(text)", '"same"')),
        changed(folder, "half_sde.py", ("*quiet.steps[half:]", "*wrong(quiet.steps[half:])"), *WRONG),
    ]
    said = check_plugin(folder, "redness.py", *written, expect=1).stdout
    for file, sentence, advice in (
        ("bad_redness.py", "the same samples have the same scores the next time", "other numbers the second time"),
        ("bad_rwr.py", "metrics are a finite number a sample", "the metric 'weight' is [nan, nan, nan]"),
        ("bad_signs.py", "prompts are the same twice and have ids of their own", "prompt_id(text) makes one"),
        ("bad_half_sde.py", "steps lead to the sample", "check keep, push and recall"),
    ):
        assert f"FAILED {folder / file}: {sentence}" in said
        assert advice in said
    assert f"FAILED {folder / 'redness.py'}" not in said


def copied(model: str, folder: Path, *changes: tuple[str, str, str]) -> None:
    """Copy a shipped model to a folder, with other texts in its files."""
    shutil.copytree(MODELS / model, folder, ignore=shutil.ignore_patterns("__pycache__"))
    for file, old, new in changes:
        text = (folder / file).read_text(encoding="utf-8")
        assert old in text
        (folder / file).write_text(text.replace(old, new), encoding="utf-8")


def test_adapters_of_models_outside_the_tree_make_whole_runs(folder: Path):
    """Z-Image on texts, and FLUX.2 klein on prompts with a reference."""
    copied("z_image", folder / "my_image")
    copied("flux2_klein", folder / "my_edits")
    ended = check_plugin(folder, "my_image", "my_edits", "--only", "every stage (LoRA)", "--json")
    found = json.loads(ended.stdout)
    # Policy, embeddings, two exports that are evaluated, scored and shown, rollout, reward, update and report.
    waves = {"my_image": 14, "my_edits": 15}
    assert {one["name"]: one["passed"] for one in found["plugins"]} == waves
    assert found["failed"] == 0
    assert "policy-0001/evaluate-jpeg " in ended.stderr
    assert "policy-0001/evaluate-jpeg+evaluate-pixel_similarity " in ended.stderr


def test_models_that_make_no_run_fail_with_the_stage_and_its_error(folder: Path):
    copied("z_image", folder / "shapes", ("model.py", '_embeds": embeds.cpu()', '_embeds": embeds.cpu()[None]'))
    copied("flux2_klein", folder / "weights", ("tiny.py", "torch.manual_seed(seed)", 'raise ValueError("no weights")'))
    said = check_plugin(folder, "shapes", "weights", "--only", "every stage (all weights)", expect=1).stdout
    assert (
        f"FAILED {folder / 'weights'}: the stock pipeline loads the tiny pipeline\n    ValueError: no weights\n" in said
    )
    assert f"FAILED {folder / 'shapes'}: a tiny run goes through every stage (all weights): iteration-0000/rol" in said
    assert "    iteration-0000/rollout failed (crash): RuntimeError: Number of dimensions of repeat" in said
    assert "; log: " not in said
    velocity = next(
        number
        for number, line in enumerate((folder / "shapes" / "model.py").read_text(encoding="utf-8").splitlines(), 1)
        if "self.transformer(" in line
    )
    assert f"    {folder / 'shapes' / 'model.py'}:{velocity}\n" in said


def test_a_model_whose_facts_cannot_be_read_fails_with_the_line(folder: Path):
    copied("z_image", folder / "spec", ("__init__.py", 'transformer["cap_feat_dim"]', 'transformer["wide"]'))
    said = check_plugin(folder, "spec", "--only", "every stage (all weights)", expect=1).stdout
    assert "a tiny run goes through every stage (all weights): plan\n    KeyError: 'wide'\n" in said
    assert f"    {folder / 'spec' / '__init__.py'}:" in said


def test_a_model_that_reads_one_reference_alone_fails(folder: Path):
    copied(
        "flux2_klein", folder / "one", ("model.py", "for reference in references:", "for reference in references[:1]:")
    )
    said = check_plugin(folder, "one", "--only", "every reference counts", expect=1).stdout
    assert f"FAILED {folder / 'one'}: every reference counts and so does their order" in said


@pytest.mark.slow
@pytest.mark.parametrize(("name", "checks"), [("z_image", 100), ("flux2_klein", 115)])
def test_shipped_models_pass_everything_outside_the_tree(name: str, checks: int, folder: Path):
    """The suite with half precision and every case, and runs that train adapters and all weights."""
    copied(name, folder / "mine")
    found = json.loads(check_plugin(folder, "mine", "--json").stdout)
    assert (found["passed"] >= checks, found["failed"]) == (True, 0)


@pytest.mark.slow
def test_a_model_that_needs_three_references_passes(folder: Path):
    copied("flux2_klein", folder / "three", ("__init__.py", "References(most=8", "References(fewest=3, most=8"))
    said = check_plugin(folder, "three").stdout
    assert "121 passed, 0 failed" in said


def test_a_model_whose_velocity_mixes_its_batch_fails(folder: Path):
    copied("z_image", folder / "mixing")
    with (folder / "mixing" / "model.py").open("a", encoding="utf-8") as file:
        file.write(MIXING)
    said = check_plugin(folder, "mixing", "--only", "depend on its batch", expect=1).stdout
    assert f"FAILED {folder / 'mixing'}: a velocity does not depend on its batch (float32)" in said
    assert "0 passed, 2 failed" in said


@pytest.mark.slow
def test_the_model_of_the_page_passes_the_whole_suite(folder: Path):
    found = json.loads(check_plugin(folder, "aura_flow", "--json").stdout)
    assert (found["failed"], found["plugins"][0]["name"]) == (0, "aura_flow")
    assert found["passed"] > 70


def test_everything_that_a_check_lacks_is_named_at_once(folder: Path):
    needy = changed(folder, "redness.py", ("Field(default=1.0, ", "Field("))
    (folder / "aura_flow" / "tiny.py").unlink()
    ended = check_plugin(folder, needy, "aura_flow", "--set", "no_such=1", expect=64)
    assert ended.stdout == ""
    assert f"{folder / needy}: factor has no default; give --set factor=VALUE" in ended.stderr
    assert f"{folder / 'aura_flow' / 'tiny.py'} is missing: write a function save(folder, seed=0)" in ended.stderr
    assert "--set no_such: no plugin has such a setting" in ended.stderr


def test_a_path_that_is_no_plugin_is_refused(folder: Path):
    (folder / "other.py").write_text("x = 1\n", encoding="utf-8")
    said = check_plugin(folder, "signs.py", "other.py", expect=64).stderr
    assert "other.py defines the members of no plugin; expected" in said


def test_a_plugin_that_imports_torch_is_refused(folder: Path):
    heavy = changed(folder, "signs.py", ("from typing import Literal", "from typing import Literal\n\nimport torch"))
    said = check_plugin(folder, heavy, expect=64).stderr
    assert f"{heavy} imports torch, and so would every plan" in said


def test_words_that_match_no_check_are_an_error(folder: Path):
    said = check_plugin(folder, "signs.py", "--only", "no such words", expect=64).stderr
    assert "no check has 'no such words' in its sentence" in said


def test_without_pytest_the_extra_is_named(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(suite, "ENGINE", "no_such_package")
    with pytest.raises(ConfigError, match=r"pip install 'cosmos-rl-flows\[check\]'"):
        suite.run_suite(["x.py"], [], "", print)
