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
from flows.checking import plugin_suite
from tests.flows.cli.test_json import require_keys
from tests.pages import ROOT, examples, write

OF_PAGES = ("redness.py", "signs.py", "rwr.py", "half_sde.py", "qwen2_vl.py")
Z_IMAGE = ROOT / "cosmos_rl_core" / "models" / "z_image"
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


def test_a_model_whose_velocity_mixes_its_batch_fails(folder: Path):
    shutil.copytree(Z_IMAGE, folder / "mixing", ignore=shutil.ignore_patterns("__pycache__"))
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


def test_everything_that_a_check_lacks_is_said_at_once(folder: Path):
    needy = changed(folder, "redness.py", ("Field(default=1.0, ", "Field("))
    (folder / "aura_flow" / "tiny.py").unlink()
    ended = check_plugin(folder, needy, "aura_flow", "--set", "no_such=1", expect=64)
    assert ended.stdout == ""
    assert f"{folder / needy}: factor has no default; give --set factor=VALUE" in ended.stderr
    assert f"{folder / 'aura_flow' / 'tiny.py'} is missing: write a function save(folder, seed=0)" in ended.stderr
    assert "--set no_such: no plugin has such a setting" in ended.stderr


def test_what_is_no_plugin_is_refused(folder: Path):
    (folder / "other.py").write_text("x = 1\n", encoding="utf-8")
    said = check_plugin(folder, "signs.py", "other.py", expect=64).stderr
    assert "other.py defines the members of no plugin; expected" in said


def test_a_plugin_that_imports_torch_is_refused(folder: Path):
    heavy = changed(folder, "signs.py", ("from typing import Literal", "from typing import Literal\n\nimport torch"))
    said = check_plugin(folder, heavy, expect=64).stderr
    assert f"{heavy} imports torch, and so would every plan" in said


def test_words_that_no_check_has_are_an_error(folder: Path):
    said = check_plugin(folder, "signs.py", "--only", "no such words", expect=64).stderr
    assert "no check has 'no such words' in its sentence" in said


def test_without_pytest_the_extra_is_named(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(plugin_suite, "ENGINE", "no_such_package")
    with pytest.raises(ConfigError, match=r"pip install 'cosmos-rl-flows\[check\]'"):
        plugin_suite.run_suite(["x.py"], [])
